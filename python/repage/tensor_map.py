# SPDX-License-Identifier: Apache-2.0
"""Asks the CUDA driver whether it takes the tensor map of a TMA kernel for a virtual view.

TMA kernels hand the strides of a cache to ``cuTensorMapEncodeTiled``. Virtual views have strides
that no vLLM layout has: with several heads in HNC order the next page lies *before* the next head.
CUDA's documentation asks for strides below 2**40 that are multiples of 16 bytes (CUDA 13.0, cuda.h)
and does not order them; whether a driver does is asked here, host-side and in microseconds, before
a kernel is chosen. Nothing is read from or written to the device.

The maps of the kernels are data (`TENSOR_MAP_RULES`), each with the source it was read in.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from repage.errors import ArgumentError, DtypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from repage.plan import PagePlan

__all__ = [
    "TENSOR_MAP_RULES",
    "EncodedMap",
    "TensorMapProbe",
    "TensorMapRule",
    "encode_tensor_map",
    "probe_tensor_map",
]

Axis = Literal["content", "token", "head", "page"]
ProbeStatus = Literal["accepted", "refused", "not available"]

_MINIMUM_CAPABILITY = (9, 0)  # TMA: CUDA 13.0, cuda.h, cuTensorMapEncodeTiled
_SWIZZLES = {32: "32B", 64: "64B", 128: "128B"}
_DATA_TYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.uint8: "UINT8",
    torch.int8: "UINT8",
}


@dataclass(frozen=True)
class TensorMapRule:
    """How one kernel describes paged K (or V) to the tensor memory accelerator.

    Parameters
    ----------
    name, source : str
        The kernel; file and version in which the map was read.
    axes : tuple of {"content", "token", "head", "page"}
        Dimensions of the map, innermost first.
    box_tokens : int
        Tokens that one copy fetches at most; never more than a page has.
    l2_promotion : {"NONE", "L2_128B", "L2_256B"}
        Sector promotion that the kernel asks for.
    page_count, page_factor : int or None, int
        Pages that the map claims; None for those of the view, times `page_factor`.
    max_box_bytes : int, default 128
        Content bytes that one copy fetches at most, which also selects the swizzle.
    """

    name: str
    source: str
    axes: tuple[Axis, ...]
    box_tokens: int
    l2_promotion: Literal["NONE", "L2_128B", "L2_256B"]
    page_count: int | None = None
    page_factor: int = 1
    max_box_bytes: int = 128


TENSOR_MAP_RULES: Mapping[str, TensorMapRule] = {
    rule.name: rule
    for rule in (
        TensorMapRule(
            name="xqa",
            source=(
                "flashinfer-python 0.7.2.post1, csrc/xqa/tensorMap.cpp "
                "(makeTensorMapForPagedKVCache); tile of 64 tokens: csrc/xqa/mha_sm90.cu:68, 93"
            ),
            axes=("content", "head", "token", "page"),
            box_tokens=64,
            l2_promotion="NONE",
            page_count=2**31,
        ),
        TensorMapRule(
            name="trtllm-gen",
            source=(
                "flashinfer-python 0.7.2.post1, include/flashinfer/trtllm/fmha/kernelParams.h "
                "(makeTmaShapeStrideKv, buildNdTmaDescriptor); page count doubled: "
                "csrc/trtllm_fmha_kernel_launcher.cu"
            ),
            axes=("content", "token", "head", "page"),
            box_tokens=128,
            l2_promotion="L2_128B",
            page_factor=2,
        ),
        TensorMapRule(
            name="fa4-hd256",
            source=(
                "vllm 0.33.0, vllm_flash_attn/cute/sm100_hd256_2cta_fmha_forward.py:319-326 "
                "(paged K and V), 552-570 (make_tiled_tma_atom_B; the box is chosen by CuTe: this "
                "is the whole 128-token tile in swizzle atoms of 128 bytes)"
            ),
            axes=("content", "token", "head", "page"),
            box_tokens=128,
            l2_promotion="NONE",
        ),
    )
}
"""Tensor maps of the kernels that read pages with TMA, by kernel."""


@dataclass(frozen=True)
class EncodedMap:
    """Arguments of one ``cuTensorMapEncodeTiled`` call.

    Parameters
    ----------
    data_type, swizzle, l2_promotion : str
        Ends of the names of their enumerators, such as ``CU_TENSOR_MAP_SWIZZLE_128B``.
    address : int
        Global address, bytes.
    dims : tuple of int
        Elements per dimension, innermost first.
    strides : tuple of int
        Bytes per dimension, without the innermost one.
    box : tuple of int
        Elements that one copy fetches, per dimension.
    """

    data_type: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    l2_promotion: str

    def __str__(self) -> str:
        return (
            f"{self.data_type} dims {self.dims} strides {self.strides} bytes box {self.box} "
            f"swizzle {self.swizzle}"
        )


@dataclass(frozen=True)
class TensorMapProbe:
    """The driver's answer for one plan and kernel.

    Parameters
    ----------
    rule : str
        The kernel whose map was asked about.
    status : {"accepted", "refused", "not available"}
        "not available" when the driver could not be asked: that says nothing about the map.
    reason : str
        The CUDA error and the map, or why nobody could be asked; empty when accepted.
    maps : tuple of EncodedMap
        The maps of K and V.
    """

    rule: str
    status: ProbeStatus
    reason: str
    maps: tuple[EncodedMap, ...]

    @property
    def refused(self) -> bool:
        """Whether the driver was asked and said no: the plan must not reach this kernel."""
        return self.status == "refused"


def encode_tensor_map(
    plan: PagePlan,
    rule: TensorMapRule,
    *,
    head_dim: int,
    dtype: torch.dtype,
    base_address: int,
    content_offset: int = 0,
) -> EncodedMap:
    """Compute the tensor map that a kernel would build on a virtual view.

    Parameters
    ----------
    plan : PagePlan
        Pages of the layer.
    rule : TensorMapRule
        The kernel's map.
    head_dim, dtype : int, torch.dtype
        Elements of K (or V) of one head, of which the map covers one; their type.
    base_address : int
        Device address of the layer's first block, bytes.
    content_offset : int, default 0
        Elements from the start of a token's content to the part that the map covers: 0 for K,
        D_k for V.

    Returns
    -------
    EncodedMap

    Raises
    ------
    DtypeError
        When no tensor map has the element type, or its size is not the geometry's.
    ShapeError
        When the head does not fit the content of a token, or no copy can be shaped for it.
    ArgumentError
        When the address is negative.
    """
    if dtype not in _DATA_TYPES:
        raise DtypeError(f"dtype: expected one of {[*_DATA_TYPES]}, got {dtype}")
    geometry = plan.geometry
    size = dtype.itemsize
    if size != geometry.element_size:
        raise DtypeError(
            f"dtype: expected elements of {geometry.element_size} bytes as in the geometry, "
            f"got {dtype} of {size}"
        )
    if base_address < 0:
        raise ArgumentError(f"base_address: expected a device address, got {base_address}")
    if head_dim < 1 or (content_offset + head_dim) * size > geometry.content_bytes:
        raise ShapeError(
            f"head_dim: expected 1 .. {geometry.content_bytes // size - content_offset} elements "
            f"of the {geometry.content_bytes // size} in a token's content, got {head_dim}"
        )
    box_bytes = _box_bytes(head_dim * size, rule.max_box_bytes)
    head_stride = geometry.head_stride
    if geometry.num_heads == 1 and geometry.interior == "HNC":
        # As virtual_view writes it out.
        head_stride = plan.page_tokens * geometry.token_stride
    pages = rule.page_count or plan.num_virtual_pages * rule.page_factor
    extent = {
        "content": head_dim,
        "token": plan.page_tokens,
        "head": geometry.num_heads,
        "page": pages,
    }
    stride = {"token": geometry.token_stride, "head": head_stride, "page": plan.page_stride}
    box = {
        "content": box_bytes // size,
        "token": min(plan.page_tokens, rule.box_tokens),
        "head": 1,
        "page": 1,
    }
    return EncodedMap(
        data_type=_DATA_TYPES[dtype],
        address=base_address + content_offset * size,
        dims=tuple(extent[axis] for axis in rule.axes),
        strides=tuple(stride[axis] for axis in rule.axes if axis != "content"),
        box=tuple(box[axis] for axis in rule.axes),
        swizzle=_SWIZZLES[box_bytes],
        l2_promotion=rule.l2_promotion,
    )


def probe_tensor_map(
    plan: PagePlan,
    rule: TensorMapRule,
    *,
    head_dim: int,
    dtype: torch.dtype,
    base_address: int,
    capability: tuple[int, int] | None = None,
    driver: Any = None,
) -> TensorMapProbe:
    """Ask the driver whether it takes the K and V maps of a kernel on a virtual view.

    Parameters
    ----------
    plan, rule, dtype, base_address
        As in `encode_tensor_map`.
    head_dim : int
        Elements of K, and of V, of one head. V follows K in a token's content.
    capability : tuple of int or None, default None
        Compute capability of the device; None asks torch for the current one.
    driver : module or None, default None
        ``cuda.bindings.driver``; None imports it.

    Returns
    -------
    TensorMapProbe
        Never an exception about the device: a missing cuda-python, driver or device, one below
        SM90 and an unexpected answer are "not available", with the reason.

    Raises
    ------
    DtypeError, ShapeError, ArgumentError
        As `encode_tensor_map`: a call that no kernel would make.

    Notes
    -----
    Host-side only; safe during CUDA-graph capture. It initialises the driver in the calling
    process, so call it in the process that owns the device, not before a fork.
    """
    parts = (0, head_dim) if 2 * head_dim * dtype.itemsize <= plan.geometry.content_bytes else (0,)
    maps = tuple(
        encode_tensor_map(
            plan,
            rule,
            head_dim=head_dim,
            dtype=dtype,
            base_address=base_address,
            content_offset=offset,
        )
        for offset in parts
    )

    def answer(status: ProbeStatus, reason: str) -> TensorMapProbe:
        return TensorMapProbe(rule.name, status, reason, maps)

    if capability is None:
        if not torch.cuda.is_available():
            return answer("not available", "no CUDA device")
        capability = torch.cuda.get_device_capability()
    if capability < _MINIMUM_CAPABILITY:
        return answer(
            "not available", f"SM{capability[0]}{capability[1]} has no TMA, which came with SM90"
        )
    if driver is None:
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            return answer("not available", f"cuda-python cannot be imported: {error}")
    try:
        refusal = _first_refusal(driver, maps)
    except _NoAnswerError as error:
        return answer("not available", str(error))
    except Exception as error:  # a probe must never stop a server
        return answer("not available", f"{type(error).__name__}: {error}")
    return answer("accepted", "") if refusal is None else answer("refused", refusal)


class _NoAnswerError(Exception):
    """The driver did not get as far as looking at a map."""


def _box_bytes(content_bytes: int, limit: int) -> int:
    """Return the widest swizzle that tiles the content."""
    for width in sorted(_SWIZZLES, reverse=True):
        if width <= limit and content_bytes % width == 0:
            return width
    raise ShapeError(
        f"head_dim: expected a multiple of 32 bytes up to {limit}, got {content_bytes} bytes"
    )


def _first_refusal(driver: Any, maps: Sequence[EncodedMap]) -> str | None:
    success = driver.CUresult.CUDA_SUCCESS
    status = driver.cuInit(0)[0]
    if status != success:
        raise _NoAnswerError(f"cuInit: {_error_name(driver, status)}")
    for encoded in maps:
        status = _encode(driver, encoded)
        if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return f"cuTensorMapEncodeTiled: {_error_name(driver, status)} for {encoded}"
        if status != success:
            raise _NoAnswerError(f"cuTensorMapEncodeTiled: {_error_name(driver, status)}")
    return None


def _encode(driver: Any, encoded: EncodedMap) -> Any:
    rank = len(encoded.dims)
    status, _ = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{encoded.data_type}"),
        rank,
        encoded.address,
        [driver.cuuint64_t(size) for size in encoded.dims],
        [driver.cuuint64_t(stride) for stride in encoded.strides],
        [driver.cuuint32_t(size) for size in encoded.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{encoded.swizzle}"),
        getattr(
            driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{encoded.l2_promotion}"
        ),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return status


def _error_name(driver: Any, status: Any) -> str:
    name = getattr(status, "name", None)
    if isinstance(name, str):
        return name
    answer = driver.cuGetErrorName(status)[1]
    return answer.decode() if isinstance(answer, bytes) else str(answer)
