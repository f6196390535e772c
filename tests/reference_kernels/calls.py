# SPDX-License-Identifier: Apache-2.0
"""Legal calls of every kernel on synthetic caches, for tests to break one argument at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference_kernels.context import KernelContext
from reference_kernels.flashinfer_native import wrappers_for
from reference_kernels.paging import PagedCache
from reference_kernels.synthetic import PackedLayers

__all__ = [
    "context_call",
    "decode_plan",
    "flash_call",
    "native_run",
    "prefill_plan",
    "restrided",
    "running_sum",
    "table_call",
    "untracked",
    "workspace",
]


def running_sum(counts: Sequence[int]) -> Tensor:
    """int32 ``[len(counts) + 1]`` from 0."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def workspace() -> Tensor:
    """A buffer that no reference kernel writes."""
    return torch.zeros(64, dtype=torch.uint8)


def table_call(
    layers: PackedLayers, queries_per_request: int = 1, *, query_heads: int = 4, **extra: Any
) -> dict[str, Any]:
    """XQA or trtllm-gen decode of every sequence."""
    cache = layers.pages()
    query = torch.randn(queries_per_request * len(layers.lengths), query_heads, layers.head_dim).to(
        layers.dtype
    )
    return {
        "query": query,
        "kv_cache": (cache.key, cache.value),
        "workspace_buffer": workspace(),
        "block_tables": layers.page_table(),
        "seq_lens": torch.tensor(layers.lengths, dtype=torch.int32),
        "max_seq_len": max(layers.lengths),
        "bmm1_scale": layers.head_dim**-0.5,
        "bmm2_scale": 1.0,
        "out": torch.empty_like(query),
        "kv_layout": layers.layout,
        "q_len_per_req": queries_per_request,
        **extra,
    }


def context_call(
    layers: PackedLayers, counts: Sequence[int], *, query_heads: int = 4, **extra: Any
) -> dict[str, Any]:
    """trtllm-gen prefill of the last ``counts`` tokens."""
    cache = layers.pages()
    query = torch.randn(sum(counts), query_heads, layers.head_dim).to(layers.dtype)
    return {
        "query": query,
        "kv_cache": (cache.key, cache.value),
        "workspace_buffer": workspace(),
        "block_tables": layers.page_table(),
        "seq_lens": torch.tensor(layers.lengths, dtype=torch.int32),
        "max_q_len": max(counts),
        "max_kv_len": max(layers.lengths),
        "bmm1_scale": layers.head_dim**-0.5,
        "bmm2_scale": 1.0,
        "batch_size": len(layers.lengths),
        "cum_seq_lens_q": running_sum(counts),
        "cum_seq_lens_kv": layers.csr()[0],
        "kv_layout": layers.layout,
        "out": torch.empty_like(query),
        **extra,
    }


def decode_plan(layers: PackedLayers, **extra: Any) -> dict[str, Any]:
    """Native decode plan, one query each."""
    indptr, indices, last_page_len = layers.csr()
    return {
        "indptr": indptr,
        "indices": indices,
        "last_page_len": last_page_len,
        "num_qo_heads": 4,
        "num_kv_heads": layers.kv_heads,
        "head_dim": layers.head_dim,
        "page_size": layers.page_tokens,
        "q_data_type": layers.dtype,
        **extra,
    }


def prefill_plan(
    layers: PackedLayers, counts: Sequence[int], *, query_heads: int = 4, **extra: Any
) -> dict[str, Any]:
    """Native prefill plan of the last ``counts`` tokens."""
    indptr, indices, last_page_len = layers.csr()
    return {
        "qo_indptr": running_sum(counts),
        "paged_kv_indptr": indptr,
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": last_page_len,
        "num_qo_heads": query_heads,
        "num_kv_heads": layers.kv_heads,
        "head_dim_qk": layers.head_dim,
        "page_size": layers.page_tokens,
        "causal": True,
        "q_data_type": layers.dtype,
        **extra,
    }


def native_run(layers: PackedLayers, kv_cache: Any = None, **changes: Any) -> None:
    """Plan and run a native decode; ``changes`` go to the plan, or to the run by their names."""
    tensor_cores = changes.pop("use_tensor_cores", True)
    run: dict[str, Any] = {name: changes.pop(name) for name in ("q", "out") if name in changes}
    if "run_window_left" in changes:
        run["window_left"] = changes.pop("run_window_left")
    wrapper = wrappers_for(layers.context)[0](
        workspace(), layers.layout, use_tensor_cores=tensor_cores
    )
    wrapper.plan(**decode_plan(layers, **changes))
    cache = layers.pages()
    wrapper.run(
        run.pop("q", torch.randn(len(layers.lengths), 4, layers.head_dim)),
        kv_cache or (cache.key, cache.value),
        **run,
    )


def flash_call(
    layers: PackedLayers, counts: Sequence[int], *, query_heads: int = 4, **extra: Any
) -> dict[str, Any]:
    """FlashAttention of the last ``counts`` tokens; a head-major interior is a transposed view."""
    cache = layers.pages()
    sides = (cache.key, cache.value)
    key, value = (side.transpose(1, 2) if layers.layout == "HND" else side for side in sides)
    query = torch.randn(sum(counts), query_heads, layers.head_dim).to(layers.dtype)
    return {
        "q": query,
        "k": key,
        "v": value,
        "out": torch.empty_like(query),
        "cu_seqlens_q": running_sum(counts),
        "max_seqlen_q": max(counts),
        "seqused_k": torch.tensor(layers.lengths, dtype=torch.int32),
        "max_seqlen_k": max(layers.lengths),
        "causal": True,
        "block_table": layers.page_table(),
        "fa_version": 2,
        **extra,
    }


def restrided(
    cache: PagedCache, *, page: int = 0, token: int = 0, head: int = 0, last: int = 0, base: int = 0
) -> tuple[Tensor, Tensor]:
    """K and V with elements added to strides and base, on a storage of their own."""
    added = [page, token, head, last]
    if cache.layout == "HND":
        added = [page, head, token, last]
    stride = [old + more for old, more in zip(cache.key.stride(), added, strict=True)]
    need = base + sum((size - 1) * step for size, step in zip(cache.key.shape, stride, strict=True))
    # Far strides are only looked at: one page of them needs no memory.
    shape = list(cache.key.shape)
    if need > 1 << 24:
        shape[0] = 1
        need = base + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = torch.zeros(2 * (need + 1 + cache.head_dim), dtype=cache.key.dtype)
    key = storage.as_strided(shape, stride, base)
    return key, storage.as_strided(shape, stride, base + cache.head_dim)


def untracked(capability: tuple[int, int]) -> KernelContext:
    """A float32 context without provenance, for caches that no writer filled."""
    return KernelContext(capability, provenance=None, float32=True)
