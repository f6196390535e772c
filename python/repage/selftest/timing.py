# SPDX-License-Identifier: Apache-2.0
"""How long the operations take, beside a plain copy of as many bytes."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import repage
from repage.geometry import BlockGeometry
from repage.plan import PagePlan
from repage.selftest.result import Check, Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from repage.selftest.target import Target

_ROWS = 256
_BLOCK_COLUMNS = 206  # 131,072 tokens in blocks of 640, rounded up
_LIVE_TOKENS = 8192
_SAMPLES = 50
_QUICK_SAMPLES = 10
_CALLS_IN_A_GRAPH = 20


def timing_checks() -> list[Check]:
    """Return the timings; they never fail on a number."""
    return [Check("timing.operations", _time_operations)]


def device_microseconds(
    body: Callable[[], object], device: torch.device, samples: int = _SAMPLES
) -> float:
    """Time a callable on the device.

    Parameters
    ----------
    body : callable
        Work on the current stream that a CUDA graph can capture.
    device : torch.device
        CUDA: replays of a graph of 20 calls, so that the host does not count. Otherwise wall time.
    samples : int, default 50
        Replays, or calls.

    Returns
    -------
    float
        Median of a call, microseconds.
    """
    if device.type != "cuda":
        return host_microseconds(body, samples)
    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_IN_A_GRAPH):
            body()
    graph.replay()
    event: Any = torch.cuda.Event
    times = []
    for _ in range(samples):
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS_IN_A_GRAPH)
    return float(median(times))


def host_microseconds(body: Callable[[], object], samples: int = _SAMPLES) -> float:
    """Time until a callable comes back, without waiting for the device: median, microseconds."""
    for _ in range(3):
        body()
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        body()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def _time_operations(target: Target) -> Finding:
    """Time a table of 256 rows for 131,072 tokens each, of which 8,192 are live."""
    device = target.device
    samples = _QUICK_SAMPLES if target.quick else _SAMPLES
    geometry = BlockGeometry.dense(
        "NHC",
        num_blocks=100_000,
        block_tokens=640,
        num_heads=2,
        content_bytes=1024,
        block_stride=15_728_640,
    )
    plan = PagePlan(geometry, 64)
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 100_000, (_ROWS, _BLOCK_COLUMNS), generator=generator)
    table = blocks.to(torch.int32).to(device)
    lengths = torch.full((_ROWS,), _LIVE_TOKENS, dtype=torch.int32, device=device)
    buffer = repage.PageTableBuffer(plan, _ROWS, _BLOCK_COLUMNS, device)
    whole = torch.zeros_like(buffer.table)
    counts = torch.full((_ROWS,), _LIVE_TOKENS // 64)
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32).to(device)
    indices = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=device)
    source, small = torch.zeros_like(whole), torch.zeros_like(indices)
    work: dict[str, Callable[[], object]] = {
        "page_table_whole_us": lambda: repage.build_page_table(
            table, plan, out=whole, check_ids=False
        ),
        "page_table_live_us": lambda: buffer.build(table, lengths, check_ids=False),
        "copy_table_us": lambda: whole.copy_(source),
        "kv_indices_us": lambda: repage.build_kv_indices(
            table, indptr, plan, out=indices, check_ids=False
        ),
        "copy_indices_us": lambda: indices.copy_(small),
    }
    measured = {name: device_microseconds(body, device, samples) for name, body in work.items()}
    text = ", ".join(f"{name.removesuffix('_us')} {us:.1f} us" for name, us in measured.items())
    if device.type == "cuda":
        measured["page_table_live_host_us"] = host_microseconds(work["page_table_live_us"], samples)
        torch.cuda.synchronize(device)
        text += f", of the host {measured['page_table_live_host_us']:.1f} us"
    return Finding(
        f"{_ROWS} rows of {whole.shape[1]} pages, {_LIVE_TOKENS} live tokens each: {text}", measured
    )
