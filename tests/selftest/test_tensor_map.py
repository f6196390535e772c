# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of TMA kernels: what would be encoded, and what becomes of the driver's answer."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real_driver

from repage.errors import ArgumentError, DtypeError, ShapeError
from repage.geometry import BlockGeometry
from repage.plan import PagePlan
from repage.selftest.result import Status
from repage.selftest.run import run_on, select_checks
from repage.selftest.target import Target
from repage.tensor_map import TENSOR_MAP_RULES, encode_tensor_map, probe_tensor_map

BASE = 0x7F0000000000


class Driver:
    """Stands in for ``cuda.bindings.driver``: its types and signature, another answer."""

    def __init__(self, answer: str = "CUDA_SUCCESS", init: str = "CUDA_SUCCESS") -> None:
        self._answers = {"encode": answer, "init": init}
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(real_driver, name)

    def cuInit(self, flags: int) -> tuple[Any]:  # noqa: N802
        assert flags == 0
        return (getattr(self.CUresult, self._answers["init"]),)

    def cuTensorMapEncodeTiled(self, *args: Any) -> tuple[Any, Any]:  # noqa: N802
        call = inspect.signature(real_driver.cuTensorMapEncodeTiled).bind(*args)
        self.calls.append(dict(call.arguments))
        return getattr(self.CUresult, self._answers["encode"]), real_driver.CUtensorMap()


def qwen(interior: str, *, heads: int = 2, head_dim: int = 256, page_tokens: int = 64) -> PagePlan:
    """Qwen3.6-35B-A3B with its DFlash drafter: packed blocks of 15 MiB."""
    return PagePlan(
        BlockGeometry.dense(
            interior,
            num_blocks=100,
            block_tokens=640,
            num_heads=heads,
            content_bytes=4 * head_dim,
            block_stride=15_728_640,
            element_size=2,
        ),
        page_tokens,
    )


def probe(plan: PagePlan, kernel: str = "xqa", **arguments: Any) -> Any:
    defaults = {"head_dim": 256, "dtype": torch.bfloat16, "base_address": BASE}
    defaults["capability"] = (9, 0)
    return probe_tensor_map(plan, TENSOR_MAP_RULES[kernel], **{**defaults, **arguments})


def test_the_map_of_xqa() -> None:
    """Dimensions content, head, token, page; with heads first the next page precedes the next
    head."""
    rule = TENSOR_MAP_RULES["xqa"]
    encoded = encode_tensor_map(
        qwen("HNC"), rule, head_dim=256, dtype=torch.bfloat16, base_address=BASE
    )
    assert encoded.dims == (256, 2, 64, 2**31)
    assert encoded.strides == (640 * 1024, 1024, 64 * 1024)
    assert (encoded.box, encoded.swizzle, encoded.data_type) == ((64, 1, 64, 1), "128B", "BFLOAT16")
    tokens_first = encode_tensor_map(
        qwen("NHC"), rule, head_dim=256, dtype=torch.bfloat16, base_address=BASE
    )
    assert tokens_first.strides == (1024, 2048, 64 * 2048)


def test_the_map_of_trtllm_gen() -> None:
    plan = qwen("HNC", page_tokens=128)
    encoded = encode_tensor_map(
        plan,
        TENSOR_MAP_RULES["trtllm-gen"],
        head_dim=256,
        dtype=torch.bfloat16,
        base_address=BASE,
        content_offset=256,
    )
    assert encoded.address == BASE + 512
    assert encoded.dims == (256, 128, 2, 2 * plan.num_virtual_pages)
    assert encoded.strides == (1024, 640 * 1024, 128 * 1024)
    assert (encoded.box, encoded.l2_promotion) == ((64, 128, 1, 1), "L2_128B")


def test_one_head_has_the_stride_that_the_view_writes_out() -> None:
    encoded = encode_tensor_map(
        qwen("HNC", heads=1),
        TENSOR_MAP_RULES["fa4-hd256"],
        head_dim=256,
        dtype=torch.bfloat16,
        base_address=BASE,
    )
    assert encoded.strides == (1024, 64 * 1024, 64 * 1024)


