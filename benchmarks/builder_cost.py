# SPDX-License-Identifier: Apache-2.0
"""Host time of one metadata builder's re-paging per step, next to vLLM's own mapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import measure
import repage

BLOCK_TOKENS, PAGE_TOKENS, NUM_BLOCKS, BLOCK_STEP = 640, 64, 64, 30
SHAPES = ((1, 3), (4, 13), (16, 52), (64, 205))  # rows and columns of the manager table
LAYERS = (1, 10)  # of one builder


def measure_builders(quick: bool) -> list[dict[str, Any]]:
    """Return medians for vLLM's ``_with_kernel_block_table`` and for `GroupTable`.

    Both make the metadata that the parent builder gets: the mapped table and a copy of the common
    metadata with it. "repage list" is FlashInfer's native path, whose list of pages is made
    instead of a table; vLLM makes its list from the mapped table, which is not counted here.
    """
    found = []
    for rows, width in SHAPES[:1] if quick else SHAPES:
        for layers in LAYERS:
            functions = _functions(rows, width, layers)
            medians = measure.interleaved_medians(
                functions, measure.CpuTimer(), budget_s=0.1 if quick else 1.0, max_rounds=201
            )
            found.append({"rows": rows, "width": width, "layers": layers, "us": medians})
    return found


def judge(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the target on the Python cost in the form of `page_table_targets.judge`."""
    ratios = [
        (entry["us"][name]["median"] / entry["us"]["vllm"]["median"], entry)
        for entry in found
        for name in ("repage", "repage list")
    ]
    worst, entry = max(ratios, key=lambda pair: pair[0])
    missed = sum(value > 1.0 for value, _ in ratios)
    return {
        "target": "one builder's step: time over that of vLLM's mapping, at most",
        "limit": 1.0,
        "worst": round(worst, 2),
        "where": {name: entry[name] for name in ("rows", "width", "layers")},
        "cases": len(ratios),
        "missed": missed,
        "holds": missed == 0,
    }


def _functions(rows: int, width: int, layers: int) -> dict[str, Callable[[], Any]]:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup

    from repage.vllm.policy import PageChoice
    from repage.vllm.table import GroupTable

    rng = np.random.default_rng(rows)
    table = torch.from_numpy(rng.integers(0, NUM_BLOCKS, (rows, width), dtype=np.int32))
    seq_lens = torch.full((rows,), width * BLOCK_TOKENS - 5, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=rows,
        num_actual_tokens=rows,
        max_query_len=1,
        max_seq_len=width * BLOCK_TOKENS,
        block_table_tensor=table,
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
    )
    group = AttentionGroup(
        backend=None,  # type: ignore[arg-type]
        layer_names=["layer"],
        kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS),  # type: ignore[arg-type]
        kv_cache_group_id=0,
        kernel_block_size=PAGE_TOKENS,
        kernel_block_stride=BLOCK_STEP,
    )
    pages = BLOCK_TOKENS // PAGE_TOKENS
    group.kernel_block_table = torch.zeros(1, rows, width * pages, dtype=torch.int32)
    group.kernel_block_offsets = torch.arange(pages, dtype=torch.int32)

    # Layers of one head of 32 elements, packed three deep: the real pool's shape, in little.
    pool = torch.zeros(NUM_BLOCKS, 3 * layers, 1, BLOCK_TOKENS, 4, dtype=torch.float32)
    names = [f"layer{index}" for index in range(layers)]
    context = {name: SimpleNamespace(kv_cache=pool[:, index]) for index, name in enumerate(names)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        speculative_config=None,
    )
    rules = repage.KernelPageRules(page_sizes=(PAGE_TOKENS,))
    choice = PageChoice(PAGE_TOKENS, BLOCK_TOKENS, rules)
    ours = GroupTable(choice, names, config, torch.device("cpu"), persistent=True)
    step = ours.plan().block_step
    group.kernel_block_stride = step
    if not torch.equal(group.map_to_kernel_block_table(table), ours.build(table, seq_lens)):
        raise SystemExit("the two mappings disagree")

    def with_repage() -> Any:
        mapped = ours.build(common.block_table_tensor, common.seq_lens)
        return common.replace(block_table_tensor=mapped)

    kv_indptr = starts * (width * pages)
    kv_indices = torch.zeros(rows * width * pages, dtype=torch.int32)

    def with_repage_list() -> Any:
        mapped = ours.unfilled(common.block_table_tensor)
        replaced = common.replace(block_table_tensor=mapped)
        ours.list_pages(common.block_table_tensor, kv_indptr, kv_indices)
        return replaced

    with_repage_list()
    if not torch.equal(kv_indices, group.map_to_kernel_block_table(table).flatten()):
        raise SystemExit("the mapping and the list disagree")

    return {
        "vllm": lambda: group._with_kernel_block_table(common),
        "repage": with_repage,
        "repage list": with_repage_list,
        # Of both, what is not the mapping.
        "replace only": lambda: replace(common, block_table_tensor=table),
    }
