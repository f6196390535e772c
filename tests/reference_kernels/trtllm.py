# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's trtllm-gen kernels on SM100: decode and context."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from flashinfer import decode as fi_decode
from flashinfer import prefill as fi_prefill
from torch import Tensor

from reference_kernels.attention import AttentionMask
from reference_kernels.errors import Rules
from reference_kernels.paging import PagedCache, check_pages
from reference_kernels.signatures import bind
from reference_kernels.sources import (
    TRTLLM_CONTEXT,
    TRTLLM_DECODE,
    TRTLLM_HND,
    TRTLLM_LARGE_PAGE_MHA,
    TRTLLM_NUM_PAGES_INT,
    TRTLLM_PAGES,
    TRTLLM_SINKS,
    TRTLLM_STRIDE_INT,
    TRTLLM_TABLE,
)
from reference_kernels.table_kernel import TableKernel, query_starts, uniform_starts

__all__ = ["TrtllmContext", "TrtllmDecode"]

_LARGE_PAGE = 128


class _TrtllmKernel(TableKernel):
    """What trtllm-gen asks of pages, for decode and context."""

    def _check_pages(self, rules: Rules, call: dict[str, Any], cache: PagedCache) -> None:
        require = rules.require
        require(
            self.context.capability[0] == 10,
            "device",
            "SM100 or SM103",
            self.context.capability,
            TRTLLM_PAGES,
        )
        require(cache.layout == "HND", "kv_layout", "HND", cache.layout, TRTLLM_HND)
        check_pages(rules, self.context, cache, same_strides=TRTLLM_STRIDE_INT, tma=True)
        page = cache.page_tokens
        require(
            page >= 16 and page & (page - 1) == 0,
            "page size",
            "a power of two of at least 16",
            page,
            TRTLLM_PAGES,
        )
        require(
            page < _LARGE_PAGE or call["query"].shape[1] > cache.num_heads,
            "page size",
            f"below {_LARGE_PAGE} without grouped queries",
            f"{page} with {call['query'].shape[1]} query and {cache.num_heads} KV heads",
            TRTLLM_LARGE_PAGE_MHA,
        )
        require(
            all(stride < 2**31 for stride in cache.key.stride()),
            "k_cache.stride()",
            "below 2**31 elements",
            cache.key.stride(),
            TRTLLM_STRIDE_INT,
        )
        require(
            cache.num_pages <= 2**30 - 1,
            "pages of the view",
            f"at most {2**30 - 1}: the kernel counts K and V pages in an int32",
            cache.num_pages,
            TRTLLM_NUM_PAGES_INT,
        )
        sinks = call["sinks"]
        require(
            sinks is None or sinks.dtype == torch.float32,
            "sinks",
            "float32",
            None if sinks is None else sinks.dtype,
            TRTLLM_SINKS,
        )
        rules.unmodelled(
            o_sf_scale=call["o_sf_scale"],
            kv_cache_sf=call["kv_cache_sf"],
            skip_softmax_threshold_scale_factor=call["skip_softmax_threshold_scale_factor"],
        )

    @staticmethod
    def _lse(call: dict[str, Any]) -> Tensor | None:
        lse: Tensor | None = call["lse"]
        if lse is None and call["return_lse"]:
            lse = torch.empty(call["query"].shape[:2], dtype=torch.float32)
        return lse