def test_fp8_maps_are_bytes() -> None:
    geometry = dataclasses.replace(qwen("NHC", head_dim=128).geometry, element_size=1)
    encoded = encode_tensor_map(
        PagePlan(geometry, 64),
        TENSOR_MAP_RULES["xqa"],
        head_dim=256,
        dtype=torch.float8_e4m3fn,
        base_address=BASE,
    )
    assert (encoded.data_type, encoded.box[0]) == ("UINT8", 128)


@pytest.mark.parametrize("kernel", TENSOR_MAP_RULES)
def test_accepted_maps(kernel: str) -> None:
    """K and V are both asked about, in the terms of the real binding."""
    driver = Driver()
    answer = probe(qwen("HNC"), kernel, driver=driver)
    assert (answer.rule, answer.status, answer.reason) == (kernel, "accepted", "")
    assert not answer.refused
    assert [call["globalAddress"] for call in driver.calls] == [BASE, BASE + 512]
    for call, encoded in zip(driver.calls, answer.maps, strict=True):
        assert call["tensorRank"] == 4
        assert tuple(map(int, call["globalDim"])) == encoded.dims
        assert tuple(map(int, call["globalStrides"])) == encoded.strides
        assert tuple(map(int, call["boxDim"])) == encoded.box
        assert len(call["elementStrides"]) == 4
        assert call["swizzle"].name == "CU_TENSOR_MAP_SWIZZLE_128B"
        assert call["tensorDataType"].name == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"


def test_a_refusal_has_the_error_and_the_strides() -> None:
    answer = probe(qwen("HNC"), driver=Driver("CUDA_ERROR_INVALID_VALUE"))
    assert answer.refused
    assert answer.reason.startswith("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE for BFLOAT16")
    assert "strides (655360, 1024, 65536) bytes" in answer.reason


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(init="CUDA_ERROR_NO_DEVICE"), "cuInit: CUDA_ERROR_NO_DEVICE"),
        (Driver("CUDA_ERROR_UNKNOWN"), "cuTensorMapEncodeTiled: CUDA_ERROR_UNKNOWN"),
        (object(), "AttributeError: "),
    ],
)
def test_errors_that_say_nothing_about_the_map(driver: Any, reason: str) -> None:
    answer = probe(qwen("NHC"), driver=driver)
    assert answer.status == "not available"
    assert answer.reason.startswith(reason)
    assert len(answer.maps) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_no_driver() -> None:
    """The real binding, on a machine without libcuda."""
    answer = probe(qwen("NHC"))
    assert answer.status == "not available"
    assert "driver" in answer.reason
    assert probe(qwen("NHC"), capability=None).reason == "no CUDA device"


def test_no_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    answer = probe(qwen("NHC"))
    assert answer.status == "not available"
    assert answer.reason.startswith("cuda-python cannot be imported")


def test_devices_before_hopper_have_no_tma() -> None:
    answer = probe(qwen("NHC"), capability=(8, 9), driver=Driver())
    assert (answer.status, answer.reason) == (
        "not available",
        "SM89 has no TMA, which came with SM90",
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": torch.int64}, DtypeError, "dtype: expected one of"),
        ({"dtype": torch.float32}, DtypeError, "elements of 2 bytes as in the geometry"),
        ({"head_dim": 513}, ShapeError, "head_dim: expected 1 .. 512 elements"),
        ({"head_dim": 0}, ShapeError, "head_dim: expected 1"),
        ({"head_dim": 72}, ShapeError, "a multiple of 32 bytes up to 128, got 144"),
        ({"base_address": -16}, ArgumentError, "base_address: expected a device address"),
    ],
)
def test_calls_that_no_kernel_makes(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        probe(qwen("NHC"), driver=Driver(), **arguments)


@pytest.mark.parametrize(
    ("driver", "status"),
    [
        (Driver(), Status.PASS),
        (Driver("CUDA_ERROR_INVALID_VALUE"), Status.FAIL),
        (Driver(init="CUDA_ERROR_NO_DEVICE"), Status.NOT_AVAILABLE),
    ],
)
def test_the_selftest_asks_for_every_kernel(driver: Driver, status: Status, target: Target) -> None:
    results = run_on(dataclasses.replace(target, driver=driver), select_checks(["tensor_map"]))
    assert [result.status for result in results] == [status] * 6
    if status is Status.PASS:
        assert all(result.measurements["overlapping"] > 0 for result in results)
