# SPDX-License-Identifier: Apache-2.0
"""Strict rules of FlashInfer's native wrappers: a broken one is refused, its neighbour passes."""

from __future__ import annotations

import pytest
import torch

from reference_kernels.calls import (
    decode_plan,
    native_run,
    prefill_plan,
    restrided,
    untracked,
    workspace,
)
from reference_kernels.flashinfer_native import fast_decode_plan, wrappers_for
from reference_kernels.rule_testing import Change, layers_for, refused

PLAN_RULES: dict[str, tuple[str, Change]] = {
    "indptr dtype": ("paged_kv_indptr", lambda _s, c: {"indptr": c["indptr"].long()}),
    "indptr length": ("paged_kv_indptr", lambda _s, c: {"indptr": c["indptr"][:-1]}),
    "indptr falls": (
        "paged_kv_indptr",
        lambda _s, _c: {"indptr": torch.tensor([0, 10, 9, 15], dtype=torch.int32)},
    ),
    "indices strided": (
        "paged_kv_indices",
        lambda _s, _c: {"indices": torch.zeros(64, dtype=torch.int32)[::2]},
    ),
    "indices short": ("paged_kv_indices", lambda _s, c: {"indices": c["indices"][:-1]}),
    "last page too full": (
        "paged_kv_last_page_len",
        lambda _s, c: {"last_page_len": c["last_page_len"] + 32},
    ),
    "last page empty": ("paged_kv_last_page_len", lambda _s, c: {"last_page_len": c["indptr"][:3]}),
    "lengths of other pages": (
        "seq_lens",
        lambda _s, _c: {"seq_lens": torch.tensor([300, 5, 127], dtype=torch.int32)},
    ),
    "page size": ("page_size", lambda _s, _c: {"page_size": 0, "seq_lens": None}),
    "heads": ("num_qo_heads", lambda _s, _c: {"num_qo_heads": 3}),
    "no queries": ("q_len_per_req", lambda _s, _c: {"q_len_per_req": 0}),
}


@pytest.mark.parametrize("rule", PLAN_RULES)
def test_native_plan(rule: str) -> None:
    argument, change = PLAN_RULES[rule]
    layers = layers_for((8, 0))
    wrapper = wrappers_for(layers.context)[0](workspace(), use_tensor_cores=True)
    call = decode_plan(layers)
    wrapper.plan(**call)
    with refused(argument):
        wrapper.plan(**call | change(layers, call))


def test_native_run_takes_what_was_planned() -> None:
    layers = layers_for((8, 0))
    native_run(layers)
    with refused("paged_kv_cache"):
        native_run(layers, page_size=16, last_page_len=torch.tensor([12, 5, 16]).int())
    with refused("dtypes of q and paged_kv_cache"):
        native_run(layers, q_data_type=torch.bfloat16)
    with refused("q:"):
        native_run(layers, q=torch.randn(2, 4, 64))
    with refused("out"):
        native_run(layers, out=torch.empty(3, 4, 64, dtype=torch.bfloat16))
    with refused("window_left"):
        native_run(layers, run_window_left=5)


@pytest.mark.parametrize("page", [1, 8, 48, 96])
def test_native_kernels_take_any_page_size(page: int) -> None:
    native_run(layers_for((8, 0), block_tokens=96, page_tokens=page))


def test_native_page_list_is_read_by_run_not_by_plan() -> None:
    layers = layers_for((8, 0))
    wrapper = wrappers_for(layers.context)[0](workspace(), use_tensor_cores=True)
    call = decode_plan(layers)
    wrapper.plan(**call)
    cache, query = layers.pages(), torch.randn(3, 4, 64)
    wrapper.run(query, (cache.key, cache.value))
    call["indices"][2] = cache.num_pages
    with refused("paged_kv_indices: expected ids"):
        wrapper.run(query, (cache.key, cache.value))


