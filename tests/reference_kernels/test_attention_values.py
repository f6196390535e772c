# SPDX-License-Identifier: Apache-2.0
"""Every kernel computes attention over the right tokens: compared with dense SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_kernels.calls import (
    context_call,
    flash_call,
    prefill_plan,
    running_sum,
    table_call,
    workspace,
)
from reference_kernels.context import KernelContext
from reference_kernels.flash_attention import FlashAttentionVarlen
from reference_kernels.flashinfer_native import wrappers_for
from reference_kernels.signatures import flash_attention_interface
from reference_kernels.synthetic import PackedLayers
from reference_kernels.trtllm import TrtllmContext, TrtllmDecode
from reference_kernels.xqa import XqaDecode

LENGTHS = (300, 5, 128, 129)
PREFILL_TOKENS = (40, 5, 1, 129)
CASES = pytest.mark.parametrize(
    ("window_left", "kv_heads"), [(-1, 2), (-1, 1), (33, 2), (0, 4)], ids=str
)


def dense_attention(
    layers: PackedLayers,
    query: Tensor,
    counts: tuple[int, ...],
    *,
    window_left: int = -1,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """SDPA per sequence on the dense K and V; soft capping and sinks spelled out."""
    results = []
    start = 0
    for row, count in enumerate(counts):
        key, value = (side.transpose(0, 1) for side in layers.dense[0, row])
        q = query[start : start + count].transpose(0, 1)
        start += count
        length = key.shape[1]
        position = torch.arange(length - count, length).view(-1, 1)
        token = torch.arange(length).view(1, -1)
        seen = torch.ones(count, length, dtype=torch.bool)
        if causal:
            seen &= token <= position
        if window_left >= 0:
            seen &= token >= position - window_left
        if not softcap and sinks is None:
            out = scaled_dot_product_attention(
                q[None], key[None], value[None], attn_mask=seen, enable_gqa=True
            )[0]
        else:
            group = q.shape[0] // key.shape[0]
            scores = q @ key.repeat_interleave(group, 0).transpose(1, 2) * q.shape[2] ** -0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                extra = sinks.view(-1, 1, 1).expand(-1, count, 1)
                scores = torch.cat([scores, extra], 2)
            weights = scores.softmax(2)[..., :length]
            out = weights @ value.repeat_interleave(group, 0)
        results.append(out.transpose(0, 1))
    return torch.cat(results)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)


def make(
    capability: tuple[int, int], kv_heads: int = 2, **arguments: Any
) -> tuple[KernelContext, PackedLayers]:
    context = KernelContext(capability=capability, float32=True)
    return context, PackedLayers(context, LENGTHS, kv_heads=kv_heads, **arguments)


@CASES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_native_decode(layout: Any, window_left: int, kv_heads: int) -> None:
    context, layers = make((8, 0), kv_heads, layout=layout)
    query = torch.randn(len(LENGTHS), 4, 64)
    wrapper = wrappers_for(context)[0](workspace(), layout, use_tensor_cores=True)
    wrapper.plan(
        *layers.csr(), 4, kv_heads, 64, 32, window_left=window_left, q_data_type=torch.float32
    )
    cache = layers.pages()
    out = wrapper.run(query, (cache.key, cache.value))
    close(out, dense_attention(layers, query, (1,) * 4, window_left=window_left))


@CASES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
def test_native_prefill(layout: Any, window_left: int, kv_heads: int, causal: bool) -> None:
    context, layers = make((8, 0), kv_heads, layout=layout)
    query = torch.randn(sum(PREFILL_TOKENS), 4, 64)
    wrapper = wrappers_for(context)[1](workspace(), layout)
    wrapper.plan(**prefill_plan(layers, PREFILL_TOKENS, causal=causal, window_left=window_left))
    cache = layers.pages()
    out = wrapper.run(query, (cache.key, cache.value))
    wanted = dense_attention(layers, query, PREFILL_TOKENS, window_left=window_left, causal=causal)
    close(out, wanted)


def test_native_softcap_sinks_and_lse() -> None:
    context, layers = make((8, 0))
    query = torch.randn(len(LENGTHS), 4, 64)
    sinks = torch.randn(4)
    wrapper = wrappers_for(context)[0](workspace(), "NHD", use_tensor_cores=True)
    wrapper.plan(*layers.csr(), 4, 2, 64, 32, logits_soft_cap=3.0, q_data_type=torch.float32)
    cache = layers.pages()
    out, lse = wrapper.run(query, (cache.key, cache.value), sinks=sinks, return_lse=True)
    close(out, dense_attention(layers, query, (1,) * 4, softcap=3.0, sinks=sinks))
    # The log-sum-exp has base 2; without sinks the weights of all keys sum to one.
    plain, base2 = wrapper.run(query, (cache.key, cache.value), return_lse=True)
    key, _ = layers.dense[0, 1]
    scores = torch.einsum("hd,khd->hk", query[1], key.repeat_interleave(2, 1)) / 8.0
    close(base2[1], torch.log2(torch.exp(3.0 * torch.tanh(scores / 3.0)).sum(1)))
    assert not torch.allclose(plain, out)
    assert bool((lse > base2).all())


def test_native_decode_of_several_tokens_per_request() -> None:
    context, layers = make((8, 0))
    query = torch.randn(3 * len(LENGTHS), 4, 64)
    wrapper = wrappers_for(context)[0](workspace(), "NHD", use_tensor_cores=True, backend="fa2")
    wrapper.plan(*layers.csr(), 4, 2, 64, 32, q_len_per_req=3, q_data_type=torch.float32)
    cache = layers.pages()
    close(wrapper.run(query, (cache.key, cache.value)), dense_attention(layers, query, (3,) * 4))


@CASES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_xqa_decode(layout: Any, window_left: int, kv_heads: int) -> None:
    context, layers = make((9, 0), kv_heads, layout=layout)
    call = table_call(layers, window_left=window_left)
    wanted = dense_attention(layers, call["query"], (1,) * 4, window_left=window_left)
    close(XqaDecode(context)(**call), wanted)


def pack_mask(visible: Tensor) -> Tensor:
    """Bool ``[rows, keys]`` to XQA's uint16 words, 32 bits aligned."""
    words = -(-visible.shape[1] // 32) * 2
    padded = torch.zeros(visible.shape[0], words * 16, dtype=torch.int32)
    padded[:, : visible.shape[1]] = visible
    weights = 1 << torch.arange(16, dtype=torch.int32)
    return (padded.view(-1, words, 16) * weights).sum(2).to(torch.uint16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 33])
