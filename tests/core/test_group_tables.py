# SPDX-License-Identifier: Apache-2.0
"""Both forms of one attention group from one call: the 2-D table and the CSR list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import repage
from repage.errors import DtypeError, PageIdError, ShapeError
from support import oracle
from support.guarded import Guarded

NOT_WRITTEN = -7


@given(oracle.pools(), st.data())
def test_one_call_writes_what_two_would(
    device: str, pool: oracle.Pool, data: st.DataObject
) -> None:
    max_rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 7))
    buffer = repage.PageTableBuffer(pool.plan, max_rows, width, torch.device(device))
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(0, max_rows))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        block_table = rng.integers(-1, pool.num_blocks + 1, (rows, width), dtype=np.int32)
        seq_lens = rng.integers(-1, width * pool.block_tokens + 3, rows, dtype=np.int32)
        pages = -(-np.maximum(seq_lens, 0) // pool.page_tokens)
        begin = data.draw(st.integers(0, 3))
        kv_indptr = np.cumsum([begin, *pages], dtype=np.int32)
        size = max(int(kv_indptr[-1]) + data.draw(st.integers(-2, 3)), 0)
        out = Guarded((size,), torch.int32, device, shift=data.draw(st.integers(0, 3)))
        out.tensor.fill_(NOT_WRITTEN)
        given_tables = torch.from_numpy(block_table).to(device)
        lengths = torch.from_numpy(seq_lens).to(device)
        indptr = torch.from_numpy(kv_indptr).to(device)
        result = buffer.build(
            given_tables, lengths, kv_indptr=indptr, kv_indices=out.tensor, check_ids=False
        )
        table = oracle.page_table(
            pool.page_ids(), block_table, seq_lens, pool.block_tokens, table_rows=max_rows
        )
        listed = oracle.kv_indices(
            pool.page_ids(), block_table, kv_indptr, np.full(size, NOT_WRITTEN, dtype=np.int32)
        )
        assert np.array_equal(buffer.table.cpu().numpy(), table)
        assert result.shape == (rows, width * pool.pages_per_block)
        assert np.array_equal(out.tensor.cpu().numpy(), listed)
        out.assert_untouched_around()

        out.tensor.fill_(NOT_WRITTEN)
        fresh = repage.build_page_table(
            given_tables,
            pool.plan,
            seq_lens=lengths,
            kv_indptr=indptr,
            kv_indices=out.tensor,
            check_ids=False,
        )
        assert np.array_equal(fresh.cpu().numpy(), table[:rows])
        assert np.array_equal(out.tensor.cpu().numpy(), listed)
        out.assert_untouched_around()


def test_wide_rows_are_shared_by_many_thread_blocks(device: str) -> None:
    """One long row, then short ones: parts that had work have none, and the other way round."""
    pool = oracle.Pool("NHC", 6, 80, 16, 1, 16, 0, 16 * 80 * 2)
    width = 2000
    buffer = repage.PageTableBuffer(pool.plan, 3, width, torch.device(device))
    rng = np.random.default_rng(11)
    for lengths in ([width * 80], [100, 0, 90_000], [17], [1, 160_000, 70_001]):
        block_table = rng.integers(0, 6, (len(lengths), width), dtype=np.int32)
        seq_lens = np.array(lengths, dtype=np.int32)
        kv_indptr = np.cumsum([0, *(-(-seq_lens // 16))], dtype=np.int32)
        kv_indices = torch.full((int(kv_indptr[-1]),), NOT_WRITTEN, dtype=torch.int32).to(device)
        buffer.build(
            torch.from_numpy(block_table).to(device),
            torch.from_numpy(seq_lens).to(device),
            kv_indptr=torch.from_numpy(kv_indptr).to(device),
            kv_indices=kv_indices,
        )
        ids = np.arange(6)[:, None] * 10 + np.arange(5)
        expected = ids[block_table].reshape(len(lengths), -1) * (
            np.arange(width * 5) < -(-seq_lens // 80)[:, None] * 5
        )
        assert np.array_equal(buffer.table[: len(lengths)].cpu().numpy(), expected)
        assert not buffer.table[len(lengths) :].any()
        for row, (first, last) in enumerate(itertools.pairwise(kv_indptr.tolist())):
            assert np.array_equal(
                kv_indices[first:last].cpu().numpy(), expected[row, : last - first]
            )


def test_builds_of_as_many_rows_return_the_same_view(device: str) -> None:
    """Making a view costs more than a small build."""
    pool = oracle.Pool("NHC", 4, 4, 2, 1, 16, 0, 64)
    buffer = repage.PageTableBuffer(pool.plan, 3, 2, torch.device(device))
    table = torch.ones((3, 2), dtype=torch.int32, device=device)
    assert buffer.build(table[:2]) is buffer.build(table[1:])
    assert buffer.build(table).shape == (3, 4)


def test_rows_of_a_larger_batch_are_cleared_after_smaller_ones(device: str) -> None:
    pool = oracle.Pool("NHC", 4, 4, 2, 1, 16, 0, 64)
    buffer = repage.PageTableBuffer(pool.plan, 4, 1, torch.device(device))
    table = torch.ones((4, 1), dtype=torch.int32, device=device)
    for rows in (4, 1, 2, 0, 3):
        buffer.build(table[:rows])
        assert bool((buffer.table[:rows] > 0).all())
        assert not buffer.table[rows:].any()


def test_the_two_lists_go_together(device: str) -> None:
    pool = oracle.Pool("NHC", 4, 4, 2, 1, 16, 0, 64)
    table = torch.ones((1, 2), dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 2], dtype=torch.int32, device=device)
    indices = torch.zeros(2, dtype=torch.int32, device=device)
    buffer = repage.PageTableBuffer(pool.plan, 1, 2, torch.device(device))
    for build in (buffer.build, lambda *a, **k: repage.build_page_table(*a, pool.plan, **k)):
        with pytest.raises(DtypeError, match=r"kv_indices: expected .* next to kv_indptr"):
            build(table, kv_indptr=indptr)
        with pytest.raises(DtypeError, match=r"kv_indptr: expected .* next to kv_indices"):
            build(table, kv_indices=indices)
        with pytest.raises(ShapeError, match="kv_indptr: expected 2 elements for 1 rows"):
            build(table, kv_indptr=indptr[:1], kv_indices=indices)
        with pytest.raises(DtypeError, match=r"kv_indices: expected dtype torch\.int32"):
            build(table, kv_indptr=indptr, kv_indices=indices.long())


def test_debug_checks_look_at_listed_blocks_too(device: str) -> None:
    """A list may reach further than the lengths do."""
    pool = oracle.Pool("NHC", 4, 4, 2, 1, 16, 0, 64)
    buffer = repage.PageTableBuffer(pool.plan, 1, 2, torch.device(device))
    wild = torch.tensor([[1, 9]], dtype=torch.int32, device=device)
    lengths = torch.tensor([1], dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 3], dtype=torch.int32, device=device)
    indices = torch.zeros(3, dtype=torch.int32, device=device)
    buffer.build(wild, lengths, check_ids=True)
    lists = {"kv_indptr": indptr, "kv_indices": indices, "check_ids": True}
    with pytest.raises(PageIdError, match=r"got 9 at \[0, 1\]"):
        buffer.build(wild, lengths, **lists)
    with pytest.raises(PageIdError, match=r"got 9 at \[0, 1\]"):
        repage.build_page_table(wild, pool.plan, seq_lens=lengths, **lists)
