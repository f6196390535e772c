# SPDX-License-Identifier: Apache-2.0
"""Strict rules of the cache writer and of reading tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_kernels.cache_writer import write_tokens
from reference_kernels.calls import native_run
from reference_kernels.errors import Rules
from reference_kernels.paging import PagedCache, SequenceTokens
from reference_kernels.rule_testing import Call, Change, layers_for, refused
from reference_kernels.synthetic import PackedLayers


def write_call(layers: PackedLayers, **extra: Any) -> Call:
    key_cache, value_cache = layers.manager_view(0)
    return {
        "key": torch.randn(4, 2, 64),
        "value": torch.randn(4, 2, 64),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([130, 131, -1]),
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones(()),
        "v_scale": torch.ones(()),
        **extra,
    }


WRITE_RULES: dict[str, tuple[str, Change]] = {
    "slot dtype": ("slot_mapping", lambda _s, c: {"slot_mapping": c["slot_mapping"].int()}),
    "slot too far": ("slot_mapping", lambda _s, _c: {"slot_mapping": torch.tensor([10**6])}),
    "slot twice": ("slot_mapping", lambda _s, _c: {"slot_mapping": torch.tensor([130, 130])}),
    "too few tokens": ("key.shape", lambda _s, c: {"key": c["key"][:2]}),
    "heads": ("value.shape", lambda _s, _c: {"value": torch.randn(4, 1, 64)}),
    "dtype": ("key_cache.dtype", lambda _s, c: {"key": c["key"].half()}),
    "K and V strides": (
        "value_cache",
        lambda _s, c: {"value_cache": torch.zeros(c["value_cache"].shape)},
    ),
}


@pytest.mark.parametrize("rule", WRITE_RULES)
def test_cache_writer(rule: str) -> None:
    argument, change = WRITE_RULES[rule]
    layers = layers_for((8, 0))
    call = write_call(layers)
    write_tokens(layers.context, **call)
    assert torch.equal(call["key_cache"][1, 2], call["key"][0])
    with refused(argument):
        write_tokens(layers.context, **call | change(layers, call))


def test_cache_writer_stores_fp8_as_bytes() -> None:
    layers = layers_for((8, 0))
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.uint8)
    key = torch.full((1, 2, 64), 3.0)
    call = write_call(layers, key=key, value=key, key_cache=cache, value_cache=cache.clone())
    call |= {"kv_cache_dtype": "fp8", "slot_mapping": torch.tensor([17])}
    write_tokens(layers.context, **call | {"k_scale": torch.tensor(2.0)})
    assert bool((cache.view(torch.float8_e4m3fn)[1, 1].float() == 1.5).all())


@pytest.mark.parametrize(("start", "stop"), [(99, 300), (100, 301)])
def test_reading_outside_the_live_tokens(start: int, stop: int) -> None:
    layers = layers_for((8, 0))
    live = SequenceTokens(first=100, length=300)
    arguments = (Rules("reader"), layers.context, layers.pages(), layers.page_table()[0])
    live.read(*arguments, 100, 300)
    with refused("tokens read"):
        live.read(*arguments, start, stop)


def test_live_tokens_are_finite() -> None:
    layers = layers_for((8, 0))
    native_run(layers)
    layers.write(0, 1, torch.full((5, 2, 64), float("inf")), torch.zeros(5, 2, 64))
    with refused("K of the live tokens"):
        native_run(layers)


def test_tokens_before_the_window_are_not_read() -> None:
    layers = layers_for((8, 0))
    indptr, indices, last_page_len = layers.csr()
    # As vLLM does for blocks that left the window: the null block, which nobody wrote.
    indices = indices.clone()
    indices[:8] = 0
    native_run(layers, indices=indices, last_page_len=last_page_len, indptr=indptr, window_left=33)


def test_unpacking_a_single_tensor() -> None:
    rules = Rules("kernel")
    both = torch.zeros(3, 2, 16, 2, 64)
    assert PagedCache.unpack(rules, both, "NHD").page_tokens == 16
    assert PagedCache.unpack(rules, both, "HND").page_tokens == 2
    with refused("kv_cache"):
        PagedCache.unpack(rules, both[:, :1], "NHD")
    with refused("kv_layout"):
        PagedCache.unpack(rules, both, "NDH")
