# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's native decode and prefill wrappers share.

What is kept of the real ones: on a GPU, ``plan`` takes host metadata and copies it, but keeps the
caller's device buffer of page indices, so indices that change between ``plan`` and ``run`` are seen
by ``run``. With CUDA graphs the wrapper owns fixed buffers instead, which a replay reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_kernels.attention import AttentionMask
from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules, Source
from reference_kernels.paging import PagedCache, attend_pages, check_ids, check_pages
from reference_kernels.sources import (
    DTYPES,
    FI_DECODE_KV_STRIDES,
    FI_LAYOUT,
    FI_PAGE_FASTDIV,
    FI_PAGE_TABLE,
    FI_SM90_KV_STRIDES,
    FI_STRIDE_UINT32,
)

__all__ = ["FP8", "NativePlan", "NativeWrapper", "scalar", "softmax_scale", "torch_dtype"]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class NativePlan:
    """Host side of one plan."""

    backend: str
    page_tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    causal: bool
    query_starts: list[int]


class NativeWrapper:
    """Shared by decode and prefill: page metadata, checks, the loop over sequences."""

    context: KernelContext
    rules: Rules
    is_cuda_graph_enabled: bool

    _window_left: int
    _logits_soft_cap: float
    _sm_scale: float
    _causal: bool

    def _initialise(self, layout: str, cuda_graph: bool, batch: int | None) -> None:
        self.rules.require(layout in ("NHD", "HND"), "kv_layout", "NHD or HND", layout, FI_LAYOUT)
        self._kv_layout = layout
        self.is_cuda_graph_enabled = cuda_graph
        self._fixed_batch_size = batch
        self._plan: NativePlan | None = None

    def _store_pages(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *,
        page_tokens: int,
        seq_lens: Tensor | None,
        source: Source,
        copy_to_graph_buffers: bool = True,
    ) -> None:
        """Check the CSR page list, and keep it the way the real ``plan`` does."""
        require = self.rules.require
        batch = last_page_len.numel()
        for name, tensor in (
            ("paged_kv_indptr", indptr),
            ("paged_kv_indices", indices),
            ("paged_kv_last_page_len", last_page_len),
        ):
            require(
                tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(),
                name,
                "int32, one dimension, contiguous",
                f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}",
                FI_PAGE_TABLE,
            )
        require(
            indptr.numel() == batch + 1,
            "paged_kv_indptr",
            f"{batch + 1} entries for {batch} sequences",
            indptr.numel(),
            FI_PAGE_TABLE,
        )
        counts = indptr[1:] - indptr[:-1]
        require(
            bool((counts >= 0).all()) and int(indptr[0]) >= 0,
            "paged_kv_indptr",
            "rising",
            indptr.tolist(),
            FI_PAGE_TABLE,
        )
        require(
            indices.numel() >= int(indptr[-1]),
            "paged_kv_indices",
            f"{int(indptr[-1])} entries (paged_kv_indptr[-1])",
            indices.numel(),
            FI_PAGE_TABLE,
        )
        require(page_tokens >= 1, "page_size", "at least 1", page_tokens, FI_PAGE_FASTDIV)
        filled = counts > 0
        require(
            bool(((last_page_len >= 1) & (last_page_len <= page_tokens))[filled].all()),
            "paged_kv_last_page_len",
            f"1 .. {page_tokens} where a sequence has pages",
            last_page_len.tolist(),
            FI_PAGE_TABLE,
        )
        if seq_lens is not None:
            lengths = _lengths(indptr, last_page_len, page_tokens)
            require(
                torch.equal(seq_lens.to(torch.int64), lengths),
                "seq_lens",
                f"the lengths of the pages, {lengths.tolist()}",
                seq_lens.tolist(),
                source,
            )
        if not self.is_cuda_graph_enabled:
            self._indptr, self._last_page_len = indptr.clone(), last_page_len.clone()
            self._indices = indices
            return
        require(
            batch == self._fixed_batch_size,
            "batch size",
            f"{self._fixed_batch_size}, fixed by the CUDA graph's buffers",
            batch,
            source,
        )
        require(
            indices.numel() <= self._indices.numel(),
            "paged_kv_indices",
            f"at most {self._indices.numel()} entries, the buffer's size",
            indices.numel(),
            source,
        )
        if copy_to_graph_buffers:
            self._indptr.copy_(indptr)
            self._last_page_len.copy_(last_page_len)
            self._indices[: indices.numel()].copy_(indices)

    def _check_heads(self, query_heads: int, kv_heads: int, source: Source) -> None:
        self.rules.require(
            query_heads % kv_heads == 0,
            "num_qo_heads",
            f"a multiple of num_kv_heads = {kv_heads}",
            query_heads,
            source,
        )

    def _check_run(
        self, plan: NativePlan, query: Tensor, out: Tensor, cache: PagedCache, source: Source
    ) -> None:
        require, rules = self.rules.require, self.rules
        check_pages(
            rules,
            self.context,
            cache,
            same_strides={"fa3": FI_SM90_KV_STRIDES, "cuda-core": FI_DECODE_KV_STRIDES}.get(
                plan.backend
            ),
        )
        wanted = (plan.page_tokens, plan.kv_heads, plan.head_dim)
        got = (cache.page_tokens, cache.num_heads, cache.head_dim)
        require(
            got == wanted,
            "paged_kv_cache",
            f"(page size, kv heads, head dim) = {wanted}, as planned",
            f"{got} ({self._kv_layout} {tuple(cache.key.shape)})",
            source,
        )
        if plan.backend != "fa3":
            strides = (*cache.key.stride(), *cache.value.stride())
            require(
                all(0 <= stride < 2**32 for stride in strides),
                "paged_kv_cache.stride()",
                "strides below 2**32 elements",
                strides,
                FI_STRIDE_UINT32,
            )
        require(
            (query.dtype, cache.key.dtype) == (plan.query_dtype, plan.cache_dtype),
            "dtypes of q and paged_kv_cache",
            f"{plan.query_dtype}, {plan.cache_dtype}, as planned",
            f"{query.dtype}, {cache.key.dtype}",
            source,
        )
        require(
            query.dtype in self.context.dtypes()
            and (plan.backend == "fa3" or query.dtype not in FP8),
            "q.dtype",
            "fp16 or bf16 (fp8 on fa3 only)",
            query.dtype,
            DTYPES,
        )
        require(
            query.dim() == 3
            and query.shape[1:] == (plan.query_heads, plan.head_dim)
            and query.shape[0] == plan.query_starts[-1]
            and query.stride(2) == 1,
            "q",
            f"[{plan.query_starts[-1]}, {plan.query_heads}, {plan.head_dim}], heads contiguous",
            f"{tuple(query.shape)} strides {query.stride()}",
            source,
        )
        require(
            out.shape == query.shape and out.dtype == plan.out_dtype,
            "out",
            f"{tuple(query.shape)} {plan.out_dtype}",
            f"{tuple(out.shape)} {out.dtype}",
            source,
        )

    def _run(self, call: dict[str, Any], source: Source) -> Any:
        plan, rules = self._plan, self.rules
        rules.require(plan is not None, "plan()", "a plan before run()", None, source)
        assert plan is not None
        rules.unmodelled(
            args=call["args"] or None,
            kv_cache_sf=call["kv_cache_sf"],
            skip_softmax_threshold_scale_factor=call["skip_softmax_threshold_scale_factor"],
        )
        window = call["window_left"]
        rules.require(
            window is None or window == self._window_left,
            "window_left",
            f"{self._window_left}, as planned",
            window,
            source,
        )
        query: Tensor = call["q"]
        cache = PagedCache.unpack(rules, call["paged_kv_cache"], self._kv_layout)
        out = call["out"]
        if out is None:
            out = torch.empty(query.shape, dtype=plan.out_dtype)
        self._check_run(plan, query, out, cache, source)
        lengths = _lengths(self._indptr, self._last_page_len, plan.page_tokens).tolist()
        first, last = int(self._indptr[0]), int(self._indptr[-1])
        check_ids(rules, self._indices[first:last], cache.num_pages, "paged_kv_indices")
        scale = self._sm_scale * scalar(call["q_scale"]) * scalar(call["k_scale"])
        lse = call["lse"]
        if lse is None and call["return_lse"]:
            lse = torch.empty(query.shape[:2], dtype=torch.float32)
        mask = AttentionMask(causal=plan.causal, window_left=self._window_left)
        for row, length in enumerate(lengths):
            start, stop = plan.query_starts[row : row + 2]
            if start == stop:
                continue
            result, row_lse = attend_pages(
                rules,
                self.context,
                cache,
                query[start:stop],
                self._indices[int(self._indptr[row]) : int(self._indptr[row + 1])],
                length,
                scale=scale,
                mask=mask,
                softcap=self._logits_soft_cap,
                sinks=call["sinks"],
            )
            out[start:stop].copy_(result * scalar(call["v_scale"]))
            if lse is not None:
                # FlashInfer's log-sum-exp has base 2.
                lse[start:stop].copy_(row_lse / math.log(2.0))
        return (out, lse) if call["return_lse"] else out


def _lengths(indptr: Tensor, last_page_len: Tensor, page_tokens: int) -> Tensor:
    """Tokens of each sequence, int64."""
    counts = (indptr[1:] - indptr[:-1]).to(torch.int64)
    return torch.where(counts > 0, (counts - 1) * page_tokens + last_page_len, 0)


def torch_dtype(value: torch.dtype | str) -> torch.dtype:
    """A torch dtype from what ``plan`` takes."""
    result = getattr(torch, value) if isinstance(value, str) else value
    assert isinstance(result, torch.dtype)
    return result


def softmax_scale(value: float | None, head_dim: int) -> float:
    """The scale that `plan` falls back to."""
    return value if value is not None else 1.0 / math.sqrt(head_dim)


def scalar(value: float | Tensor | None) -> float:
    """A scale that defaults to one."""
    return 1.0 if value is None else float(value)
