# SPDX-License-Identifier: Apache-2.0
"""Every check runs, on CPU tensors and the stand-ins of the attention kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from repage.selftest.attention import PATHS
from repage.selftest.result import Check, Status
from repage.selftest.run import all_checks
from repage.selftest.target import Target

NEED_A_DEVICE = ("ops.graph", "tensor_map.")
ON_CPU = [check for check in all_checks() if not check.name.startswith(NEED_A_DEVICE)]


@pytest.mark.parametrize("check", ON_CPU, ids=lambda check: check.name)
def test_passes(check: Check, target: Target) -> None:
    result = check.run(target)
    assert result.status is Status.PASS, result.detail


@pytest.mark.parametrize("name", ["fa2-decode.NHD.hd128", "xqa-decode.HND.hd256"])
def test_full_sizes(name: str, target: Target) -> None:
    (check,) = (check for check in ON_CPU if check.name == f"attention.{name}")
    result = check.run(dataclasses.replace(target, quick=False))
    assert result.status is Status.PASS, result.detail
    pages, heads = (5 if "fa2" in name else 4), 2
    assert result.measurements["combinations"] == pages * heads


def test_the_paths_and_cases_that_are_promised() -> None:
    names = {check.name for check in all_checks()}
    for path in PATHS:
        for layout in ("NHD", "HND"):
            for case in ("hd128", "hd256", "overlapping-pages", "window"):
                assert f"attention.{path.name}.{layout}.{case}" in names
    for kernel in ("xqa", "trtllm-gen", "fa4-hd256"):
        assert {f"tensor_map.{kernel}.NHC", f"tensor_map.{kernel}.HNC"} <= names
    assert len(names) == len(all_checks())


def test_graphs_need_a_device(target: Target) -> None:
    (check,) = (check for check in all_checks() if check.name == "ops.graph")
    result = check.run(target)
    assert (result.status, result.detail) == (
        Status.NOT_AVAILABLE,
        "a CUDA graph needs a CUDA device, got cpu",
    )


def test_kernels_of_another_device_are_not_available(target: Target) -> None:
    ampere = dataclasses.replace(target, capability=(8, 0))
    results = {check.name: check.run(ampere) for check in ON_CPU if ".NHD.hd128" in check.name}
    assert results["attention.fa2-decode.NHD.hd128"].status is Status.PASS
    for name in ("fa3-decode", "fa3-prefill", "xqa-decode"):
        result = results[f"attention.{name}.NHD.hd128"]
        assert result.status is Status.NOT_AVAILABLE
        assert "this is SM80" in result.detail


def test_a_missing_package_is_not_available() -> None:
    bare = Target(torch.device("cpu"), (9, 0), None, "flashinfer is not installed")
    (check,) = (check for check in ON_CPU if check.name == "attention.fa2-decode.NHD.hd128")
    result = check.run(bare)
    assert (result.status, result.detail) == (Status.NOT_AVAILABLE, "flashinfer is not installed")


def test_a_kernel_that_was_not_built_is_not_available(target: Target) -> None:
    class NotBuiltError(Exception):
        pass

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise NotBuiltError("no such module")

    assert target.attention is not None
    kernels = dataclasses.replace(
        target.attention, xqa_decode=refuse, missing_module_errors=(NotBuiltError,)
    )
    (check,) = (check for check in ON_CPU if check.name == "attention.xqa-decode.NHD.hd128")
    result = check.run(dataclasses.replace(target, attention=kernels))
    assert result.status is Status.NOT_AVAILABLE
    assert "no such module" in result.detail
