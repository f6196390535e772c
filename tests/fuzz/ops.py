# SPDX-License-Identifier: Apache-2.0
"""The Python operations and views on random pools, against a walk over bytes."""

from __future__ import annotations

import numpy as np
import torch

import repage
from fuzz.geometries import (
    Batch,
    Ids,
    random_addresses,
    random_batch,
    random_indptr,
    random_pool,
)
from support import oracle

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")


def check(seed: int) -> None:
    """Check every operation on the pool of one seed.

    Raises
    ------
    AssertionError
        Where one differs from brute force.
    """
    rng = np.random.default_rng(seed)
    if rng.random() < 0.3:
        addresses = random_addresses(rng)
        plan, ids = addresses.plan, addresses
        assert plan.max_page_id == ids[addresses.num_blocks - 1, addresses.shape[1] - 1]
    else:
        pool = random_pool(rng)
        plan, ids = _check_view(rng, pool)
        _check_slots(rng, pool, pool.page_ids())
    _check_tables(rng, plan, ids)
    _check_buffer(rng, plan, ids)
    _check_indices(rng, plan, ids)
    _check_lengths(rng, plan.page_tokens)


def _check_view(rng: np.random.Generator, pool: oracle.Pool) -> tuple[repage.PagePlan, np.ndarray]:
    storage = rng.integers(
        0, 256, pool.offset + pool.num_blocks * pool.block_stride, dtype=np.uint8
    )
    layer = pool.bytes_of_layer(storage)
    fitting = [d for d in DTYPES if pool.content_bytes % d.itemsize == 0]
    dtype = fitting[int(rng.integers(len(fitting)))]
    size = dtype.itemsize
    strides = [layer.strides[0], layer.strides[2], layer.strides[1], size]
    cache = (
        torch.from_numpy(storage)
        .view(dtype)
        .as_strided(
            (pool.num_blocks, pool.num_heads, pool.block_tokens, pool.content_bytes // size),
            [stride // size for stride in strides],
            pool.offset // size,
        )
    )
    plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), pool.page_tokens)
    # The strides of a single block, or of blocks of one token, address nothing: a geometry makes
    # up its own, and ids with them.
    starts = layer[:, :: pool.page_tokens, 0, 0]
    ids = np.add.outer(
        np.arange(starts.shape[0]) * starts.strides[0],
        np.arange(starts.shape[1]) * starts.strides[1],
    )
    assert not (ids % plan.page_stride).any()
    ids //= plan.page_stride
    if pool.num_blocks > 1 and pool.block_tokens > 1:
        assert np.array_equal(ids, pool.page_ids())
    view = repage.virtual_view(cache, plan)
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    for block in range(pool.num_blocks):
        for index in range(pool.pages_per_block):
            page = view[int(ids[block, index])].transpose(0, 1).contiguous().view(torch.uint8)
            begin = index * pool.page_tokens
            expected = layer[block, begin : begin + pool.page_tokens]
            assert np.array_equal(page.numpy().reshape(expected.shape), expected)
    _ = view[plan.num_virtual_pages - 1].float().sum()  # the last id ends inside the storage
    return plan, ids