def test_xqa_draft_masks(causal: bool, window_left: int) -> None:
    context, layers = make((9, 0))
    one = torch.ones(5, 5, dtype=torch.bool)
    mask = pack_mask((one.tril() if causal else one).repeat(4, 1)).view(4, 5, 2)
    call = table_call(layers, 5, mask=mask, window_left=window_left)
    wanted = dense_attention(
        layers, call["query"], (5,) * 4, causal=causal, window_left=window_left
    )
    close(XqaDecode(context)(**call), wanted)


def test_xqa_ragged_drafts() -> None:
    counts = (3, 0, 2, 1)
    context, layers = make((9, 0))
    query = torch.randn(sum(counts), 4, 64)
    rows = [torch.ones(count, 3, dtype=torch.bool).tril() for count in counts]
    call = table_call(layers, 3) | {
        "query": query,
        "out": torch.empty_like(query),
        "q_cu_seq_lens": running_sum(counts),
        "mask": pack_mask(torch.cat(rows)),
    }
    close(XqaDecode(context)(**call), dense_attention(layers, query, counts))


@CASES
def test_trtllm_decode(window_left: int, kv_heads: int) -> None:
    context, layers = make((10, 0), kv_heads, layout="HND")
    call = table_call(layers, 2, window_left=window_left)
    wanted = dense_attention(layers, call["query"], (2,) * 4, window_left=window_left)
    close(TrtllmDecode(context)(**call), wanted)


