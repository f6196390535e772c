# SPDX-License-Identifier: Apache-2.0
"""Brute force: what the operations must return, written without any of the product's arithmetic.

A page id is defined by the address it stands for. So the oracle computes the byte address of every
page from the pool's numpy array, and divides by the page stride; it never multiplies steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

import repage


@dataclass(frozen=True)
class Pool:
    """A packed pool of two layers in real memory: the one under test and a neighbour before it."""

    interior: str
    num_blocks: int
    block_tokens: int
    page_tokens: int
    num_heads: int
    content_bytes: int
    offset: int
    block_stride: int

    @property
    def geometry(self) -> repage.BlockGeometry:
        return repage.BlockGeometry.dense(
            self.interior,
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            num_heads=self.num_heads,
            content_bytes=self.content_bytes,
            block_stride=self.block_stride,
            layers_in_block=LAYERS_IN_HLNC,
            base_offset=self.offset,
            storage_bytes=self.offset + self.num_blocks * self.block_stride,
        )

    @property
    def plan(self) -> repage.PagePlan:
        return repage.PagePlan(self.geometry, self.page_tokens)

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens

    def bytes_of_layer(self, storage: np.ndarray) -> np.ndarray:
        """Return the layer as [block, token, head, content], a view made by slicing alone."""
        blocks = storage[self.offset :].reshape(self.num_blocks, self.block_stride)
        n, h, e = self.block_tokens, self.num_heads, self.content_bytes
        if self.interior == "HLNC":
            pages = blocks[:, : h * LAYERS_IN_HLNC * n * e]
            return pages.reshape(-1, h, LAYERS_IN_HLNC, n, e)[:, :, 0].transpose(0, 2, 1, 3)
        layer = blocks[:, : n * h * e]
        if self.interior == "NHC":
            return layer.reshape(-1, n, h, e)
        return layer.reshape(-1, h, n, e).transpose(0, 2, 1, 3)

    def page_ids(self) -> np.ndarray:
        """Return the id of every (block, page): its address over the page stride."""
        storage = np.zeros(self.offset + self.num_blocks * self.block_stride, dtype=np.uint8)
        layer = self.bytes_of_layer(storage)
        origin = layer.__array_interface__["data"][0]
        addresses = np.array(
            [
                [
                    layer[block, page * self.page_tokens].__array_interface__["data"][0] - origin
                    for page in range(self.pages_per_block)
                ]
                for block in range(self.num_blocks)
            ]
        )
        stride = math.gcd(self.block_stride, self.page_tokens * layer.strides[1])
        assert (addresses % stride == 0).all()
        return addresses // stride


LAYERS_IN_HLNC = 3


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Pools of every interior, with and without overlapping pages."""
    interior = draw(st.sampled_from(["NHC", "HNC", "HLNC"]))
    page_tokens = draw(st.sampled_from([1, 2, 3, 8, 16]))
    pages_per_block = draw(st.integers(1, 9))
    num_heads = draw(st.integers(1, 3))
    content_bytes = 16 * draw(st.integers(1, 3))
    block_tokens = page_tokens * pages_per_block
    layers = LAYERS_IN_HLNC if interior == "HLNC" else 1
    layer_bytes = block_tokens * num_heads * content_bytes * layers
    slack = 16 * draw(st.integers(0, 40))
    return Pool(
        interior=interior,
        num_blocks=draw(st.integers(1, 6)),
        block_tokens=block_tokens,
        page_tokens=page_tokens,
        num_heads=num_heads,
        content_bytes=content_bytes,
        offset=16 * draw(st.integers(0, 5)),
        block_stride=layer_bytes + slack,
    )


def page_table(
    ids: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray | None,
    block_tokens: int,
    *,
    lookahead: int = 0,
    table_rows: int | None = None,
) -> np.ndarray:
    """Return the kernel page table, one column at a time."""
    rows, block_columns = block_table.shape
    num_blocks, pages_per_block = ids.shape
    out = np.zeros((table_rows or rows, block_columns * pages_per_block), dtype=np.int32)
    for row in range(rows):
        for column in range(block_columns * pages_per_block):
            block_column, page = column // pages_per_block, column % pages_per_block
            if seq_lens is not None:
                length = int(seq_lens[row])
                if length <= 0 or block_column * block_tokens >= length + lookahead:
                    continue
            block = int(block_table[row, block_column])
            out[row, column] = ids[block if 0 <= block < num_blocks else 0, page]
    return out


def kv_indices(
    ids: np.ndarray, block_table: np.ndarray, kv_indptr: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """Return the CSR page list, one entry at a time, over a copy of `out`."""
    out = out.copy()
    num_blocks, pages_per_block = ids.shape
    for row in range(block_table.shape[0]):
        for position in range(kv_indptr[row], kv_indptr[row + 1]):
            if not 0 <= position < out.size or kv_indptr[row] < 0:
                continue
            column = position - kv_indptr[row]
            block_column = column // pages_per_block
            if block_column >= block_table.shape[1]:
                out[position] = 0
                continue
            block = int(block_table[row, block_column])
            out[position] = ids[block if 0 <= block < num_blocks else 0, column % pages_per_block]
    return out


def virtual_slots(ids: np.ndarray, slots: np.ndarray, pool: Pool) -> np.ndarray:
    """Return each slot's address in pages and tokens of a page."""
    out = []
    for slot in slots.tolist():
        if slot < 0:
            out.append(slot)
        elif slot >= pool.num_blocks * pool.block_tokens:
            out.append(-1)
        else:
            block, token = divmod(slot, pool.block_tokens)
            page, offset = divmod(token, pool.page_tokens)
            out.append(int(ids[block, page]) * pool.page_tokens + offset)
    return np.array(out, dtype=np.int64)
