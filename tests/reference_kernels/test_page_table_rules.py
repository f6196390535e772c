# SPDX-License-Identifier: Apache-2.0
"""Strict rules of XQA and trtllm-gen: what breaks one is refused, its neighbour passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_kernels.calls import context_call, restrided, table_call, untracked
from reference_kernels.context import KernelContext
from reference_kernels.errors import StrictKernelError, UnmodelledCallError
from reference_kernels.rule_testing import LENGTHS, Change, layers_for, refused, with_dead_id
from reference_kernels.trtllm import TrtllmContext, TrtllmDecode
from reference_kernels.xqa import XqaDecode


def test_error_names_kernel_argument_expectation_and_source() -> None:
    layers = layers_for((9, 0))
    call = table_call(layers) | {"block_tables": layers.page_table().long()}
    with pytest.raises(StrictKernelError) as caught:
        XqaDecode(layers.context)(**call)
    error = caught.value
    assert error.kernel == "xqa_batch_decode_with_kv_cache"
    assert error.argument == "block_tables"
    assert "int32" in error.expected
    assert "int64" in error.got
    assert "flashinfer-python 0.7.2.post1" in str(error)


def test_calls_are_bound_to_the_real_signatures() -> None:
    layers = layers_for((9, 0))
    call = table_call(layers)
    with pytest.raises(TypeError, match="page_table"):
        XqaDecode(layers.context)(**call, page_table=call["block_tables"])
    with pytest.raises(TypeError, match="missing"):
        TrtllmDecode(layers.context)(query=call["query"])


TABLE_RULES: dict[str, tuple[str, Change]] = {
    "table dtype": ("block_tables", lambda _s, c: {"block_tables": c["block_tables"].long()}),
    "table row stride": (
        "block_tables.stride()",
        lambda s, _c: {"block_tables": s.page_table(width=20)[:, :12]},
    ),
    "table rows": ("block_tables.shape[0]", lambda _s, c: {"block_tables": c["block_tables"][:2]}),
    "table too narrow": (
        "block_tables.shape[1]",
        lambda s, _c: {"block_tables": s.page_table(width=9)},
    ),
    "dead column outside the view": (
        "block_tables: expected ids",
        lambda s, c: {"block_tables": with_dead_id(c["block_tables"], s.pages().num_pages)},
    ),
    "dead column negative": (
        "block_tables: expected ids",
        lambda _s, c: {"block_tables": with_dead_id(c["block_tables"], -1)},
    ),
    "lengths dtype": ("seq_lens", lambda _s, c: {"seq_lens": c["seq_lens"].long()}),
    "query not contiguous": (
        "query",
        lambda _s, _c: {"query": torch.randn(64, 4, 3).permute(2, 1, 0)},
    ),
    "out missing": ("out", lambda _s, _c: {"out": None}),
    "inner stride": (
        "k_cache.stride(-1)",
        lambda s, _c: {"kv_cache": restrided(s.pages(), last=1)},
    ),
    "stride alignment": (
        "k_cache.stride()",
        lambda s, _c: {"kv_cache": restrided(s.pages(), page=2)},
    ),
    "base alignment": (
        "k_cache.data_ptr()",
        lambda s, _c: {"kv_cache": restrided(s.pages(), base=1)},
    ),
    "K and V strides": (
        "v_cache.stride()",
        lambda _s, c: {"kv_cache": (c["kv_cache"][0], torch.zeros(c["kv_cache"][1].shape))},
    ),
    "stride of 2**40 bytes": (
        "k_cache.stride()",
        lambda s, _c: {"kv_cache": restrided(s.pages(), page=2**38)},
    ),
    "K and V shapes": (
        "v_cache",
        lambda _s, c: {"kv_cache": (c["kv_cache"][0], c["kv_cache"][1][:3])},
    ),
    "uniform queries": ("query.shape[0]", lambda _s, _c: {"q_len_per_req": 2}),
}


@pytest.mark.parametrize("rule", TABLE_RULES)
@pytest.mark.parametrize(("kernel", "capability"), [(XqaDecode, (9, 0)), (TrtllmDecode, (10, 0))])
def test_page_table_kernels(rule: str, kernel: Any, capability: tuple[int, int]) -> None:
    argument, change = TABLE_RULES[rule]
    layers = layers_for(capability, layout="HND")
    call = table_call(layers)
    kernel(layers.context)(**call)
    with refused(argument):
        kernel(layers.context)(**call | change(layers, call))


@pytest.mark.parametrize(("kernel", "capability"), [(XqaDecode, (9, 0)), (TrtllmDecode, (10, 0))])
def test_float32_is_only_a_stand_in(kernel: Any, capability: tuple[int, int]) -> None:
    layers = layers_for(capability, layout="HND", context=KernelContext(capability))
    with refused("k_cache.dtype"):
        kernel(layers.context)(**table_call(layers))
    half = layers_for(
        capability, layout="HND", context=KernelContext(capability), dtype=torch.bfloat16
    )
    kernel(half.context)(**table_call(half))


@pytest.mark.parametrize(("page", "legal"), [(16, True), (128, True), (8, False), (64, True)])
def test_xqa_page_sizes(page: int, legal: bool) -> None:
    layers = layers_for((9, 0), page_tokens=page)
    if legal:
        XqaDecode(layers.context)(**table_call(layers))
        assert layers.context.calls[f"xqa_decode p{page}"] == 1
    else:
        with refused("page size"):
            XqaDecode(layers.context)(**table_call(layers))


def test_xqa_pages_of_256_tokens() -> None:
    layers = layers_for((9, 0), block_tokens=256, page_tokens=256)
    with refused("page size"):
        XqaDecode(layers.context)(**table_call(layers))


def test_xqa_divides_strides_by_the_head_dim() -> None:
    layers = layers_for((9, 0), context=untracked((9, 0)))
    call = table_call(layers)
    XqaDecode(layers.context)(**call | {"kv_cache": restrided(layers.pages(), page=64)})
    with refused("k_cache.stride()"):
        XqaDecode(layers.context)(**call | {"kv_cache": restrided(layers.pages(), page=32)})


def test_xqa_head_dim() -> None:
    layers = layers_for((9, 0), context=untracked((9, 0)), head_dim=24)
    with refused("head_dim"):
        XqaDecode(layers.context)(**table_call(layers))


def test_xqa_devices() -> None:
    layers = layers_for((8, 0))
    with refused("device"):
        XqaDecode(layers.context)(**table_call(layers))


def test_xqa_drafts_need_a_mask_of_the_right_shape() -> None:
    layers = layers_for((9, 0))
    call = table_call(layers, 3)
    good = torch.full((3, 3, 2), 7, dtype=torch.int32).to(torch.uint16)
    XqaDecode(layers.context)(**call, mask=good)
    for mask in (None, good[:, :2], good.to(torch.int16), good[..., :1]):
        with refused("mask"):
            XqaDecode(layers.context)(**call, mask=mask)


def test_xqa_ragged_queries() -> None:
    layers = layers_for((9, 0))
    call = table_call(layers, 2) | {"mask": torch.zeros(6, 2, dtype=torch.uint16)}
    starts = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    XqaDecode(layers.context)(**call | {"q_cu_seq_lens": starts, "q_len_per_req": 3})
    with refused("q_len_per_req"):
        XqaDecode(layers.context)(**call | {"q_cu_seq_lens": starts, "q_len_per_req": 1})
    with refused("cumulative query lengths"):
        XqaDecode(layers.context)(**call | {"q_cu_seq_lens": starts - 1, "q_len_per_req": 3})


def test_trtllm_is_head_major() -> None:
    layers = layers_for((10, 0), layout="NHD")
    with refused("kv_layout"):
        TrtllmDecode(layers.context)(**table_call(layers))


@pytest.mark.parametrize(
    ("arguments", "heads", "legal"),
    [
        ({"page_tokens": 16}, 4, True),
        ({"page_tokens": 64}, 4, True),
        ({"page_tokens": 128}, 4, True),
        ({"page_tokens": 8}, 4, False),
        ({"page_tokens": 48, "block_tokens": 96}, 4, False),
        ({"page_tokens": 256, "block_tokens": 256}, 4, True),
        # Wrong until FlashInfer 0.6 only (vllm#27994, taken back by vllm#36987).
        ({"page_tokens": 16, "head_dim": 256}, 4, True),
        ({"page_tokens": 128}, 2, False),
        ({"page_tokens": 64}, 2, True),
    ],
)
def test_trtllm_page_sizes(arguments: dict[str, int], heads: int, legal: bool) -> None:
    layers = layers_for((10, 0), layout="HND", **arguments)
    call = table_call(layers, query_heads=heads)
    if legal:
        TrtllmDecode(layers.context)(**call)
    else:
        with refused("page size"):
            TrtllmDecode(layers.context)(**call)


def test_trtllm_strides_are_int32() -> None:
    layers = layers_for((10, 0), layout="HND", context=untracked((10, 0)))
    with refused("k_cache.stride()"):
        TrtllmDecode(layers.context)(
            **table_call(layers, kv_cache=restrided(layers.pages(), page=2**31))
        )


def test_trtllm_runs_on_sm100() -> None:
    layers = layers_for((9, 0), layout="HND")
    with refused("device"):
        TrtllmDecode(layers.context)(**table_call(layers))


def test_trtllm_decode_arguments() -> None:
    layers = layers_for((10, 0), layout="HND")
    kernel, call = TrtllmDecode(layers.context), table_call(layers, 2)
    starts = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    ragged = {"cum_seq_lens_q": starts, "max_q_len": 3, "q_len_per_req": None}
    kernel(**call | ragged | {"sinks": torch.zeros(4)})
    with refused("max_q_len"):
        kernel(**call | ragged | {"q_len_per_req": 2})
    with refused("max_q_len"):
        kernel(**call | ragged | {"max_q_len": 2})
    with refused("max_seq_len"):
        kernel(**call | {"max_seq_len": max(LENGTHS) - 1})
    with refused("sinks"):
        kernel(**call | {"sinks": torch.zeros(4, dtype=torch.bfloat16)})
    with pytest.raises(UnmodelledCallError, match="xqa"):
        kernel(**call | {"backend": "xqa"})


def test_trtllm_context_arguments() -> None:
    layers = layers_for((10, 0), layout="HND")
    kernel, call = TrtllmContext(layers.context), context_call(layers, (40, 5, 1))
    kernel(**call)
    kernel(**call | {"causal": False})
    with refused("window_left"):
        kernel(**call | {"causal": False, "window_left": 7})
    with refused("max_q_len"):
        kernel(**call | {"max_q_len": 39})
    with refused("max_kv_len"):
        kernel(**call | {"max_kv_len": max(LENGTHS) - 1})
    # The running sum counts pages, not tokens.
    with refused("cum_seq_lens_kv"):
        kernel(**call | {"cum_seq_lens_kv": torch.tensor([0, 300, 305, 433], dtype=torch.int32)})
    with refused("block_tables: expected ids"):
        kernel(**call | {"block_tables": with_dead_id(call["block_tables"], 10**6)})