def test_trtllm_decode_with_sinks_and_ragged_queries() -> None:
    counts = (3, 1, 2, 1)
    context, layers = make((10, 0), layout="HND")
    query, sinks = torch.randn(sum(counts), 4, 64), torch.randn(4)
    call = table_call(layers) | {
        "query": query,
        "out": torch.empty_like(query),
        "q_len_per_req": None,
        "max_q_len": 3,
        "cum_seq_lens_q": running_sum(counts),
        "sinks": sinks,
    }
    close(TrtllmDecode(context)(**call), dense_attention(layers, query, counts, sinks=sinks))


@CASES
def test_trtllm_context(window_left: int, kv_heads: int) -> None:
    context, layers = make((10, 0), kv_heads, layout="HND")
    call = context_call(layers, PREFILL_TOKENS, window_left=window_left)
    wanted = dense_attention(layers, call["query"], PREFILL_TOKENS, window_left=window_left)
    close(TrtllmContext(context)(**call), wanted)


def flash(context: KernelContext) -> Callable[..., Tensor]:
    return FlashAttentionVarlen(context, flash_attention_interface())


@CASES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flash_attention(layout: Any, window_left: int, kv_heads: int) -> None:
    context, layers = make((8, 0), kv_heads, layout=layout)
    window = [window_left, -1 if window_left < 0 else 0]
    call = flash_call(layers, PREFILL_TOKENS, window_size=window)
    wanted = dense_attention(layers, call["q"], PREFILL_TOKENS, window_left=window_left)
    close(flash(context)(**call), wanted)


def test_flash_attention_softcap_and_sinks() -> None:
    context, layers = make((9, 0))
    sinks = torch.randn(4)
    call = flash_call(layers, PREFILL_TOKENS, fa_version=3, s_aux=sinks, softcap=2.0)
    wanted = dense_attention(layers, call["q"], PREFILL_TOKENS, softcap=2.0, sinks=sinks)
    close(flash(context)(**call), wanted)


def test_flash_attention_with_a_window_on_both_sides() -> None:
    context, layers = make((8, 0))
    call = flash_call(layers, (300, 5, 128, 129), causal=False, window_size=[7, 7])
    key, value = (side.transpose(0, 1) for side in layers.dense[0, 1])
    distance = (torch.arange(5).view(-1, 1) - torch.arange(5)).abs()
    assert int(distance.max()) < 7
    wanted = scaled_dot_product_attention(
        call["q"][300:305].transpose(0, 1)[None], key[None], value[None], enable_gqa=True
    )[0].transpose(0, 1)
    close(flash(context)(**call)[300:305], wanted)
    narrow = flash(context)(**call | {"window_size": [1, 1]})[300:305]
    seen = distance <= 1
    wanted = scaled_dot_product_attention(
        call["q"][300:305].transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=seen,
        enable_gqa=True,
    )[0].transpose(0, 1)
    close(narrow, wanted)


def test_flash_attention_4_with_head_dim_256() -> None:
    context, layers = make(
        (10, 0), kv_heads=1, head_dim=256, block_tokens=256, page_tokens=128, layout="HND"
    )
    call = flash_call(layers, PREFILL_TOKENS, fa_version=4, num_splits=1, query_heads=2)
    call |= {"max_seqlen_k": 384, "block_table": layers.page_table()[:, :3]}
    close(flash(context)(**call), dense_attention(layers, call["q"], PREFILL_TOKENS))
    assert context.calls["fa4_hd256 p128"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches(dtype: torch.dtype) -> None:
    context = KernelContext((9, 0))
    layers = PackedLayers(context, LENGTHS, dtype=dtype)
    call = table_call(layers)
    layers.dense = {
        place: (key.float(), value.float()) for place, (key, value) in layers.dense.items()
    }
    wanted = dense_attention(layers, call["query"].float(), (1,) * 4)
    torch.testing.assert_close(XqaDecode(context)(**call).float(), wanted, atol=1e-2, rtol=1e-2)


def test_empty_sequence_yields_zeros() -> None:
    context = KernelContext((9, 0), float32=True)
    out = XqaDecode(context)(**table_call(PackedLayers(context, (0, 7))))
    assert bool((out[0] == 0).all())
    assert bool((out[1] != 0).any())
