# SPDX-License-Identifier: Apache-2.0
"""Small paged caches for tests: packed storages, sequences in them, and the dense truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference_kernels.cache_writer import write_tokens
from reference_kernels.context import KernelContext
from reference_kernels.paging import Layout, PagedCache, cdiv

__all__ = ["PackedLayers"]


@dataclass
class PackedLayers:
    """Layers of one KV-cache group packed side by side in every block, and sequences in them.

    Attributes
    ----------
    context : KernelContext
        Whose provenance map the writer fills.
    lengths : Sequence[int]
        Tokens of each sequence.
    layout : str
        Order inside a layer's part of a block: token-major (NHD) or head-major (HND).
    block_tokens, page_tokens : int
        Tokens of a manager block and of a kernel page.
    num_layers : int
        Layers in a block; all have the same shape.
    """

    context: KernelContext
    lengths: Sequence[int]
    layout: Layout = "NHD"
    block_tokens: int = 128
    page_tokens: int = 32
    kv_heads: int = 2
    head_dim: int = 64
    num_layers: int = 2
    dtype: torch.dtype = torch.float32
    dense: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        per_sequence = [max(1, cdiv(length, self.block_tokens)) for length in self.lengths]
        self.num_blocks = sum(per_sequence) + 1
        self.layer_elements = self.block_tokens * self.kv_heads * 2 * self.head_dim
        self.block_stride = self.layer_elements * self.num_layers
        # What no sequence owns holds NaN: reading it shows in every result.
        self.storage = torch.full(
            (self.num_blocks * self.block_stride,), float("nan"), dtype=self.dtype
        )
        # Block 0 is the null block; the others are handed out in a shuffled order.
        order = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist()
        self.blocks: list[list[int]] = []
        for count in per_sequence:
            self.blocks.append([order.pop() for _ in range(count)])
        for layer in range(self.num_layers):
            for row, length in enumerate(self.lengths):
                key, value = (
                    torch.randn(length, self.kv_heads, self.head_dim, generator=generator).to(
                        self.dtype
                    )
                    for _ in range(2)
                )
                self.dense[layer, row] = (key, value)
                self.write(layer, row, key, value)

    @property
    def pages_per_block(self) -> int:
        """Kernel pages in a manager block."""
        return self.block_tokens // self.page_tokens

    @property
    def page_unit(self) -> int:
        """Elements from one kernel page to the next inside a block."""
        tokens = self.page_tokens * 2 * self.head_dim
        return tokens * self.kv_heads if self.layout == "NHD" else tokens

    @property
    def block_step(self) -> int:
        """Virtual pages from one manager block to the next."""
        return self.block_stride // self.page_unit

    def strides(self) -> tuple[int, int]:
        """Elements between tokens and between heads."""
        content = 2 * self.head_dim
        if self.layout == "NHD":
            return self.kv_heads * content, content
        return content, self.block_tokens * content

    def manager_view(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, ``[blocks, block_tokens, heads, head_dim]``."""
        token, head = self.strides()
        both = self.storage.as_strided(
            (self.num_blocks, self.block_tokens, self.kv_heads, 2 * self.head_dim),
            (self.block_stride, token, head, 1),
            layer * self.layer_elements,
        )
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def pages(self, layer: int = 0, *, page_tokens: int | None = None) -> PagedCache:
        """The virtual view of a layer that kernels get."""
        tokens = page_tokens or self.page_tokens
        token, head = self.strides()
        count = (self.num_blocks - 1) * self.block_step + self.pages_per_block
        shape = (count, tokens, self.kv_heads, 2 * self.head_dim)
        stride = (self.page_unit, token, head, 1)
        if self.layout == "HND":
            shape = (count, self.kv_heads, tokens, 2 * self.head_dim)
            stride = (self.page_unit, head, token, 1)
        both = self.storage.as_strided(shape, stride, layer * self.layer_elements)
        return PagedCache(both[..., : self.head_dim], both[..., self.head_dim :], self.layout)

    def write(self, layer: int, row: int, key: Tensor, value: Tensor) -> None:
        """Write a sequence at its manager slots."""
        positions = torch.arange(len(key))
        blocks = torch.tensor(self.blocks[row])[positions // self.block_tokens]
        slots = blocks * self.block_tokens + positions % self.block_tokens
        self.write_slots(self.manager_view(layer), key, value, slots)

    def write_slots(
        self, cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, slots: Tensor
    ) -> None:
        """Write tokens at ``slots`` of a ``(key, value)`` cache."""
        one = torch.ones(())
        write_tokens(self.context, key, value, *cache, slots, "auto", one, one)

    def page_table(
        self, *, block_step: int | None = None, offset: int = 0, width: int | None = None
    ) -> Tensor:
        """int32 ``[sequences, width]``, just wide enough by default; dead columns hold page 0."""
        step = self.block_step if block_step is None else block_step
        columns = max(len(blocks) for blocks in self.blocks) * self.pages_per_block
        table = torch.zeros(len(self.lengths), width or columns, dtype=torch.int32)
        for row, (blocks, length) in enumerate(zip(self.blocks, self.lengths, strict=True)):
            ids = [
                block * step + index + offset
                for block in blocks
                for index in range(self.pages_per_block)
            ]
            live = min(cdiv(length, self.page_tokens), table.shape[1])
            table[row, :live] = torch.tensor(ids[:live], dtype=torch.int32)
        return table

    def csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """``paged_kv_indptr``, ``paged_kv_indices``, ``paged_kv_last_page_len``."""
        counts = [cdiv(length, self.page_tokens) for length in self.lengths]
        table = self.page_table()
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        indptr[1:] = torch.tensor(counts).cumsum(0)
        rows = [table[row, :count] for row, count in enumerate(counts)]
        last = [
            length - (count - 1) * self.page_tokens if count else 0
            for length, count in zip(self.lengths, counts, strict=True)
        ]
        return indptr, torch.cat(rows), torch.tensor(last, dtype=torch.int32)
