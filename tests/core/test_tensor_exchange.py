# SPDX-License-Identifier: Apache-2.0
"""DLPack's C exchange API from a library of our own: what torch's tensors never are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

import repage
from repage import _core, errors

PLAN = repage.PagePlan(
    repage.BlockGeometry.dense(
        "NHC", num_blocks=8, block_tokens=64, num_heads=2, content_bytes=32, block_stride=65_536
    ),
    16,
)
CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType
FLOAT = 2  # DLDataTypeCode
I32 = torch.int32


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class Table(ctypes.Structure):
    """DLPackExchangeAPI, with its header."""


Table._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("older", ctypes.POINTER(Table)),
    ("unused", ctypes.c_void_p * 3),
    ("read", READ),
    ("stream", STREAM),
)


@dataclass
class Tensor:
    """A tensor of the library: memory of torch's, described at will."""

    memory: torch.Tensor | None
    shape: Sequence[int]
    strides: Sequence[int] | None = None
    device: tuple[int, int] = (CPU, 0)
    dtype: tuple[int, int, int] = (0, 32, 1)
    byte_offset: int = 0
    readable: bool = True


def describe(tensor: Tensor, out) -> int:
    if not tensor.readable:
        return -1
    sizes = (ctypes.c_int64 * len(tensor.shape))(*tensor.shape)
    tensor.alive = sizes, None  # DLPack: the producer keeps shape and strides
    view = out.contents
    view.data = None if tensor.memory is None else tensor.memory.data_ptr()
    view.device_type, view.device_id = tensor.device
    view.ndim = len(tensor.shape)
    view.code, view.bits, view.lanes = tensor.dtype
    view.shape = sizes
    view.strides = None
    if tensor.strides is not None:
        steps = (ctypes.c_int64 * len(tensor.strides))(*tensor.strides)
        tensor.alive = sizes, steps
        view.strides = steps
    view.byte_offset = tensor.byte_offset
    return 0


@pytest.fixture
def offer() -> Iterator[Callable[..., Table]]:
    """Give `Tensor` an exchange API; returns a function that does."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    kept: list[object] = []

    def install(
        major: int = 1,
        older: Table | None = None,
        read: Callable[..., int] | None = describe,
        stream: Callable[..., int] = lambda _type, _id, _out: 0,
        name: bytes = b"dlpack_exchange_api",
    ) -> Table:
        table = Table(
            major,
            3,
            ctypes.pointer(older) if older is not None else None,
            (ctypes.c_void_p * 3)(),
            READ(read) if read is not None else READ(),
            STREAM(stream),
        )
        kept.extend((table, name))
        Tensor.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(table), name, None)
        return table

    yield install
    del Tensor.__dlpack_c_exchange_api__


class Pages:
    """A builder for two rows of three blocks, and its table."""

    def __init__(self, device: int = -1) -> None:
        self.table = torch.full((2, 12), -9, dtype=I32)
        self.builder = _core.TableBuilder(
            PLAN.page_map, self.table.data_ptr(), 0, 2, 3, 0, 1, device, Tensor
        )

    def untouched(self) -> bool:
        return bool((self.table == -9).all())


BLOCKS = torch.tensor([[99, 1, 2, 3], [98, 4, 5, 6]], dtype=I32)
EXPECTED = (BLOCKS[:, 1:].unsqueeze(-1) * 64 + torch.arange(4)).reshape(2, 12).int()


def test_missing_strides_mean_dense_and_data_begins_at_the_byte_offset(offer) -> None:
    offer()
    pages = Pages()
    dense = BLOCKS[:, 1:].contiguous()
    assert pages.builder.build(Tensor(dense, (2, 3))) == 2
    assert torch.equal(pages.table, EXPECTED)
    pages = Pages()
    assert pages.builder.build(Tensor(BLOCKS, (2, 3), (4, 1), byte_offset=4)) == 2
    assert torch.equal(pages.table, EXPECTED)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 3, 1)},
        {"shape": (3, 3)},
        {"shape": (2, 2)},
        {"strides": (1, 2)},
        {"dtype": (0, 64, 1)},
        {"dtype": (0, 32, 2)},
        {"dtype": (1, 32, 1)},
        {"dtype": (FLOAT, 32, 1)},
        {"device": (CUDA, 0)},
        {"device": (CUDA_HOST, 0)},
        {"readable": False},
        {"memory": None},
    ],
)
def test_other_tensors_are_left_alone(offer, changes: dict) -> None:
    offer()
    pages = Pages()
    fields = {"memory": BLOCKS, "shape": (2, 3), "strides": (4, 1), "byte_offset": 4} | changes
    assert pages.builder.build(Tensor(**fields)) == -1
    assert pages.untouched()


@pytest.mark.parametrize(
    "options", [{"major": 2}, {"major": 0}, {"read": None}, {"name": b"another_capsule"}]
)
def test_apis_that_cannot_be_used_read_nothing(offer, options: dict) -> None:
    offer(**options)
    pages = Pages()
    assert pages.builder.build(Tensor(BLOCKS, (2, 3), (4, 1), byte_offset=4)) == -1
    assert pages.untouched()


def test_an_older_table_of_the_known_version_is_found(offer) -> None:
    known = offer()

    def unknown(_tensor: Tensor, _out) -> int:
        raise AssertionError("called through a table of another version")

    offer(major=2, older=known, read=unknown)
    pages = Pages()
    assert pages.builder.build(Tensor(BLOCKS, (2, 3), (4, 1), byte_offset=4)) == 2
    assert torch.equal(pages.table, EXPECTED)


@pytest.mark.skipif(_core.CUDA_VERSION is None, reason="repage was built without CUDA kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses are not the device's")
def test_cuda_tensors_are_launched_on_their_librarys_stream(offer) -> None:
    """Without a device the launch fails, by which it shows that it was tried."""
    asked = []

    def stream(device_type: int, device: int, _out) -> int:
        asked.append((device_type, device))
        return 0

    offer(stream=stream)
    pages = Pages(device=1)
    tensor = Tensor(BLOCKS, (2, 3), (4, 1), device=(CUDA, 1), byte_offset=4)
    other = Tensor(BLOCKS, (2, 3), (4, 1), device=(CUDA, 0), byte_offset=4)
    assert pages.builder.build(other) == -1
    assert pages.builder.build(tensor, other) == -1
    assert asked == []
    with pytest.raises(errors.CudaLaunchError):
        pages.builder.build(tensor)
    assert asked == [(CUDA, 1)]
    assert pages.untouched()


@pytest.mark.skipif(_core.CUDA_VERSION is not None, reason="this build has CUDA kernels")
def test_cuda_tensors_in_a_build_without_cuda_are_left_to_the_caller(offer) -> None:
    offer()
    pages = Pages(device=0)
    assert pages.builder.build(Tensor(BLOCKS, (2, 3), (4, 1), device=(CUDA, 0))) == -1
    assert pages.untouched()


@pytest.mark.skipif(_core.CUDA_VERSION is None, reason="repage was built without CUDA kernels")
def test_without_a_stream_nothing_is_launched(offer) -> None:
    offer(stream=lambda _type, _device, _out: -1)
    pages = Pages(device=0)
    tensor = Tensor(BLOCKS, (2, 3), (4, 1), device=(CUDA, 0), byte_offset=4)
    assert pages.builder.build(tensor) == -1
    assert pages.untouched()
