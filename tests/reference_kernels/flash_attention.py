# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention call on a paged cache, FA2 to FA4, and FA3's scheduler metadata."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference_kernels.attention import AttentionMask
from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules
from reference_kernels.paging import PagedCache, attend_pages, cdiv, check_ids, check_pages
from reference_kernels.signatures import bind
from reference_kernels.sources import (
    DTYPES,
    FA3_SCHEDULER,
    FA4_HD256_PAGE,
    FA4_HD256_SPLITS,
    FA4_HD256_WIDTH,
    FA4_SM90_FP8_PAGE,
    FA_INTERFACE,
    FA_MAYBE_CONTIGUOUS,
    FA_PAGE_16,
    FA_PAGE_TABLE,
)

__all__ = ["FlashAttentionVarlen", "SchedulerMetadata"]

_HD256 = 256
_HD256_PAGE = 128
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ENTRIES_PER_REQUEST = 4


@dataclass(frozen=True)
class SchedulerMetadata:
    """Reference of ``get_scheduler_metadata``: carries the page size for its user to check."""

    context: KernelContext
    interface: ModuleType

    RULES = Rules("get_scheduler_metadata")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """int32 ``[4 * batch + 1]``, filled with the page size."""
        call = bind(self.interface.get_scheduler_metadata, *args, **kwargs)
        page = call["page_size"]
        self.RULES.require(
            isinstance(page, int) and page % 16 == 0,
            "page_size",
            "a multiple of 16",
            page,
            FA3_SCHEDULER,
        )
        self.RULES.require(
            call["cache_seqlens"].dtype == torch.int32,
            "cache_seqlens.dtype",
            torch.int32,
            call["cache_seqlens"].dtype,
            FA3_SCHEDULER,
        )
        self.context.count("fa_schedule", page)
        entries = _ENTRIES_PER_REQUEST * call["batch_size"] + 1
        return torch.full((entries,), page, dtype=torch.int32)


