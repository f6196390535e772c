# SPDX-License-Identifier: Apache-2.0
"""Brute force for the page-table operations: addresses of real slices, one entry at a time.

A page id is defined by the address that it stands for. So ids come from the storage offsets of
slices of a real cache, divided by the page stride; the product's steps are not used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PageIds = list[list[int]]


def page_ids(kv_cache: torch.Tensor, page_tokens: int) -> PageIds:
    """Return the id of every (block, page) of a cache [B, H, N, C], by address."""
    origin = kv_cache.storage_offset()
    pages = kv_cache.shape[2] // page_tokens
    offsets = [
        [int(block[:, page * page_tokens].storage_offset()) - origin for page in range(pages)]
        for block in kv_cache
    ]
    stride = math.gcd(int(kv_cache.stride(0)), page_tokens * int(kv_cache.stride(2)))
    return [[offset // stride for offset in row] for row in offsets]


def page_table(
    ids: PageIds,
    block_table: Sequence[Sequence[int]],
    seq_lens: Sequence[int] | None,
    block_tokens: int,
    lookahead: int = 0,
) -> list[list[int]]:
    """Return the kernel page table."""
    pages = len(ids[0])
    table = []
    for row, blocks in enumerate(block_table):
        line = []
        for column in range(len(blocks) * pages):
            block = blocks[column // pages]
            live = seq_lens is None or (
                seq_lens[row] > 0 and column // pages * block_tokens < seq_lens[row] + lookahead
            )
            known = ids[block if 0 <= block < len(ids) else 0]
            line.append(known[column % pages] if live else 0)
        table.append(line)
    return table


def kv_indices(
    ids: PageIds, block_table: Sequence[Sequence[int]], kv_indptr: Sequence[int]
) -> list[int]:
    """Return the CSR page list."""
    pages = len(ids[0])
    out = []
    for row, blocks in enumerate(block_table):
        for column in range(kv_indptr[row + 1] - kv_indptr[row]):
            block = blocks[column // pages]
            out.append(ids[block if 0 <= block < len(ids) else 0][column % pages])
    return out


def virtual_slots(
    ids: PageIds, slots: Sequence[int], block_tokens: int, page_tokens: int
) -> list[int]:
    """Return every slot as a page and a token of it."""
    out = []
    for slot in slots:
        if slot < 0:
            out.append(slot)
        elif slot >= len(ids) * block_tokens:
            out.append(-1)
        else:
            block, token = divmod(slot, block_tokens)
            page, offset = divmod(token, page_tokens)
            out.append(ids[block][page] * page_tokens + offset)
    return out
