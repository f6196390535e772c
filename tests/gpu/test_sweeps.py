# SPDX-License-Identifier: Apache-2.0
"""Larger sweeps than a user would wait for: geometries, lengths, and addresses past 32 bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

import repage
from repage.selftest import ops_checks
from repage.selftest.attention import PATHS, AttentionPath, make_queries
from repage.selftest.attention_checks import compare
from repage.selftest.pool import Layout, PackedPool, PoolShape
from repage.selftest.result import Check, CheckResult, NotAvailableError, Status
from repage.selftest.target import Target

pytestmark = pytest.mark.gpu

LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
LONG = (8191, 4097, 1, 2560, 640)
QWEN_STRIDE = 15_728_640  # Qwen3.6-35B-A3B with its DFlash drafter
SPREAD_BLOCKS = 300  # int32 bytes overflow at block 137, int32 elements at 274


@functools.cache
def target() -> Target:
    return Target.of_device()


def run_or_skip(path: AttentionPath, pool: PackedPool, page_tokens: int) -> None:
    try:
        path.require_device(target())
        compare(target(), path, pool, page_tokens, make_queries(pool, path.kind))
    except NotAvailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["ops.page_table", "ops.kv_indices", "ops.slots", "ops.buffer"])
def test_many_geometries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many = functools.partial(ops_checks.batches, rounds=150)
    monkeypatch.setattr(ops_checks, "batches", many)
    check: Check = next(check for check in ops_checks.ops_checks() if check.name == name)
    result: CheckResult = check.run(target())
    assert result.status is Status.PASS, result.detail


@pytest.mark.parametrize(
    ("path", "layout", "block_tokens"),
    [
        pytest.param(path, layout, block, id=f"{path.name}-{layout}-{block}")
        for path, layout, block in itertools.product(PATHS, LAYOUTS, (1280, 2048))
    ],
)
def test_long_sequences_in_larger_blocks(
    path: AttentionPath, layout: Layout, block_tokens: int
) -> None:
    shape = PoolShape(layout, 2, 128, path.cache_dtype, block_tokens)
    pool = PackedPool(shape, LONG, target().device)
    for page_tokens in path.page_sizes:
        run_or_skip(path, pool, page_tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_addresses_past_32_bits(path: AttentionPath, layout: Layout) -> None:
    bare = PoolShape(layout, 2, 256, path.cache_dtype)
    slack = QWEN_STRIDE - 2 * bare.layer_bytes
    shape = PoolShape(layout, 2, 256, path.cache_dtype, slack_bytes=slack)
    pool = PackedPool(shape, (641, 1357, 64), target().device, skip_blocks=SPREAD_BLOCKS)
    assert pool.plan(64).page(SPREAD_BLOCKS, 0) * pool.plan(64).page_stride > 2**32
    run_or_skip(path, pool, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_builds_the_table_and_decodes(layout: Layout) -> None:
    """Replayed after the batch changed, against the same kernel called eagerly."""
    kernels = target().attention_kernels() if target().attention else pytest.skip("no FlashInfer")
    path = next(path for path in PATHS if path.name == "xqa-decode")
    pool = PackedPool(PoolShape(layout, 2, 128), (641, 1357, 64), target().device)
    queries = make_queries(pool, path.kind)
    pages = pool.virtual_pages(64)
    buffer = repage.PageTableBuffer(
        pool.plan(64), len(pool.lengths), pool.block_table.shape[1], target().device
    )

    def decode() -> torch.Tensor:
        table = buffer.build(pool.block_table, pool.seq_lens, check_ids=False)
        return path.call(kernels, dataclasses.replace(pages, page_table=table), queries, -1)

    try:
        path.require_device(target())
        decode()
    except (NotAvailableError, *kernels.missing_module_errors) as error:
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = decode()
    rows = torch.tensor([1, 0, 2], device=target().device)
    for order in (rows, rows.flip(0)):
        pool.block_table.copy_(pool.block_table[order])
        pool.seq_lens.copy_(pool.seq_lens[order])
        graph.replay()
        got = replayed.clone()
        assert torch.equal(got, decode())