class TrtllmDecode(_TrtllmKernel):
    """Reference of ``trtllm_batch_decode_with_kv_cache`` with ``backend="trtllm-gen"``."""

    RULES = Rules("trtllm_batch_decode_with_kv_cache")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decode; returns ``out`` or ``(out, lse)``."""
        rules = self.RULES
        call = bind(fi_decode.trtllm_batch_decode_with_kv_cache, *args, **kwargs)
        if call["backend"] not in ("auto", "trtllm-gen"):
            rules.unmodelled(backend=call["backend"])
        rules.unmodelled(
            mask=call["mask"],
            enable_block_sparse_attention=call["enable_block_sparse_attention"],
            causal_seqlens_kv_global=call["causal_seqlens_kv_global"],
        )
        cache = PagedCache.unpack(rules, call["kv_cache"], call["kv_layout"])
        self._check_pages(rules, call, cache)
        batch = call["seq_lens"].shape[0]
        self.check_call(rules, call, cache, batch, TRTLLM_DECODE, TRTLLM_TABLE)
        ragged = call["cum_seq_lens_q"]
        if ragged is None:
            starts, _ = uniform_starts(rules, call, batch, TRTLLM_DECODE)
        else:
            starts = query_starts(rules, ragged, batch, call["query"].shape[0], TRTLLM_DECODE)
            longest = max(stop - start for start, stop in pairwise(starts))
            rules.require(
                call["q_len_per_req"] is None and (call["max_q_len"] or 0) >= longest,
                "max_q_len",
                f"at least {longest}, with q_len_per_req=None",
                f"{call['max_q_len']}, q_len_per_req={call['q_len_per_req']}",
                TRTLLM_DECODE,
            )
        rules.require(
            int(call["seq_lens"].max()) <= call["max_seq_len"],
            "max_seq_len",
            f"at least {int(call['seq_lens'].max())}",
            call["max_seq_len"],
            TRTLLM_DECODE,
        )
        self.context.count("trtllm_decode", cache.page_tokens)
        lse = self._lse(call)
        masks = [AttentionMask(window_left=call["window_left"]) for _ in range(batch)]
        self.attend(rules, call, cache, starts, masks, lse)
        return (call["out"], lse) if call["return_lse"] else call["out"]


class TrtllmContext(_TrtllmKernel):
    """Reference of ``trtllm_batch_context_with_kv_cache``."""

    RULES = Rules("trtllm_batch_context_with_kv_cache")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Prefill; returns ``out`` or ``(out, lse)``."""
        rules, require = self.RULES, self.RULES.require
        call = bind(fi_prefill.trtllm_batch_context_with_kv_cache, *args, **kwargs)
        if call["backend"] != "trtllm-gen":
            rules.unmodelled(backend=call["backend"])
        require(
            call["causal"] or call["window_left"] < 0,
            "window_left",
            "-1 without a causal mask",
            call["window_left"],
            TRTLLM_CONTEXT,
        )
        cache = PagedCache.unpack(rules, call["kv_cache"], call["kv_layout"])
        self._check_pages(rules, call, cache)
        batch = call["batch_size"]
        self.check_call(rules, call, cache, batch, TRTLLM_CONTEXT, TRTLLM_TABLE)
        starts = query_starts(
            rules, call["cum_seq_lens_q"], batch, call["query"].shape[0], TRTLLM_CONTEXT
        )
        longest = max(stop - start for start, stop in pairwise(starts))
        require(
            longest <= call["max_q_len"],
            "max_q_len",
            f"at least {longest}",
            call["max_q_len"],
            TRTLLM_CONTEXT,
        )
        lengths = call["seq_lens"].to(torch.int64)
        require(
            int(lengths.max()) <= call["max_kv_len"],
            "max_kv_len",
            f"at least {int(lengths.max())}",
            call["max_kv_len"],
            TRTLLM_CONTEXT,
        )
        pages = (lengths + cache.page_tokens - 1) // cache.page_tokens
        cumulative = call["cum_seq_lens_kv"]
        require(
            cumulative.dtype == torch.int32
            and torch.equal((cumulative[1:] - cumulative[:-1]).to(torch.int64), pages),
            "cum_seq_lens_kv",
            f"int32, running sums of the pages {pages.tolist()}",
            f"{cumulative.dtype} {cumulative.tolist()}",
            TRTLLM_CONTEXT,
        )
        self.context.count("trtllm_context", cache.page_tokens)
        lse = self._lse(call)
        mask = AttentionMask(causal=bool(call["causal"]), window_left=call["window_left"])
        self.attend(rules, call, cache, starts, [mask] * batch, lse)
        return (call["out"], lse) if call["return_lse"] else call["out"]