def test_native_run_needs_a_plan() -> None:
    layers = layers_for((8, 0))
    wrapper = wrappers_for(layers.context)[0](workspace(), use_tensor_cores=True)
    with refused("plan()"):
        wrapper.run(torch.randn(3, 4, 64), (layers.pages().key, layers.pages().value))


def test_native_k_and_v_strides() -> None:
    layers = layers_for((8, 0), context=untracked((8, 0)))
    key, value = layers.pages().key, torch.zeros(layers.pages().value.shape)
    native_run(layers, (key, value), use_tensor_cores=True)
    with refused("v_cache.stride()"):
        native_run(layers, (key, value), use_tensor_cores=False)


def test_native_fa3_prefill_k_and_v_strides() -> None:
    for capability in ((8, 0), (9, 0)):
        layers = layers_for(capability, context=untracked(capability))
        wrapper = wrappers_for(layers.context)[1](workspace())
        wrapper.plan(**prefill_plan(layers, (40, 5, 1)))
        cache, query = layers.pages(), torch.randn(46, 4, 64)
        wrapper.run(query, (cache.key, cache.value))
        apart = (cache.key, torch.zeros(cache.value.shape))
        if capability == (8, 0):
            wrapper.run(query, apart)
        else:
            with refused("v_cache.stride()"):
                wrapper.run(query, apart)


def test_native_fa2_strides_are_uint32() -> None:
    layers = layers_for((8, 0), context=untracked((8, 0)))
    with refused("paged_kv_cache.stride()"):
        native_run(layers, restrided(layers.pages(), page=2**32))


def test_native_query_starts() -> None:
    layers = layers_for((8, 0))
    wrapper = wrappers_for(layers.context)[1](workspace())
    call = prefill_plan(layers, (40, 5, 1))
    wrapper.plan(**call)
    for starts in ([0, 40, 45], [1, 40, 45, 46], [0, 40, 39, 46]):
        with refused("qo_indptr"):
            wrapper.plan(**call | {"qo_indptr": torch.tensor(starts, dtype=torch.int32)})


def test_native_several_queries_per_request() -> None:
    layers = layers_for((8, 0))
    native_run(layers, q=torch.randn(6, 4, 64), q_len_per_req=2)
    with refused("q_len_per_req"):
        native_run(layers, q=torch.randn(6, 4, 64), q_len_per_req=2, use_tensor_cores=False)
    hopper = layers_for((9, 0))
    with refused("q_len_per_req"):
        native_run(hopper, q_len_per_req=2, kv_data_type=torch.float8_e4m3fn)


def test_native_cuda_graph_buffers() -> None:
    layers = layers_for((8, 0))
    indptr, indices, last_page_len = (torch.zeros_like(part) for part in layers.csr())
    wrapper = wrappers_for(layers.context)[0](
        workspace(),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len,
    )
    call = decode_plan(layers)
    wrapper.plan(**call)
    assert torch.equal(indices, call["indices"])
    cache, query = layers.pages(), torch.randn(3, 4, 64)
    first = wrapper.run(query, (cache.key, cache.value)).clone()
    # A replay reads the buffers: what the last plan's own tensors became does not matter.
    call["indices"].fill_(10**6)
    assert torch.equal(first, wrapper.run(query, (cache.key, cache.value)))
    # Planning fast leaves the buffers to the caller.
    fast_decode_plan(wrapper, **decode_plan(layers))
    indices[0] = 10**6
    with refused("paged_kv_indices: expected ids"):
        wrapper.run(query, (cache.key, cache.value))
    with refused("q_len_per_req"):
        wrapper.plan(**decode_plan(layers, q_len_per_req=2))
    with refused("batch size"):
        wrapper.plan(**decode_plan(layers_for((8, 0), lengths=(9, 9))))
    with refused("paged_kv_indices"):
        wrapper.plan(**decode_plan(layers, indices=torch.zeros(99, dtype=torch.int32)))
