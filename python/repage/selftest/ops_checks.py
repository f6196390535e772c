# SPDX-License-Identifier: Apache-2.0
"""The page-table operations against brute force, bitwise, with graph capture and replay."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import repage
from repage.geometry import BlockGeometry
from repage.plan import PagePlan
from repage.selftest import oracle
from repage.selftest.result import Check, Finding, require
from repage.views import virtual_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from repage.selftest.target import Target

_ROUNDS = 12
_REPLAYS = 20
_SENTINEL = -7


@dataclass(frozen=True)
class Batch:
    """A pool and a batch in it.

    Parameters
    ----------
    kv_cache : torch.Tensor
        bf16 [B, H, N, C], the second of three layers in every block.
    plan : PagePlan
        Its pages.
    blocks : list of list of int
        Manager block table; some ids lie outside the pool.
    seq_lens : list of int
        Lengths, with padding rows.
    """

    kv_cache: torch.Tensor
    plan: PagePlan
    blocks: list[list[int]]
    seq_lens: list[int]

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.kv_cache.device

    def block_table(self) -> torch.Tensor:
        """Return int32 [R, W] with a row stride above W."""
        rows, columns = len(self.blocks), len(self.blocks[0])
        wide = torch.full((rows, columns + 3), 2**31 - 1, dtype=torch.int32)
        wide[:, :columns] = torch.tensor(self.blocks, dtype=torch.int32)
        return wide.to(self.device)[:, :columns]

    def lengths(self) -> torch.Tensor:
        """Return int32 [R]."""
        return torch.tensor(self.seq_lens, dtype=torch.int32, device=self.device)

    def ids(self) -> oracle.PageIds:
        """Return the id of every (block, page), by brute force."""
        return oracle.page_ids(self.kv_cache, self.plan.page_tokens)


def ops_checks() -> list[Check]:
    """Return the checks of the operations."""
    return [
        Check("ops.virtual_view", _check_view),
        Check("ops.page_table", _check_page_table),
        Check("ops.kv_indices", _check_kv_indices),
        Check("ops.slots", _check_slots),
        Check("ops.last_page_len", _check_last_page_len),
        Check("ops.buffer", _check_buffer),
        Check("ops.graph", _check_graph),
    ]


def batches(target: Target, rounds: int = _ROUNDS) -> Iterator[Batch]:
    """Yield batches on both interiors, with and without overlapping pages."""
    draw = random.Random(41)
    for number in range(rounds):
        interior = ("NHC", "HNC")[number % 2]
        heads = draw.choice([1, 2, 4])
        page_tokens = draw.choice([16, 32, 64])
        tokens = page_tokens * draw.choice([1, 3, 10])
        num_blocks = draw.randint(2, 7)
        content = 64
        unit = page_tokens * content * (heads if interior == "NHC" else 1)
        slack = unit // 2 if number % 3 == 2 else unit * draw.randint(0, 3)
        layer = tokens * heads * content
        stride = 3 * layer + slack
        storage = torch.zeros(num_blocks * stride, dtype=torch.bfloat16, device=target.device)
        token_stride, head_stride = (
            (heads * content, content) if interior == "NHC" else (content, tokens * content)
        )
        cache = storage.as_strided(
            (num_blocks, heads, tokens, content), (stride, head_stride, token_stride, 1), layer
        )
        rows, columns = draw.randint(1, 9), draw.randint(1, 7)
        blocks = [
            [
                draw.choice([draw.randrange(num_blocks)] * 8 + [-1, num_blocks])
                for _ in range(columns)
            ]
            for _ in range(rows)
        ]
        lengths = [draw.choice([draw.randint(0, columns * tokens), 0, -1]) for _ in range(rows)]
        plan = PagePlan(BlockGeometry.from_tensor(cache), page_tokens)
        yield Batch(cache, plan, blocks, lengths)


def _same(name: str, got: torch.Tensor, expected: object, plan: PagePlan) -> None:
    answer = got.tolist()
    require(
        answer == expected,
        f"{name}: differs from brute force on {plan.geometry}, pages of {plan.page_tokens}: "
        f"{answer} instead of {expected}"[:600],
    )


def _check_view(target: Target) -> Finding:
    """Read through page table and virtual view, and compare with the manager blocks' bytes."""
    for batch in batches(target):
        values = torch.arange(batch.kv_cache.numel(), device=target.device) % 65521
        batch.kv_cache.view(torch.int16).copy_(
            (values - 32768).to(torch.int16).view(batch.kv_cache.shape)
        )
        num_blocks, heads, _, content = batch.kv_cache.shape
        order = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=target.device)
        table = repage.build_page_table(order.unsqueeze(0), batch.plan)[0].long()
        pages = virtual_view(batch.kv_cache, batch.plan).view(torch.int16)
        through = pages[table].view(num_blocks, -1, heads, batch.plan.page_tokens, content)
        through = through.transpose(1, 2).reshape(batch.kv_cache.shape)
        direct = batch.kv_cache.view(torch.int16)[order.long()]
        require(
            torch.equal(through, direct),
            f"pages of {batch.plan.page_tokens} of {batch.plan.geometry} are not the block's bytes",
        )
    return Finding(f"{_ROUNDS} pools, bytes equal")


