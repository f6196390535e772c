# SPDX-License-Identifier: Apache-2.0
"""Operations from several threads at once, each on its own tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import repage

THREADS, ROUNDS = 8, 40


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let Python switch threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def make_plan(thread: int) -> repage.PagePlan:
    return repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=64,
            block_tokens=640,
            num_heads=1,
            content_bytes=16,
            block_stride=640 * 16 * (thread + 1),
        ),
        64,
    )


def work(thread: int) -> list[torch.Tensor]:
    """Build everything that an engine builds, for some batches; a function of the thread alone."""
    plan = make_plan(thread)
    buffer = repage.PageTableBuffer(plan, 8, 6, torch.device("cpu"), lookahead=1)
    generator = torch.Generator().manual_seed(thread)
    found = []
    for _ in range(ROUNDS):
        rows = int(torch.randint(1, 9, (), generator=generator))
        table = torch.randint(0, 64, (rows, 6), dtype=torch.int32, generator=generator)
        lengths = torch.randint(0, 3840, (rows,), dtype=torch.int32, generator=generator)
        slots = torch.randint(-1, 64 * 640, (100,), generator=generator)
        found.append(buffer.build(table, lengths).clone())
        found.append(repage.build_page_table(table, plan, seq_lens=lengths))
        pages = torch.div(lengths + 63, 64, rounding_mode="floor").cumsum(0)
        indptr = torch.cat([pages.new_zeros(1), pages]).int()
        found.append(repage.build_kv_indices(table, indptr, plan))
        found.append(repage.map_slots(slots, plan))
        found.append(repage.last_page_len(lengths, 64))
    return found


@pytest.mark.usefixtures("eager_switches")
def test_threads_do_not_disturb_each_other() -> None:
    expected = [work(thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for mine, right in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


@pytest.mark.usefixtures("eager_switches")
def test_one_plan_and_one_pool_may_be_shared() -> None:
    """Plans are immutable; what they work out on first use is the same in every thread."""
    plan = make_plan(3)
    memory = torch.zeros(64 * 640 * 16 * 4, dtype=torch.uint8)
    cache = memory.as_strided((64, 1, 640, 16), (640 * 16 * 4, 16, 16, 1))
    table = torch.arange(12, dtype=torch.int32).view(2, 6)

    def read(_: int) -> tuple[list[list[int]], tuple[int, ...]]:
        fresh = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 64)
        view = repage.virtual_view(cache, fresh)
        return repage.build_page_table(table, plan).tolist(), view.stride()

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(read, range(200)))
    assert all(item == found[0] for item in found)