@dataclass(frozen=True)
class FlashAttentionVarlen:
    """Reference of ``flash_attn_varlen_func`` with a block table."""

    context: KernelContext
    interface: ModuleType

    RULES = Rules("flash_attn_varlen_func")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention; returns ``out``."""
        rules = self.RULES
        call = bind(self.interface.flash_attn_varlen_func, *args, **kwargs)
        self._check_modelled(call)
        cache = PagedCache(call["k"], call["v"], "NHD")
        table, lengths, starts = self._check_tensors(call, cache)
        self._check_version(call, cache, table)
        version = call["fa_version"]
        hd256 = version == 4 and cache.head_dim == _HD256
        self.context.count(f"fa{version}{'_hd256' if hd256 else ''}", cache.page_tokens)
        scale = call["softmax_scale"]
        left, right = call["window_size"] or (-1, -1)
        mask = AttentionMask(bool(call["causal"]), left, right)
        out, query = call["out"], call["q"]
        for row in range(len(starts) - 1):
            start, stop = starts[row : row + 2]
            if start == stop:
                continue
            result, _ = attend_pages(
                rules,
                self.context,
                cache,
                query[start:stop],
                table[row],
                int(lengths[row]),
                scale=cache.head_dim**-0.5 if scale is None else scale,
                mask=mask,
                softcap=call["softcap"],
                sinks=call["s_aux"],
            )
            out[start:stop].copy_(result)
        return out

    def _check_modelled(self, call: dict[str, Any]) -> None:
        unmodelled = (
            "alibi_slopes",
            "q_v",
            "mask_mod",
            "aux_tensors",
            "block_sparse_tensors",
            "dynamic_causal",
            "output_scale",
            "cu_seqlens_k",
            "return_softmax_lse",
        )
        self.RULES.unmodelled(**{name: call[name] for name in unmodelled})
        if call["block_table"] is None or call["seqused_k"] is None or call["out"] is None:
            self.RULES.unmodelled(call="without block_table, seqused_k or out")
        if call["cp_world_size"] != 1:
            self.RULES.unmodelled(cp_world_size=call["cp_world_size"])
        if call["k"].dtype in _FP8:
            self.RULES.unmodelled(kv_cache_dtype=call["k"].dtype)

    def _check_tensors(
        self, call: dict[str, Any], cache: PagedCache
    ) -> tuple[Tensor, Tensor, list[int]]:
        rules, require = self.RULES, self.RULES.require
        check_pages(rules, self.context, cache, tma=call["fa_version"] == 4)
        query, out, table = call["q"], call["out"], call["block_table"]
        for name, tensor in (("q", query), ("out", out)):
            strides = [stride * tensor.element_size() % 16 for stride in tensor.stride()[:2]]
            require(
                tensor.dim() == 3
                and tensor.shape == query.shape
                and tensor.shape[2] == cache.head_dim
                and tensor.stride(2) == 1
                and not any(strides),
                name,
                f"[tokens, heads, {cache.head_dim}] with 16-byte strides",
                f"{tuple(tensor.shape)} strides {tensor.stride()}",
                FA_MAYBE_CONTIGUOUS,
            )
        require(
            query.dtype == cache.key.dtype and query.dtype in self.context.dtypes(),
            "q.dtype",
            f"that of the cache, {cache.key.dtype}",
            query.dtype,
            DTYPES,
        )
        starts, lengths = call["cu_seqlens_q"], call["seqused_k"]
        batch = starts.numel() - 1
        require(
            starts.dtype == torch.int32 and int(starts[0]) == 0 and int(starts[-1]) <= len(query),
            "cu_seqlens_q",
            f"int32 from 0 to at most {len(query)}",
            f"{starts.dtype} {starts.tolist()}",
            FA_INTERFACE,
        )
        require(
            lengths.dtype == torch.int32 and lengths.numel() >= batch,
            "seqused_k",
            f"int32 of {batch} entries",
            f"{lengths.dtype} {tuple(lengths.shape)}",
            FA_INTERFACE,
        )
        longest = int(lengths[:batch].max())
        require(
            longest <= call["max_seqlen_k"],
            "max_seqlen_k",
            f"at least {longest}",
            call["max_seqlen_k"],
            FA_INTERFACE,
        )
        require(
            table.dtype == torch.int32
            and table.dim() == 2
            and table.stride(1) == 1
            and table.shape[0] >= batch,
            "block_table",
            f"int32 [{batch} or more, pages], columns contiguous",
            f"{table.dtype} {tuple(table.shape)} strides {table.stride()}",
            FA_PAGE_TABLE,
        )
        require(
            cdiv(longest, cache.page_tokens) <= table.shape[1],
            "block_table.shape[1]",
            f"at least {cdiv(longest, cache.page_tokens)} pages for {longest} tokens",
            table.shape[1],
            FA_PAGE_TABLE,
        )
        check_ids(rules, table[:batch], cache.num_pages, "block_table")
        # vLLM slices the table to the live pages; the columns it cut off are dead ones.
        rows = _whole_rows(table[:batch])
        check_ids(rules, rows, cache.num_pages, "block_table, columns behind the slice")
        return table, lengths, starts.tolist()

    def _check_version(self, call: dict[str, Any], cache: PagedCache, table: Tensor) -> None:
        require, version = self.RULES.require, call["fa_version"]
        major = self.context.capability[0]
        page, head_dim = cache.page_tokens, cache.head_dim
        supported = {2: major >= 8, 3: major == 9, 4: major in (9, 10, 11)}
        require(
            supported.get(version, False),
            "fa_version",
            f"a version that SM{major}x has",
            version,
            FA_INTERFACE,
        )
        require(page % 16 == 0, "page size", "a multiple of 16", page, FA_PAGE_16)
        if version == 2:
            require(call["s_aux"] is None, "s_aux", None, "a tensor", FA_INTERFACE)
            require(
                call["num_splits"] <= 1, "num_splits", "0 or 1", call["num_splits"], FA_INTERFACE
            )
        schedule = call["scheduler_metadata"]
        if schedule is not None:
            require(version == 3, "scheduler_metadata", "None before FA3", "a tensor", FA_INTERFACE)
            require(
                int(schedule[0]) == page,
                "scheduler_metadata",
                f"made for pages of {page} tokens",
                int(schedule[0]),
                FA3_SCHEDULER,
            )
        if version == 4 and head_dim == _HD256 and major in (10, 11):
            self._check_hd256(call, table, page)
        if version == 4 and major == 9 and call["k"].dtype in _FP8:
            require(page == 64, "page size", 64, page, FA4_SM90_FP8_PAGE)

    def _check_hd256(self, call: dict[str, Any], table: Tensor, page: int) -> None:
        require, longest = self.RULES.require, call["max_seqlen_k"]
        require(page == _HD256_PAGE, "page size", _HD256_PAGE, page, FA4_HD256_PAGE)
        require(
            longest % page == 0,
            "max_seqlen_k",
            f"a multiple of {page}",
            longest,
            FA4_HD256_WIDTH,
        )
        require(
            table.shape[1] == longest // page,
            "block_table.shape[1]",
            f"exactly max_seqlen_k / page = {longest // page}",
            table.shape[1],
            FA4_HD256_WIDTH,
        )
        require(call["num_splits"] == 1, "num_splits", 1, call["num_splits"], FA4_HD256_SPLITS)
        require(
            call["s_aux"] is None and not call["softcap"],
            "s_aux, softcap",
            "neither sinks nor soft capping",
            f"{call['s_aux']}, {call['softcap']}",
            FA4_HD256_SPLITS,
        )


def _whole_rows(table: Tensor) -> Tensor:
    """The rows of ``table`` up to its row stride, as far as the storage goes."""
    size = table.untyped_storage().nbytes() // table.element_size() - int(table.storage_offset())
    width = table.stride(0)
    rows = min(table.shape[0], size // max(width, 1))
    return table.as_strided((rows, width), (width, 1))
