# SPDX-License-Identifier: Apache-2.0
"""Strict rules of FlashAttention: what breaks one is refused, its neighbour passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_kernels.calls import flash_call, restrided
from reference_kernels.flash_attention import FlashAttentionVarlen, SchedulerMetadata
from reference_kernels.rule_testing import Call, Change, layers_for, refused, with_dead_id
from reference_kernels.signatures import flash_attention_interface
from reference_kernels.synthetic import PackedLayers


def flash(layers: PackedLayers) -> FlashAttentionVarlen:
    return FlashAttentionVarlen(layers.context, flash_attention_interface())


FLASH_RULES: dict[str, tuple[str, Change]] = {
    "table dtype": ("block_table", lambda _s, c: {"block_table": c["block_table"].long()}),
    "table columns": (
        "block_table",
        lambda _s, _c: {"block_table": torch.zeros(3, 24, dtype=torch.int32)[:, ::2]},
    ),
    "table rows": ("block_table", lambda _s, c: {"block_table": c["block_table"][:2]}),
    "table too narrow": (
        "block_table.shape[1]",
        lambda s, _c: {"block_table": s.page_table(width=9)},
    ),
    "dead column": (
        "block_table: expected ids",
        lambda _s, c: {"block_table": with_dead_id(c["block_table"], 10**6)},
    ),
    "dead column behind the slice": (
        "block_table, columns behind the slice",
        lambda s, _c: {"block_table": with_dead_id(s.page_table(width=20), 10**6)[:, :12]},
    ),
    "max_seqlen_k": ("max_seqlen_k", lambda _s, _c: {"max_seqlen_k": 299}),
    "lengths dtype": ("seqused_k", lambda _s, c: {"seqused_k": c["seqused_k"].long()}),
    "starts": ("cu_seqlens_q", lambda _s, c: {"cu_seqlens_q": c["cu_seqlens_q"] + 1}),
    "query strides": ("q:", lambda _s, _c: {"q": torch.randn(64, 4, 46).permute(2, 1, 0)}),
    "would be cloned": (
        "k_cache.stride()",
        lambda s, _c: dict(zip("kv", restrided(s.pages(), page=2), strict=True)),
    ),
    "version": ("fa_version", lambda _s, _c: {"fa_version": 3}),
    "sinks on FA2": ("s_aux", lambda _s, _c: {"s_aux": torch.zeros(4)}),
    "splits on FA2": ("num_splits", lambda _s, _c: {"num_splits": 2}),
    "schedule on FA2": (
        "scheduler_metadata",
        lambda _s, _c: {"scheduler_metadata": torch.full((13,), 32, dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("rule", FLASH_RULES)
def test_flash_attention(rule: str) -> None:
    argument, change = FLASH_RULES[rule]
    layers = layers_for((8, 0))
    call = flash_call(layers, (40, 5, 1))
    flash(layers)(**call)
    with refused(argument):
        flash(layers)(**call | change(layers, call))


@pytest.mark.parametrize(("page", "legal"), [(16, True), (48, True), (8, False), (24, False)])
def test_flash_attention_page_sizes(page: int, legal: bool) -> None:
    layers = layers_for((8, 0), block_tokens=96 if page % 3 == 0 else 128, page_tokens=page)
    if legal:
        flash(layers)(**flash_call(layers, (40, 5, 1)))
    else:
        with refused("page size"):
            flash(layers)(**flash_call(layers, (40, 5, 1)))


def test_flash_attention_3_schedule_is_made_for_a_page_size() -> None:
    layers = layers_for((9, 0))
    call = flash_call(layers, (40, 5, 1), fa_version=3)
    schedule = SchedulerMetadata(layers.context, flash_attention_interface())
    lengths = {"cache_seqlens": call["seqused_k"], "page_size": 32}
    sizes = {"batch_size": 3, "max_seqlen_q": 40, "max_seqlen_k": 300}
    heads = {"num_heads_q": 4, "num_heads_kv": 2, "headdim": 64}
    flash(layers)(**call, scheduler_metadata=schedule(**lengths, **sizes, **heads))
    other = schedule(**lengths | {"page_size": 64}, **sizes, **heads)
    with refused("scheduler_metadata"):
        flash(layers)(**call, scheduler_metadata=other)
    with refused("page_size"):
        schedule(**lengths | {"page_size": 8}, **sizes, **heads)
    with refused("cache_seqlens"):
        schedule(**lengths | {"cache_seqlens": call["seqused_k"].long()}, **sizes, **heads)


def hd256_call(layers: PackedLayers, **extra: Any) -> Call:
    call = flash_call(layers, (40, 5, 1), fa_version=4, num_splits=1, max_seqlen_k=384)
    return call | {"block_table": layers.page_table(width=3)} | extra


def test_flash_attention_4_head_dim_256() -> None:
    layers = layers_for((10, 0), head_dim=256, block_tokens=256, page_tokens=128)
    flash(layers)(**hd256_call(layers))
    changes: dict[str, Call] = {
        "max_seqlen_k": {"max_seqlen_k": 300},
        "block_table.shape[1]": {"block_table": layers.page_table(width=4)},
        "num_splits": {"num_splits": 0},
        "s_aux, softcap": {"softcap": 2.0},
    }
    for argument, change in changes.items():
        with refused(argument):
            flash(layers)(**hd256_call(layers, **change))


@pytest.mark.parametrize("page", [64, 256])
def test_flash_attention_4_head_dim_256_pages(page: int) -> None:
    layers = layers_for((10, 0), head_dim=256, block_tokens=256, page_tokens=page)
    call = flash_call(layers, (40, 5, 1), fa_version=4, num_splits=1)
    with refused("page size"):
        flash(layers)(**call)


def test_flash_attention_4_takes_other_pages_with_other_heads() -> None:
    layers = layers_for((10, 0), head_dim=128, page_tokens=64)
    flash(layers)(**flash_call(layers, (40, 5, 1), fa_version=4))
