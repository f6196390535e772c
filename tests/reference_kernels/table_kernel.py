# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's kernels with a 2-D page table share: XQA and trtllm-gen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference_kernels.attention import AttentionMask
from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules, Source
from reference_kernels.paging import PagedCache, attend_pages, cdiv, check_ids
from reference_kernels.sources import DTYPES

__all__ = ["TableKernel", "query_starts", "uniform_starts"]


@dataclass(frozen=True)
class TableKernel:
    """A kernel that is called with ``query``, pages, a page table and lengths."""

    context: KernelContext

    def check_call(
        self,
        rules: Rules,
        call: dict[str, Any],
        cache: PagedCache,
        batch: int,
        source: Source,
        table_source: Source,
    ) -> None:
        """Query, output, table and lengths; what both kernel families share."""
        require = rules.require
        query, out = call["query"], call["out"]
        require(
            query.dim() == 3 and query.is_contiguous() and query.shape[2] == cache.head_dim,
            "query",
            f"contiguous [tokens, heads, {cache.head_dim}]",
            f"{tuple(query.shape)} strides {query.stride()}",
            source,
        )
        require(
            query.dtype in self.context.dtypes(),
            "query.dtype",
            self.context.dtypes(),
            query.dtype,
            DTYPES,
        )
        require(
            query.shape[1] % cache.num_heads == 0,
            "query heads",
            f"a multiple of {cache.num_heads} KV heads",
            query.shape[1],
            source,
        )
        require(
            out is not None and out.shape == query.shape,
            "out",
            tuple(query.shape),
            None if out is None else tuple(out.shape),
            source,
        )
        table, lengths = call["block_tables"], call["seq_lens"]
        require(
            table.dtype == torch.int32 and table.dim() == 2,
            "block_tables",
            "int32, two dimensions",
            f"{table.dtype} {tuple(table.shape)}",
            table_source,
        )
        require(
            table.stride() == (table.shape[1], 1),
            "block_tables.stride()",
            f"contiguous, {(table.shape[1], 1)}: the row stride is shape[-1]",
            table.stride(),
            table_source,
        )
        require(
            table.shape[0] >= batch,
            "block_tables.shape[0]",
            f"at least {batch} rows",
            table.shape[0],
            table_source,
        )
        require(
            lengths.dtype in (torch.int32, torch.uint32)
            and lengths.shape == (batch,)
            and lengths.is_contiguous(),
            "seq_lens",
            f"contiguous int32 of {batch} entries",
            f"{lengths.dtype} {tuple(lengths.shape)} strides {lengths.stride()}",
            source,
        )
        longest = int(lengths.max()) if batch else 0
        require(
            cdiv(longest, cache.page_tokens) <= table.shape[1],
            "block_tables.shape[1]",
            f"at least {cdiv(longest, cache.page_tokens)} pages for {longest} tokens",
            table.shape[1],
            table_source,
        )
        check_ids(rules, table[:batch], cache.num_pages, "block_tables")

    def attend(
        self,
        rules: Rules,
        call: dict[str, Any],
        cache: PagedCache,
        starts: list[int],
        masks: list[AttentionMask],
        lse: Tensor | None,
    ) -> None:
        """Write ``out`` (and the base-2 ``lse``) of every sequence."""
        out = call["out"]
        for row, mask in enumerate(masks):
            start, stop = starts[row : row + 2]
            if start == stop:
                continue
            result, row_lse = attend_pages(
                rules,
                self.context,
                cache,
                call["query"][start:stop],
                call["block_tables"][row],
                int(call["seq_lens"][row]),
                scale=float(call["bmm1_scale"]),
                mask=mask,
                sinks=call["sinks"],
            )
            out[start:stop].copy_(result * float(call["bmm2_scale"]))
            if lse is not None:
                lse[start:stop].copy_(row_lse / math.log(2.0))


def query_starts(
    rules: Rules, tensor: Tensor, batch: int, tokens: int, source: Source
) -> list[int]:
    """First query of each sequence, from a checked cumulative tensor."""
    rules.require(
        tensor.dtype in (torch.int32, torch.uint32) and tensor.shape == (batch + 1,),
        "cumulative query lengths",
        f"int32 of {batch + 1} entries",
        f"{tensor.dtype} {tuple(tensor.shape)}",
        source,
    )
    starts: list[int] = tensor.tolist()
    rules.require(
        starts[0] == 0 and starts[-1] == tokens and starts == sorted(starts),
        "cumulative query lengths",
        f"rising from 0 to {tokens}",
        starts,
        source,
    )
    return starts


def uniform_starts(
    rules: Rules, call: dict[str, Any], batch: int, source: Source
) -> tuple[list[int], int]:
    """First query of each sequence, and queries per sequence, where all have as many."""
    per_request = call["q_len_per_req"]
    rules.require(
        per_request is not None and call["query"].shape[0] == batch * per_request,
        "query.shape[0]",
        f"{batch} sequences of q_len_per_req = {per_request}",
        call["query"].shape[0],
        source,
    )
    return [per_request * row for row in range(batch + 1)], per_request
