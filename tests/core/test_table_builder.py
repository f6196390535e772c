# SPDX-License-Identifier: Apache-2.0
"""The core reads tensors itself and takes only what fits; everything else gets a named check."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import repage
from repage import _core, errors
from support import oracle
from support.guarded import Guarded

GEOMETRY = repage.BlockGeometry.dense(
    "NHC", num_blocks=8, block_tokens=64, num_heads=2, content_bytes=32, block_stride=65_536
)
PLAN = repage.PagePlan(GEOMETRY, 16)
ROWS, WIDTH, PAGES, BLOCK_STEP = 3, 4, 4, 64
I32 = torch.int32
TABLE = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]], dtype=I32)
LENGTHS = torch.tensor([256, 65], dtype=I32)
INDPTR = torch.tensor([0, 5, 6], dtype=I32)
UNTOUCHED = -9


class Wrapped(torch.Tensor):
    """A subclass, which the core leaves to its caller."""


def builder(table: torch.Tensor, tensor_type: type = torch.Tensor) -> _core.TableBuilder:
    return _core.TableBuilder(
        PLAN.page_map, table.data_ptr(), 0, ROWS, WIDTH, 0, 1, table.get_device(), tensor_type
    )


def test_the_core_reads_tensors_without_the_caller() -> None:
    out = torch.full((ROWS, WIDTH * PAGES), UNTOUCHED, dtype=I32)
    wide = torch.full((2, 7), 99, dtype=I32)
    wide[:, :WIDTH] = TABLE
    indices = torch.full((6,), UNTOUCHED, dtype=I32)
    assert builder(out).build(wide[:, :WIDTH], LENGTHS, INDPTR, indices) == 2
    expected = (TABLE.unsqueeze(-1) * BLOCK_STEP + torch.arange(PAGES)).reshape(2, -1)
    expected[1, 2 * PAGES :] = 0
    assert torch.equal(out[:2], expected.int())
    assert (out[2] == UNTOUCHED).all()  # no row of an earlier batch to clear
    assert torch.equal(indices, torch.cat([expected[0, :5], expected[1, :1]]).int())


@pytest.mark.gpu
def test_the_core_reads_cuda_tensors_and_their_stream() -> None:
    out = torch.full((ROWS, WIDTH * PAGES), UNTOUCHED, dtype=I32, device="cuda")
    core = builder(out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what ran elsewhere would not wait for this
        table = TABLE.cuda(non_blocking=True)
        assert core.build(table, LENGTHS.cuda()) == 2
        expected = (table.unsqueeze(-1) * BLOCK_STEP + torch.arange(PAGES, device="cuda")).int()
        expected = expected.reshape(2, -1)
        expected[1, 2 * PAGES :] = 0
        assert torch.equal(out[:2], expected)
    assert core.build(TABLE, LENGTHS) == -1
    assert core.build(table, LENGTHS) == -1


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_list_alone_leaves_the_table(rows: int) -> None:
    """And may be of fewer rows."""
    out = torch.full((ROWS, WIDTH * PAGES), UNTOUCHED, dtype=I32)
    listed = torch.full((9,), UNTOUCHED, dtype=I32)
    assert builder(out).build_list(TABLE, INDPTR[: rows + 1], listed) == rows
    assert (out == UNTOUCHED).all()
    expected = [64, 65, 66, 67, 128, 320][: int(INDPTR[rows])]
    assert listed.tolist() == expected + [UNTOUCHED] * (9 - len(expected))


LISTS_NOT_TAKEN: list[tuple[tuple[object, ...], type[errors.RepageError], str]] = [
    (([[1]], INDPTR, INDPTR), errors.DtypeError, "block_table: expected a torch.Tensor"),
    ((TABLE.long(), INDPTR, INDPTR), errors.DtypeError, "block_table: expected dtype"),
    ((TABLE, None, INDPTR), errors.DtypeError, "kv_indptr: expected a torch.Tensor"),
    ((TABLE, INDPTR[0], INDPTR), errors.ShapeError, "kv_indptr: expected 1 dim"),
    ((TABLE, torch.zeros(4, dtype=I32), INDPTR), errors.ShapeError, "kv_indptr: expected 3"),
    ((TABLE, INDPTR[:0], INDPTR), errors.ShapeError, "kv_indptr: expected 1 elements for 0"),
    ((TABLE, INDPTR, INDPTR.long()), errors.DtypeError, "out: expected dtype"),
    ((TABLE, INDPTR, TABLE), errors.ShapeError, "out: expected 1 dim"),
]


@pytest.mark.parametrize(("tensors", "error", "message"), LISTS_NOT_TAKEN)
def test_lists_that_do_not_fit(
    tensors: tuple[object, ...], error: type[errors.RepageError], message: str
) -> None:
    assert builder(torch.zeros((ROWS, WIDTH * PAGES), dtype=I32)).build_list(*tensors) == -1
    buffer = repage.PageTableBuffer(PLAN, ROWS, WIDTH, torch.device("cpu"))
    with pytest.raises(error, match=message):
        buffer.build_kv_indices(*tensors)


@given(oracle.pools(), st.data())
def test_a_buffer_lists_what_the_function_lists(
    device: str, pool: oracle.Pool, data: st.DataObject
) -> None:
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    buffer = repage.PageTableBuffer(pool.plan, rows, width, torch.device(device))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    block_table = rng.integers(-1, pool.num_blocks + 1, (rows, width), dtype=np.int32)
    listed = data.draw(st.integers(0, rows))
    most = width * pool.pages_per_block + 2
    kv_indptr = np.cumsum([0, *rng.integers(0, most, listed)], dtype=np.int32)
    out = Guarded((int(kv_indptr[-1]),), I32, device, shift=data.draw(st.integers(0, 3)))
    buffer.build_kv_indices(
        torch.from_numpy(block_table).to(device),
        torch.from_numpy(kv_indptr).to(device),
        out.tensor,
    )
    empty = np.zeros(int(kv_indptr[-1]), dtype=np.int32)
    expected = oracle.kv_indices(pool.page_ids(), block_table[:listed], kv_indptr, empty)
    assert np.array_equal(out.tensor.cpu().numpy(), expected)
    assert not buffer.table.any()
    out.assert_untouched_around()


def test_the_rows_of_a_table_are_one_view() -> None:
    buffer = repage.PageTableBuffer(PLAN, ROWS, WIDTH, torch.device("cpu"))
    assert buffer.first_rows(2) is buffer.build(TABLE)
    for rows in (-1, ROWS + 1):
        with pytest.raises(errors.ShapeError, match=rf"rows: expected 0 \.\. 3, got {rows}"):
            buffer.first_rows(rows)


@pytest.mark.parametrize("rows", [0, 1])
def test_strides_that_no_element_uses_do_not_count(rows: int) -> None:
    """A row of a transposed table, a length of a strided list: dense all the same."""
    out = torch.zeros((ROWS, WIDTH * PAGES), dtype=I32)
    table = torch.ones((2, WIDTH), dtype=I32)[::2][:rows]
    lengths = torch.full((6,), 64, dtype=I32)[::5][:rows]
    assert builder(out).build(table, lengths) == rows


NOT_TAKEN: list[tuple[str, tuple[object, ...], type[errors.RepageError], str]] = [
    ("a list", ([[1]],), errors.DtypeError, "block_table: expected a torch.Tensor"),
    ("nothing", (None,), errors.DtypeError, "block_table: expected a torch.Tensor"),
    ("an array", (TABLE.numpy(),), errors.DtypeError, "block_table: expected a torch.Tensor"),
    ("int64", (TABLE.long(),), errors.DtypeError, "block_table: expected dtype torch.int32"),
    ("float32", (TABLE.float(),), errors.DtypeError, "block_table: expected dtype torch.int32"),
    ("uint32", (TABLE.to(torch.uint32),), errors.DtypeError, "block_table: expected dtype"),
    ("bool", (TABLE.bool(),), errors.DtypeError, "block_table: expected dtype"),
    ("one row", (TABLE[0],), errors.ShapeError, "block_table: expected 2 dimensions"),
    ("columns", (TABLE[:, :3],), errors.ShapeError, "exactly 4 columns"),
    ("rows", (TABLE.repeat(2, 1),), errors.ShapeError, "at most 3 rows"),
    ("transposed", (torch.ones((4, 2), dtype=I32).T,), errors.ContiguityError, "dense columns"),
    ("sparse", (TABLE.to_sparse(),), errors.ContiguityError, "got layout torch.sparse_coo"),
    ("meta", (TABLE.to("meta"),), errors.DeviceError, "block_table: expected a CPU or CUDA"),
    ("long lengths", (TABLE, LENGTHS.long()), errors.DtypeError, "seq_lens: expected dtype"),
    ("one length", (TABLE, LENGTHS[:1]), errors.ShapeError, "seq_lens: expected one length"),
    ("a column", (TABLE, LENGTHS.view(2, 1)), errors.ShapeError, "seq_lens: expected 1 dim"),
    ("strided", (TABLE, torch.ones(4, dtype=I32)[::2]), errors.ContiguityError, "seq_lens"),
    ("an int", (TABLE, 5), errors.DtypeError, "seq_lens: expected a torch.Tensor"),
    ("meta lengths", (TABLE, LENGTHS.to("meta")), errors.DeviceError, "seq_lens: expected a CPU"),
    ("one list", (TABLE, None, INDPTR), errors.DtypeError, "kv_indices: expected"),
    ("the other", (TABLE, None, None, INDPTR), errors.DtypeError, "kv_indptr: expected"),
    ("short", (TABLE, None, INDPTR[:2], INDPTR), errors.ShapeError, "kv_indptr: expected 3"),
    ("long list", (TABLE, None, INDPTR, INDPTR.long()), errors.DtypeError, "kv_indices"),
    ("strided list", (TABLE, None, INDPTR, torch.ones(8, dtype=I32)[::2]),
     errors.ContiguityError, "kv_indices"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [case[1:] for case in NOT_TAKEN],
    ids=[case[0] for case in NOT_TAKEN],
)
def test_what_does_not_fit_is_left_alone_and_then_named(
    tensors: tuple[object, ...], error: type[errors.RepageError], message: str
) -> None:
    out = torch.full((ROWS, WIDTH * PAGES), UNTOUCHED, dtype=I32)
    assert builder(out).build(*tensors) == -1
    assert (out == UNTOUCHED).all()
    buffer = repage.PageTableBuffer(PLAN, ROWS, WIDTH, torch.device("cpu"))
    names = ("block_table", "seq_lens", "kv_indptr", "kv_indices")
    with pytest.raises(error, match=message):
        buffer.build(**dict(zip(names, tensors, strict=False)))
    assert not buffer.table.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.as_subclass(Wrapped),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    ],
    ids=["subclass", "parameter"],
)
def test_other_tensor_types_give_the_same_table(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Through the named checks, as with a torch that has no exchange API (before 2.10)."""
    tables, lists = [], []
    for convert in (lambda tensor: tensor, change):
        buffer = repage.PageTableBuffer(PLAN, ROWS, WIDTH, torch.device("cpu"), lookahead=1)
        buffer.build(convert(TABLE))
        indices = torch.zeros(6, dtype=I32)
        buffer.build(
            convert(TABLE[1:]),
            convert(LENGTHS[1:]),
            kv_indptr=convert(INDPTR[:2]),
            kv_indices=convert(indices),
        )
        tables.append(buffer.table)
        lists.append(indices)
    assert torch.equal(*tables)
    assert torch.equal(*lists)
    assert tables[0].any()
    assert not tables[0][1:].any()


def test_a_type_without_an_exchange_api_is_never_read() -> None:
    out = torch.full((ROWS, WIDTH * PAGES), UNTOUCHED, dtype=I32)
    assert builder(out, tensor_type=np.ndarray).build(TABLE.numpy()) == -1
    assert builder(out, tensor_type=np.ndarray).build(TABLE) == -1
    assert (out == UNTOUCHED).all()


def test_reading_keeps_no_reference() -> None:
    out = torch.zeros((ROWS, WIDTH * PAGES), dtype=I32)
    table, lengths = TABLE.clone(), LENGTHS.clone()
    before = sys.getrefcount(table), sys.getrefcount(lengths), sys.getrefcount(torch.Tensor)
    core = builder(out)
    for _ in range(100):
        core.build(table, lengths)
    del core
    assert before == (
        sys.getrefcount(table), sys.getrefcount(lengths), sys.getrefcount(torch.Tensor)
    )  # fmt: skip
