# SPDX-License-Identifier: Apache-2.0
"""KV caches in vLLM's own views of one pool, and page tables over them by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout


def views(
    names: Sequence[str], spec: Any, layout: str, num_blocks: int, *, gap: int = 0
) -> dict[str, torch.Tensor]:
    """Allocate a pool as vLLM does and return each layer's view of it.

    `gap` bytes follow the layers in each block, as the pages of a larger group would.
    """
    page = spec.page_size_bytes
    resolved = KVCacheLayout[layout]
    if resolved.is_block_outermost:
        block_stride, layer_stride = page * len(names) + gap, page
        size = block_stride * num_blocks
    else:
        block_stride, layer_stride = page, page * num_blocks
        size = layer_stride * len(names)
    tensor = KVCacheTensor(
        size=size, layers=list(names), layer_stride=layer_stride, block_stride=block_stride
    )
    raw = torch.zeros(size, dtype=torch.int8)
    found = create_kv_cache_views(raw, spec, num_blocks, resolved, tensor)
    return dict(zip(names, found, strict=True))


def block_table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return rows of block ids, padded with block 0."""
    table = torch.zeros((len(rows), width), dtype=torch.int32)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return table


def page_table(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_tokens: int,
    page_tokens: int,
    lookahead: int,
) -> torch.Tensor:
    """Return page ids by their definition: each page's address over the view's page stride."""
    size = kv_cache.element_size()
    block_stride = kv_cache.stride(0) * size
    unit = page_tokens * kv_cache.stride(-2) * size
    page_stride = int(torch.tensor(block_stride).gcd(torch.tensor(unit)))
    rows = []
    for blocks, length in zip(block_table.tolist(), seq_lens.tolist(), strict=True):
        live = -(-(length + lookahead) // block_tokens) if length > 0 else 0
        rows.append(
            [
                (block * block_stride + page * unit) // page_stride if column < live else 0
                for column, block in enumerate(blocks)
                for page in range(block_tokens // page_tokens)
            ]
        )
    return torch.tensor(rows, dtype=torch.int32)