def _check_slots(rng: np.random.Generator, pool: oracle.Pool, ids: np.ndarray) -> None:
    most = pool.num_blocks * pool.block_tokens
    slots = rng.integers(-3, most + 5, int(rng.integers(0, 40)))
    expected = oracle.virtual_slots(ids, slots, pool)
    found = repage.map_slots(torch.from_numpy(slots), pool.plan)
    assert found.tolist() == expected.tolist()
    in_place = torch.from_numpy(slots.copy())
    repage.map_slots(in_place, pool.plan, out=in_place)
    assert in_place.tolist() == expected.tolist()


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the batch as torch takes it: a strided block table, and lengths."""
    memory = torch.from_numpy(batch.memory)
    table = memory.as_strided((batch.rows, batch.columns), (max(batch.row_stride, 1), 1))
    lengths = None if batch.seq_lens is None else torch.from_numpy(batch.seq_lens)
    return table, lengths


def _check_tables(rng: np.random.Generator, plan: repage.PagePlan, ids: Ids) -> None:
    batch = random_batch(rng, plan.geometry.num_blocks, plan.geometry.block_tokens)
    table, lengths = tensors(batch)
    rows = batch.rows + int(rng.integers(0, 3))
    columns = batch.columns * plan.pages_per_block
    shift = int(rng.integers(0, 4))
    memory = torch.full((rows * columns + shift,), -7, dtype=torch.int32)
    out = memory[shift:].view(rows, columns)
    found = repage.build_page_table(
        table, plan, seq_lens=lengths, lookahead=batch.lookahead, out=out, check_ids=False
    )
    expected = oracle.page_table(
        ids,
        batch.table,
        batch.seq_lens,
        plan.geometry.block_tokens,
        lookahead=batch.lookahead,
        table_rows=rows,
    )
    assert np.array_equal(found.numpy(), expected[:rows])
    assert memory[:shift].eq(-7).all()


def _check_buffer(rng: np.random.Generator, plan: repage.PagePlan, ids: Ids) -> None:
    """Batches of any size one after the other in one buffer: nothing of an earlier one stays."""
    columns, rows = int(rng.integers(1, 7)), int(rng.integers(6, 9))
    lookahead = int(rng.choice([0, 1, 9]))
    buffer = repage.PageTableBuffer(plan, rows, columns, CPU, lookahead=lookahead)
    for _ in range(4):
        geometry = plan.geometry
        batch = random_batch(rng, geometry.num_blocks, geometry.block_tokens, columns=columns)
        table, lengths = tensors(batch)
        lists: dict[str, torch.Tensor] = {}
        expected_indices = None
        if rng.random() < 0.5:  # both forms in one launch
            indptr = random_indptr(rng, batch, plan.pages_per_block)
            indices = torch.full((int(indptr[-1]),), -7, dtype=torch.int32)
            expected_indices = oracle.kv_indices(ids, batch.table, indptr, indices.numpy())
            lists = {"kv_indptr": torch.from_numpy(indptr), "kv_indices": indices}
        found = buffer.build(table, lengths, check_ids=False, **lists)
        expected = oracle.page_table(
            ids,
            batch.table,
            batch.seq_lens,
            geometry.block_tokens,
            lookahead=lookahead,
            table_rows=rows,
        )
        assert np.array_equal(buffer.table.numpy(), expected)
        assert not batch.rows or found.data_ptr() == buffer.table.data_ptr()
        if expected_indices is not None:
            assert np.array_equal(lists["kv_indices"].numpy(), expected_indices)


def _check_indices(rng: np.random.Generator, plan: repage.PagePlan, ids: Ids) -> None:
    batch = random_batch(rng, plan.geometry.num_blocks, plan.geometry.block_tokens)
    table, _ = tensors(batch)
    indptr = random_indptr(rng, batch, plan.pages_per_block)
    out = torch.full((max(int(indptr[-1]) - int(rng.integers(-3, 4)), 0),), -7, dtype=torch.int32)
    expected = oracle.kv_indices(ids, batch.table, indptr, out.numpy())
    repage.build_kv_indices(table, torch.from_numpy(indptr), plan, out=out, check_ids=False)
    assert np.array_equal(out.numpy(), expected)


def _check_lengths(rng: np.random.Generator, page_tokens: int) -> None:
    lengths = rng.integers(-3, 5 * page_tokens + 2, int(rng.integers(0, 20)), dtype=np.int32)
    found = repage.last_page_len(torch.from_numpy(lengths), page_tokens)
    expected = [
        0 if n <= 0 else len(range(n)[(n - 1) // page_tokens * page_tokens :])
        for n in lengths.tolist()
    ]
    assert found.tolist() == expected
