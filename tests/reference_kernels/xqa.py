# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's XQA decode kernel, as vLLM calls it on SM90 and SM12x."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from flashinfer import decode as fi_decode
from torch import Tensor

from reference_kernels.attention import AttentionMask
from reference_kernels.errors import Rules
from reference_kernels.paging import PagedCache, cdiv, check_pages
from reference_kernels.signatures import bind
from reference_kernels.sources import (
    XQA_CALL,
    XQA_DEVICES,
    XQA_HEAD_DIM,
    XQA_K_STRIDES_FOR_V,
    XQA_MASK,
    XQA_PAGES,
    XQA_STRIDE_IN_HEADS,
    XQA_TABLE,
)
from reference_kernels.table_kernel import TableKernel, query_starts, uniform_starts

__all__ = ["XqaDecode"]


class XqaDecode(TableKernel):
    """Reference of ``xqa_batch_decode_with_kv_cache``, as vLLM calls it on SM90 and SM12x."""

    RULES = Rules("xqa_batch_decode_with_kv_cache")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decode; returns ``out``."""
        rules = self.RULES
        call = bind(fi_decode.xqa_batch_decode_with_kv_cache, *args, **kwargs)
        rules.unmodelled(kv_cache_sf=call["kv_cache_sf"])
        rules.require(
            self.context.capability[0] in (9, 10, 12),
            "device",
            "SM90, SM100 or SM12x",
            self.context.capability,
            XQA_DEVICES,
        )
        cache = PagedCache.unpack(rules, call["kv_cache"], call["kv_layout"])
        batch = call["seq_lens"].shape[0]
        self._check_pages(rules, cache, call["query"])
        self.check_call(rules, call, cache, batch, XQA_CALL, XQA_TABLE)
        rules.require(
            call["out"].dtype == call["query"].dtype,
            "out.dtype",
            call["query"].dtype,
            call["out"].dtype,
            XQA_CALL,
        )
        ragged = call["q_cu_seq_lens"]
        if ragged is None:
            starts, longest = uniform_starts(rules, call, batch, XQA_CALL)
        else:
            longest = call["q_len_per_req"]
            rules.require(longest > 1, "q_len_per_req", "above 1 when ragged", longest, XQA_CALL)
            starts = query_starts(rules, ragged, batch, call["query"].shape[0], XQA_CALL)
        masks = self._masks(rules, call, starts, longest)
        self.context.count("xqa_decode", cache.page_tokens)
        self.attend(rules, call, cache, starts, masks, None)
        out: Tensor = call["out"]
        return out

    def _check_pages(self, rules: Rules, cache: PagedCache, query: Tensor) -> None:
        require = rules.require
        check_pages(rules, self.context, cache, same_strides=XQA_K_STRIDES_FOR_V, tma=True)
        require(
            cache.page_tokens in (16, 32, 64, 128),
            "page size",
            "16, 32, 64 or 128",
            cache.page_tokens,
            XQA_PAGES,
        )
        require(
            cache.head_dim % 16 == 0 and 16 <= cache.head_dim <= 512,
            "head_dim",
            "a multiple of 16 in [16, 512]",
            cache.head_dim,
            XQA_HEAD_DIM,
        )
        require(
            all(stride % cache.head_dim == 0 for stride in cache.key.stride()[:3]),
            "k_cache.stride()",
            f"multiples of head_dim = {cache.head_dim}: the kernel divides and truncates",
            cache.key.stride(),
            XQA_STRIDE_IN_HEADS,
        )
        require(
            all(stride // cache.head_dim < 2**32 for stride in cache.key.stride()[:3]),
            "k_cache.stride()",
            "below 2**32 heads",
            cache.key.stride(),
            XQA_STRIDE_IN_HEADS,
        )
        require(
            query.dtype != torch.float8_e4m3fn and query.dtype != torch.float8_e5m2,
            "query.dtype",
            "fp16 or bf16",
            query.dtype,
            XQA_CALL,
        )

    def _masks(
        self, rules: Rules, call: dict[str, Any], starts: list[int], longest: int
    ) -> list[AttentionMask]:
        """A mask per sequence; with several queries, from the packed draft mask."""
        window = call["window_left"]
        if longest == 1:
            return [AttentionMask(window_left=window) for _ in starts[1:]]
        packed = call["mask"]
        words = cdiv(longest, 32) * 2
        rows = starts[-1]
        rules.require(
            packed is not None
            and packed.dtype == torch.uint16
            and packed.is_contiguous()
            and packed.shape[-1] == words
            and packed.numel() == rows * words,
            "mask",
            f"contiguous uint16, {rows} rows of {words} words",
            None if packed is None else f"{packed.dtype} {tuple(packed.shape)}",
            XQA_MASK,
        )
        bits = packed.reshape(rows, words, 1).to(torch.int32) >> torch.arange(16)
        visible = (bits & 1).to(torch.bool).view(rows, words * 16)
        return [
            AttentionMask(window_left=window, draft=visible[start:stop, : stop - start])
            for start, stop in pairwise(starts)
        ]
