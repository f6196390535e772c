# SPDX-License-Identifier: Apache-2.0
"""Bad input: typed errors that name the argument, never a crash or a silent cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import repage
from repage import errors

PLAN = repage.PagePlan(
    repage.BlockGeometry.dense(
        "NHC", num_blocks=8, block_tokens=64, num_heads=2, content_bytes=32, block_stride=65_536
    ),
    16,
)
I32, I64 = torch.int32, torch.int64
TABLE = torch.zeros((2, 3), dtype=I32)
LENGTHS = torch.ones(2, dtype=I32)
INDPTR = torch.zeros(3, dtype=I32)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: repage.build_page_table([[1]], PLAN), errors.DtypeError, "block_table: expected a torch.Tensor"),
        (lambda: repage.build_page_table(TABLE.long(), PLAN), errors.DtypeError, "block_table: expected dtype torch.int32, got torch.int64"),
        (lambda: repage.build_page_table(TABLE[0], PLAN), errors.ShapeError, r"block_table: expected 2 dimensions, got shape \(3,\)"),
        (lambda: repage.build_page_table(torch.zeros((3, 2), dtype=I32).T, PLAN), errors.ContiguityError, "block_table: expected dense columns"),
        (lambda: repage.build_page_table(TABLE.to(META), PLAN), errors.DeviceError, "block_table: expected a CPU or CUDA tensor"),
        (lambda: repage.build_page_table(TABLE, PLAN, seq_lens=LENGTHS.long()), errors.DtypeError, "seq_lens"),
        (lambda: repage.build_page_table(TABLE, PLAN, seq_lens=LENGTHS[:1]), errors.ShapeError, "seq_lens: expected one length for each of the 2 rows"),
        (lambda: repage.build_page_table(TABLE, PLAN, seq_lens=torch.ones(4, dtype=I32)[::2]), errors.ContiguityError, "seq_lens"),
        (lambda: repage.build_page_table(TABLE, PLAN, seq_lens=LENGTHS.to(META)), errors.DeviceError, "seq_lens"),
        (lambda: repage.build_page_table(TABLE, PLAN, lookahead=-1), errors.ShapeError, "lookahead"),
        (lambda: repage.build_page_table(TABLE, PLAN, out=torch.zeros((2, 13), dtype=I32)), errors.ShapeError, "out: expected at least 2 rows of exactly 12 columns"),
        (lambda: repage.build_page_table(TABLE, PLAN, out=torch.zeros((1, 12), dtype=I32)), errors.ShapeError, "out: expected at least 2 rows"),
        (lambda: repage.build_page_table(TABLE, PLAN, out=torch.zeros((2, 24), dtype=I32)[:, ::2]), errors.ContiguityError, "out"),
        (lambda: repage.build_page_table(TABLE, PLAN, out=torch.zeros((2, 12), dtype=I64)), errors.DtypeError, "out"),
        (lambda: repage.build_kv_indices(TABLE, INDPTR.long(), PLAN), errors.DtypeError, "kv_indptr"),
        (lambda: repage.build_kv_indices(TABLE, INDPTR[:2], PLAN), errors.ShapeError, "kv_indptr: expected 3 elements for 2 rows"),
        (lambda: repage.build_kv_indices(TABLE, INDPTR, PLAN, out=torch.zeros((2, 2), dtype=I32)), errors.ShapeError, "out"),
        (lambda: repage.map_slots(torch.zeros(3, dtype=I32), PLAN), errors.DtypeError, "slot_mapping"),
        (lambda: repage.map_slots(torch.zeros((3, 1), dtype=I64), PLAN), errors.ShapeError, "slot_mapping"),
        (lambda: repage.map_slots(torch.zeros(6, dtype=I64)[::2], PLAN), errors.ContiguityError, "slot_mapping"),
        (lambda: repage.map_slots(torch.zeros(3, dtype=I64), PLAN, out=torch.zeros(2, dtype=I64)), errors.ShapeError, "out: expected 3 elements, got 2"),
        (lambda: repage.last_page_len(LENGTHS.float(), 16), errors.DtypeError, "seq_lens"),
        (lambda: repage.last_page_len(LENGTHS, 0), errors.GeometryError, "page_tokens"),
        (lambda: repage.last_page_len(LENGTHS, 16, out=torch.zeros(3, dtype=I32)), errors.ShapeError, "out"),
        (lambda: repage.PageTableBuffer(PLAN, -1, 3, torch.device("cpu")), errors.ShapeError, "max_rows"),
        (lambda: repage.PageTableBuffer(PLAN, 1, 2**31, torch.device("cpu")), errors.ShapeError, "2\\*\\*31 - 1 columns"),
        (lambda: repage.PageTableBuffer(PLAN, 1, 3, torch.device("cpu")).build(TABLE), errors.ShapeError, "block_table: expected at most 1 rows"),
        (lambda: repage.PageTableBuffer(PLAN, 2, 4, torch.device("cpu")).build(TABLE), errors.ShapeError, "exactly 4 columns"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    call: Callable[[], object], error: type[errors.RepageError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (torch.zeros(4, 2, 8), errors.ShapeError, "kv_cache"),
        (torch.zeros(0, 2, 8, 16), errors.ShapeError, "kv_cache: expected a non-empty"),
        (torch.zeros(4, 2, 8, 32)[..., ::2], errors.UnsupportedLayoutError, "content dimension"),
        (torch.zeros(1, 2, 8, 16).expand(4, 2, 8, 16), errors.UnsupportedLayoutError, "distinct"),
    ],
)
def test_caches_that_no_kernel_could_page(
    cache: torch.Tensor, error: type[errors.RepageError], message: str
) -> None:
    with pytest.raises(error, match=message):
        repage.BlockGeometry.from_tensor(cache)


def test_a_view_wants_the_cache_that_was_planned() -> None:
    cache, other = torch.zeros(4, 2, 64, 16), torch.zeros(5, 2, 64, 16)
    plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 16)
    with pytest.raises(errors.GeometryError, match="made for another cache"):
        repage.virtual_view(other, plan)


GEOMETRY = {
    "num_blocks": 4,
    "block_tokens": 64,
    "num_heads": 2,
    "content_bytes": 32,
    "block_stride": 4096,
    "head_stride": 32,
    "token_stride": 64,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "at least 1"),
        ({"block_tokens": -64}, "block_tokens: expected 0 .. 2"),
        ({"block_tokens": 2**31}, r"block_tokens must be below 2\*\*31"),
        ({"block_tokens": 64.0}, "block_tokens: expected an int, got 64.0"),
        ({"num_heads": True}, "num_heads: expected an int"),
        ({"block_stride": 0}, "block_stride and token_stride"),
        ({"token_stride": 0}, "block_stride and token_stride"),
        ({"num_blocks": 2**40, "block_stride": 2**40}, "63 bits"),
        ({"block_stride": 2**63}, "block_stride: expected 0 .."),
        ({"head_stride": 2**62}, "63 bits"),
        ({"element_size": 0}, "element_size"),
        ({"element_size": 64}, "content_bytes: expected a multiple of element_size"),
        ({"storage_bytes": 4 * 4096 - 1}, "ends at byte 16384, but the allocation has 16383"),
        ({"storage_bytes": 4 * 4096, "base_offset": 16}, "ends at byte 16400"),
    ],
)
def test_geometries_that_cannot_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(errors.GeometryError, match=message):
        repage.BlockGeometry(**(GEOMETRY | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interior": "CNH"}, "interior: expected NHC, HNC or HLNC, got 'CNH'"),
        ({"num_heads": 0}, "num_heads: expected an int from 1"),
        ({"block_tokens": 2**30, "content_bytes": 2**40}, "below 2"),
    ],
)
def test_interiors_that_cannot_be(changes: dict[str, object], message: str) -> None:
    sizes = {
        "interior": "NHC",
        "num_blocks": 4,
        "block_tokens": 64,
        "num_heads": 2,
        "content_bytes": 32,
        "block_stride": 4096,
    }
    with pytest.raises(errors.GeometryError, match=message):
        repage.BlockGeometry.dense(**(sizes | changes))


@pytest.mark.parametrize("page_tokens", [0, -16, 48, 2**63, 16.0])
def test_pages_that_do_not_divide(page_tokens: int) -> None:
    with pytest.raises(errors.GeometryError, match="page_tokens"):
        repage.PagePlan(PLAN.geometry, page_tokens)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PLAN.page(8, 0),
        lambda: PLAN.page(-1, 0),
        lambda: PLAN.page(0, 4),
        lambda: PLAN.locate_token(-1),
        lambda: PLAN.locate_token(2**31),
        lambda: PLAN.map_slot(2**63),
    ],
)
def test_numbers_out_of_range(call: Callable[[], int]) -> None:
    with pytest.raises(errors.GeometryError, match="expected"):
        call()


def test_page_ids_that_int32_tables_cannot_hold() -> None:
    geometry = repage.BlockGeometry.dense(
        "NHC", num_blocks=2**29, block_tokens=64, num_heads=1, content_bytes=16, block_stride=8192
    )
    plan = repage.PagePlan(geometry, 1)
    assert plan.max_page_id == (2**29 - 1) * 512 + 63
    with pytest.raises(errors.GeometryError, match="page tables hold int32 ids"):
        repage.build_page_table(TABLE, plan)
    with pytest.raises(errors.GeometryError, match="page tables hold int32 ids"):
        repage.PageTableBuffer(plan, 1, 1, torch.device("cpu"))


@pytest.mark.skipif(repage.build_info().cuda, reason="this build has CUDA kernels")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_in_a_build_without_cuda() -> None:
    with pytest.raises(errors.CudaUnavailableError, match="REPAGE_CUDA=ON"):
        repage.build_page_table(TABLE.cuda(), PLAN)


def test_every_error_is_a_repage_error() -> None:
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(types) > 10
    assert all(issubclass(error, errors.RepageError) for error in types)