def _check_page_table(target: Target) -> Finding:
    for batch in batches(target):
        size = batch.plan.geometry.block_tokens
        for lengths, lookahead in ((None, 0), (batch.seq_lens, 0), (batch.seq_lens, 7)):
            got = repage.build_page_table(
                batch.block_table(),
                batch.plan,
                seq_lens=None if lengths is None else batch.lengths(),
                lookahead=lookahead,
                check_ids=False,
            )
            expected = oracle.page_table(batch.ids(), batch.blocks, lengths, size, lookahead)
            _same("build_page_table", got, expected, batch.plan)
    return Finding(f"{3 * _ROUNDS} tables, bitwise equal to brute force")


def _check_kv_indices(target: Target) -> Finding:
    for batch in batches(target):
        counts = [-(-max(n, 0) // batch.plan.page_tokens) for n in batch.seq_lens]
        indptr = [sum(counts[:row]) for row in range(len(counts) + 1)]
        out = torch.full((indptr[-1] + 5,), _SENTINEL, dtype=torch.int32, device=target.device)
        repage.build_kv_indices(
            batch.block_table(),
            torch.tensor(indptr, dtype=torch.int32, device=target.device),
            batch.plan,
            out=out,
            check_ids=False,
        )
        expected = oracle.kv_indices(batch.ids(), batch.blocks, indptr)
        _same("build_kv_indices", out, expected + [_SENTINEL] * 5, batch.plan)
    return Finding(f"{_ROUNDS} page lists, bitwise equal to brute force, nothing written past them")


def _check_slots(target: Target) -> Finding:
    for batch in batches(target):
        geometry = batch.plan.geometry
        slots = [*range(-2, geometry.num_blocks * geometry.block_tokens + 2), 2**40]
        got = repage.map_slots(
            torch.tensor(slots, device=target.device), batch.plan, check_ids=False
        )
        expected = oracle.virtual_slots(
            batch.ids(), slots, geometry.block_tokens, batch.plan.page_tokens
        )
        _same("map_slots", got, expected, batch.plan)
    return Finding(f"every slot of {_ROUNDS} pools, padding and slots past the pool")


def _check_last_page_len(target: Target) -> Finding:
    lengths = [-1, 0, 1, 15, 16, 17, 63, 64, 65, 640, 2**31 - 1]
    tensor = torch.tensor(lengths, dtype=torch.int32, device=target.device)
    for page_tokens in (1, 3, 16, 64, 640):
        got = repage.last_page_len(tensor, page_tokens).tolist()
        expected = [n - (n - 1) // page_tokens * page_tokens if n > 0 else 0 for n in lengths]
        require(got == expected, f"last_page_len of pages of {page_tokens}: {got}, not {expected}")
    return Finding("5 page sizes")


def _check_buffer(target: Target) -> Finding:
    """Build into one buffer for batches that grow and shrink: nothing stale is left."""
    draw = random.Random(43)
    count = 0
    for batch in batches(target):
        rows, columns = len(batch.blocks), len(batch.blocks[0])
        buffer = repage.PageTableBuffer(batch.plan, rows + 2, columns, target.device, lookahead=3)
        table, ids = batch.block_table(), batch.ids()
        size = batch.plan.geometry.block_tokens
        for _ in range(4):
            live = draw.randint(1, rows)
            lengths = [draw.randint(0, columns * size) for _ in range(live)]
            tensor = torch.tensor(lengths, dtype=torch.int32, device=target.device)
            buffer.build(table[:live], tensor, check_ids=False)
            expected = oracle.page_table(ids, batch.blocks[:live], lengths, size, 3)
            padding = [[0] * buffer.table.shape[1]] * (rows + 2 - live)
            _same("PageTableBuffer", buffer.table, expected + padding, batch.plan)
            count += 1
    return Finding(f"{count} builds in place, whole buffer compared")


def _check_graph(target: Target) -> Finding:
    """Capture both operations in one graph, and replay it on other batches."""
    target.require_cuda("a CUDA graph")
    draw = random.Random(47)
    batch = next(iter(batches(target, 1)))
    rows, columns = 4, 6
    geometry, ids = batch.plan.geometry, batch.ids()
    size, page_tokens = geometry.block_tokens, batch.plan.page_tokens
    device = target.device
    table = torch.zeros((rows, columns), dtype=torch.int32, device=device)
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    out = torch.zeros(rows * columns * batch.plan.pages_per_block, dtype=torch.int32, device=device)
    buffer = repage.PageTableBuffer(batch.plan, rows, columns, device)

    def build() -> None:
        buffer.build(table, lengths, check_ids=False)
        repage.build_kv_indices(table, indptr, batch.plan, out=out, check_ids=False)

    with torch.cuda.device(device):
        build()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            build()
        for _ in range(_REPLAYS):
            blocks = [
                [draw.randrange(geometry.num_blocks) for _ in range(columns)] for _ in range(rows)
            ]
            seq_lens = [draw.randint(0, columns * size) for _ in range(rows)]
            counts = [-(-n // page_tokens) for n in seq_lens]
            starts = [sum(counts[:row]) for row in range(rows + 1)]
            table.copy_(torch.tensor(blocks, dtype=torch.int32))
            lengths.copy_(torch.tensor(seq_lens, dtype=torch.int32))
            indptr.copy_(torch.tensor(starts, dtype=torch.int32))
            graph.replay()
            expected = oracle.page_table(ids, blocks, seq_lens, size)
            _same("replayed table", buffer.table, expected, batch.plan)
            expected_list = oracle.kv_indices(ids, blocks, starts)
            _same("replayed page list", out[: starts[-1]], expected_list, batch.plan)
    return Finding(f"{_REPLAYS} replays of one capture, bitwise equal to brute force")
