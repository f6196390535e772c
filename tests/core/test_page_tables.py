# SPDX-License-Identifier: Apache-2.0
"""Page tables, CSR indices and slots: CPU twins and CUDA kernels against brute force, bitwise."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import repage
from repage.errors import PageIdError
from support import cuda_on_host, oracle
from support.guarded import POISON, Guarded


def wide_table(block_table: np.ndarray, device: str, spare: int) -> torch.Tensor:
    """Return the table as a slice of a wider one, so that its row stride is not its width."""
    rows, columns = block_table.shape
    memory = torch.full((rows, columns + spare), POISON, dtype=torch.int32, device=device)
    memory[:, :columns] = torch.from_numpy(block_table).to(device)
    return memory[:, :columns]


@st.composite
def batches(draw: st.DrawFn) -> tuple[oracle.Pool, np.ndarray, np.ndarray]:
    """A pool, a block table with some ids outside the pool, and lengths with padding rows."""
    pool = draw(oracle.pools())
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    ids = st.one_of(
        st.integers(0, pool.num_blocks - 1), st.sampled_from([-1, pool.num_blocks, 2**31 - 1])
    )
    table = draw(
        st.lists(st.lists(ids, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    lengths = st.one_of(
        st.integers(-1, columns * pool.block_tokens + 5), st.sampled_from([0, 2**31 - 1])
    )
    seq_lens = draw(st.lists(lengths, min_size=rows, max_size=rows))
    return (
        pool,
        np.array(table, dtype=np.int32).reshape(rows, columns),
        np.array(seq_lens, dtype=np.int32),
    )


@given(batches(), st.integers(0, 3), st.integers(0, 2), st.integers(0, 40), st.booleans())
def test_page_table(
    device: str,
    batch: tuple[oracle.Pool, np.ndarray, np.ndarray],
    shift: int,
    extra_rows: int,
    lookahead: int,
    live_only: bool,
) -> None:
    pool, block_table, seq_lens = batch
    rows, columns = block_table.shape
    out = Guarded(
        (rows + extra_rows, columns * pool.pages_per_block), torch.int32, device, shift=shift
    )
    result = repage.build_page_table(
        wide_table(block_table, device, spare=shift),
        pool.plan,
        seq_lens=torch.from_numpy(seq_lens).to(device) if live_only else None,
        lookahead=lookahead,
        out=out.tensor,
        check_ids=False,
    )
    expected = oracle.page_table(
        pool.page_ids(),
        block_table,
        seq_lens if live_only else None,
        pool.block_tokens,
        lookahead=lookahead,
        table_rows=rows + extra_rows,
    )
    assert result is out.tensor
    assert np.array_equal(result.cpu().numpy(), expected)
    out.assert_untouched_around()


@given(oracle.pools(), st.data())
def test_a_buffer_equals_a_fresh_table_after_any_history(
    device: str, pool: oracle.Pool, data: st.DataObject
) -> None:
    max_rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    lookahead = data.draw(st.integers(0, 20))
    buffer = repage.PageTableBuffer(
        pool.plan, max_rows, width, torch.device(device), lookahead=lookahead
    )
    address = buffer.table.data_ptr()
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.integers(0, max_rows))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        block_table = rng.integers(0, pool.num_blocks, (rows, width), dtype=np.int32)
        seq_lens = rng.integers(-1, width * pool.block_tokens + 3, rows, dtype=np.int32)
        whole = data.draw(st.booleans())
        result = buffer.build(
            wide_table(block_table, device, spare=1),
            None if whole else torch.from_numpy(seq_lens).to(device),
        )
        expected = oracle.page_table(
            pool.page_ids(),
            block_table,
            None if whole else seq_lens,
            pool.block_tokens,
            lookahead=lookahead,
            table_rows=max_rows,
        )
        assert np.array_equal(buffer.table.cpu().numpy(), expected)
        assert rows == 0 or result.data_ptr() == address  # torch gives an empty view no address
        assert result.is_contiguous()
        assert result.shape == (rows, width * pool.pages_per_block)


@given(batches(), st.integers(0, 3), st.integers(-2, 9), st.data())
def test_kv_indices(
    device: str,
    batch: tuple[oracle.Pool, np.ndarray, np.ndarray],
    shift: int,
    spare: int,
    data: st.DataObject,
) -> None:
    pool, block_table, _ = batch
    rows, columns = block_table.shape
    lengths = data.draw(
        st.lists(st.integers(0, columns * pool.pages_per_block + 2), min_size=rows, max_size=rows)
    )
    begin = data.draw(st.integers(0, 3))
    kv_indptr = np.cumsum([begin, *lengths], dtype=np.int32)
    size = max(int(kv_indptr[-1]) + spare, 0)
    out = Guarded((size,), torch.int32, device, shift=shift)
    out.tensor.fill_(-7)
    repage.build_kv_indices(
        wide_table(block_table, device, spare=shift),
        torch.from_numpy(kv_indptr).to(device),
        pool.plan,
        out=out.tensor,
        check_ids=False,
    )
    expected = oracle.kv_indices(
        pool.page_ids(), block_table, kv_indptr, np.full(size, -7, dtype=np.int32)
    )
    assert np.array_equal(out.tensor.cpu().numpy(), expected)
    out.assert_untouched_around()


@given(oracle.pools(), st.data(), st.integers(0, 1), st.booleans())
def test_slots(
    device: str, pool: oracle.Pool, data: st.DataObject, shift: int, in_place: bool
) -> None:
    end = pool.num_blocks * pool.block_tokens
    slots = data.draw(
        st.lists(
            st.one_of(st.integers(-2, end + 2), st.sampled_from([2**31, 2**40, 2**63 - 1])),
            max_size=60,
        )
    )
    source = Guarded((len(slots),), torch.int64, device, shift=shift)
    source.tensor.copy_(torch.tensor(slots, dtype=torch.int64))
    out = source if in_place else Guarded((len(slots),), torch.int64, device, shift=shift)
    repage.map_slots(source.tensor, pool.plan, out=out.tensor, check_ids=False)
    expected = oracle.virtual_slots(pool.page_ids(), np.array(slots, dtype=np.int64), pool)
    assert out.tensor.tolist() == expected.tolist()
    out.assert_untouched_around()


@given(
    st.lists(st.integers(-1, 2**31 - 1), max_size=40), st.sampled_from([1, 3, 16, 64, 2**31 - 1])
)
def test_last_page_len(device: str, seq_lens: list[int], page_tokens: int) -> None:
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    expected = [0 if n <= 0 else n - (n - 1) // page_tokens * page_tokens for n in seq_lens]
    assert repage.last_page_len(lengths, page_tokens).tolist() == expected


def qwen(num_blocks: int = 8) -> repage.PagePlan:
    """Qwen3.6-35B-A3B + DFlash: 640-token blocks, pages of 64, a step of 120."""
    return repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=num_blocks,
            block_tokens=640,
            num_heads=2,
            content_bytes=1024,
            block_stride=15_728_640,
        ),
        64,
    )


def test_blocks_three_and_one_of_qwen(device: str) -> None:
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    result = repage.build_page_table(table, qwen())
    assert result.tolist() == [[*range(360, 370), *range(120, 130)]]
    # Token 700 lies in the second block, first page, at offset 60.
    assert int(repage.map_slots(torch.tensor([640 + 60], device=device), qwen())) == 120 * 64 + 60


def test_stale_columns_of_a_longer_batch_are_cleared(device: str) -> None:
    buffer = repage.PageTableBuffer(qwen(), 2, 5, torch.device(device))
    table = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], dtype=torch.int32, device=device)
    buffer.build(table, torch.tensor([3200, 3200], dtype=torch.int32, device=device))
    buffer.build(table[:1], torch.tensor([1920], dtype=torch.int32, device=device))
    assert buffer.table[0, 29] == 3 * 120 + 9
    assert buffer.table[0, 30:].tolist() == [0] * 20
    assert buffer.table[1].tolist() == [0] * 50


def test_csr_of_mixed_lengths(device: str) -> None:
    """65, 1 and 640 tokens in pages of 64: 2, 1 and 10 pages."""
    seq_lens = torch.tensor([65, 1, 640], dtype=torch.int32, device=device)
    kv_indptr = torch.tensor([0, 2, 3, 13], dtype=torch.int32, device=device)
    table = torch.tensor([[2], [5], [1]], dtype=torch.int32, device=device)
    indices = repage.build_kv_indices(table, kv_indptr, qwen())
    assert indices.tolist() == [240, 241, 600, *range(120, 130)]
    assert repage.last_page_len(seq_lens, 64).tolist() == [1, 1, 64]


def test_freed_blocks_of_a_window_read_the_null_block(device: str) -> None:
    table = torch.tensor([[0, 6]], dtype=torch.int32, device=device)
    result = repage.build_page_table(
        table, qwen(), seq_lens=torch.tensor([1280], dtype=torch.int32, device=device)
    )
    assert result.tolist() == [[*range(10), *range(720, 730)]]


def test_wide_tables_cover_every_thread_and_row_part(device: str) -> None:
    """Sizes past one round of all threads, at every alignment of a row."""
    plan = qwen(num_blocks=10_000)
    rng = np.random.default_rng(3)
    for width in (1, 821, 3277):
        block_table = rng.integers(0, 10_000, (3, width), dtype=np.int32)
        expected = (block_table[:, :, None] * 120 + np.arange(10)).reshape(3, -1)
        result = repage.build_page_table(torch.from_numpy(block_table).to(device), plan)
        assert np.array_equal(result.cpu().numpy(), expected)


def test_empty_batches_and_tables_do_nothing(device: str) -> None:
    none = torch.zeros((0, 4), dtype=torch.int32, device=device)
    assert repage.build_page_table(none, qwen()).shape == (0, 40)
    no_columns = torch.zeros((3, 0), dtype=torch.int32, device=device)
    assert repage.build_page_table(no_columns, qwen()).shape == (3, 0)
    indptr = torch.zeros(1, dtype=torch.int32, device=device)
    assert repage.build_kv_indices(none, indptr, qwen()).shape == (0,)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    assert repage.map_slots(slots, qwen()).shape == (0,)


@pytest.mark.parametrize("block", [8, -1])
def test_debug_checks_find_ids_outside_the_pool(
    device: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.tensor([[1, block]], dtype=torch.int32, device=device)
    message = rf"block_table: expected ids from 0 to 7, got {block} at \[0, 1\]"
    with pytest.raises(PageIdError, match=message):
        repage.build_page_table(table, qwen(), check_ids=True)
    short = torch.tensor([640], dtype=torch.int32, device=device)
    repage.build_page_table(table, qwen(), seq_lens=short, check_ids=True)
    monkeypatch.setenv("REPAGE_DEBUG", "1")
    with pytest.raises(PageIdError, match=message):
        repage.build_page_table(table, qwen())
    with pytest.raises(PageIdError, match=message):
        repage.PageTableBuffer(qwen(), 1, 2, table.device).build(table)
    indptr = torch.tensor([0, 11], dtype=torch.int32, device=device)
    with pytest.raises(PageIdError, match=message):
        repage.build_kv_indices(table, indptr, qwen())
    slots = torch.tensor([0, 8 * 640], device=device)
    with pytest.raises(PageIdError, match=r"slot_mapping: expected slots below 5120"):
        repage.map_slots(slots, qwen())


@pytest.mark.gpu
def test_graphs_capture_a_build_and_replay_it_on_new_lengths() -> None:
    buffer = repage.PageTableBuffer(qwen(), 4, 5, torch.device("cuda"))
    table = torch.zeros((4, 5), dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    buffer.build(table, seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.build(table, seq_lens)
    rng = np.random.default_rng(1)
    ids = np.arange(8)[:, None] * 120 + np.arange(10)
    for _ in range(20):
        blocks = rng.integers(0, 8, (4, 5), dtype=np.int32)
        lengths = rng.integers(0, 3201, 4, dtype=np.int32)
        table.copy_(torch.from_numpy(blocks))
        seq_lens.copy_(torch.from_numpy(lengths))
        graph.replay()
        expected = oracle.page_table(ids, blocks, lengths, 640)
        assert np.array_equal(buffer.table.cpu().numpy(), expected)


def test_kernels_on_the_host_use_every_thread_of_a_block(
    host_kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers' own block size, which the other tests shorten for speed."""
    kernels = cuda_on_host.HostKernels(host_kernels, threads=256)
    monkeypatch.setattr("repage.buffer._core", kernels)
    buffer = repage.PageTableBuffer(qwen(), 2, 821, torch.device("cpu"))
    rng = np.random.default_rng(5)
    ids = np.arange(8)[:, None] * 120 + np.arange(10)
    for lengths in ([821 * 640, 640], [641, 100_000], [0, 1]):
        blocks = rng.integers(0, 8, (2, 821), dtype=np.int32)
        seq_lens = np.array(lengths, dtype=np.int32)
        buffer.build(torch.from_numpy(blocks), torch.from_numpy(seq_lens))
        expected = oracle.page_table(ids, blocks, seq_lens, 640)
        assert np.array_equal(buffer.table.numpy(), expected)


@pytest.mark.parametrize("block_tokens", [320, 640])
def test_tables_larger_than_caches(block_tokens: int) -> None:
    """The CPU twin writes what exceeds 16 MiB past them."""
    plan = repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=500,
            block_tokens=block_tokens,
            num_heads=1,
            content_bytes=32,
            block_stride=3 * block_tokens * 32,
        ),
        16,
    )
    rows, width = 257, -(-65_537 // plan.pages_per_block)
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.integers(0, 500, (rows, width), dtype=np.int32))
    expected = table.unsqueeze(-1) * plan.block_step + torch.arange(plan.pages_per_block)
    expected = expected.reshape(rows, -1).int()
    buffer = repage.PageTableBuffer(plan, rows, width, torch.device("cpu"))
    assert buffer.table.nbytes > 64 << 20
    assert torch.equal(buffer.build(table), expected)
    half = width // 2
    lengths = torch.full((rows,), half * block_tokens, dtype=torch.int32)
    expected[:, half * plan.pages_per_block :] = 0
    assert torch.equal(buffer.build(table, lengths), expected)
