# SPDX-License-Identifier: Apache-2.0
"""Packed blocks in real memory, and the same tokens in dense pages.

Whatever no live token owns holds 0xFF bytes, which are NaN in bf16, fp16, fp32 and fp8 e4m3: other
layers of the block, the tails of last pages, blocks that were freed and the null block. A kernel
that reads any of it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from repage.geometry import BlockGeometry
from repage.ops import build_kv_indices, build_page_table, last_page_len
from repage.plan import PagePlan
from repage.views import virtual_view

Layout = Literal["NHD", "HND"]

POISON = 0xFF
"""The byte that fills what no live token owns."""


@dataclass(frozen=True)
class PoolShape:
    """Shape of a layer in packed blocks, K and V packed in one content dimension as vLLM does.

    Parameters
    ----------
    layout : {"NHD", "HND"}
        Order inside a block, as FlashInfer names it: tokens first (vLLM's BLNHC) or heads first
        (BLHNC).
    kv_heads, head_dim : int
        KV heads, and elements of K (and of V) of one.
    dtype : torch.dtype, default torch.bfloat16
        Element type.
    block_tokens : int, default 640
        Tokens in a manager block.
    slack_bytes : int, default 0
        Bytes at the end of each block, after another layer of the same shape and this one.
    """

    layout: Layout
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    block_tokens: int = 640
    slack_bytes: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a block."""
        return self.block_tokens * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KernelPages:
    """What an attention kernel is called with.

    Parameters
    ----------
    layout : {"NHD", "HND"}
        Order of the page's dimensions.
    key, value : torch.Tensor
        [pages, P, H, D] (NHD) or [pages, H, P, D] (HND), any strides.
    page_tokens : int
        Tokens in a page (P).
    kv_indptr : torch.Tensor
        int32 [R + 1] on the CPU, pages before each sequence.
    kv_indices : torch.Tensor
        int32 on the device, page ids of all sequences.
    last_page_len : torch.Tensor
        int32 [R] on the CPU, tokens in each last page.
    page_table : torch.Tensor
        int32 [R, columns] on the device, contiguous.
    seq_lens : torch.Tensor
        int32 [R] on the device.
    """

    layout: Layout
    key: torch.Tensor
    value: torch.Tensor
    page_tokens: int
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor


class PackedPool:
    """Sequences in shuffled packed blocks.

    Parameters
    ----------
    shape : PoolShape
        The layer.
    lengths : tuple of int
        Tokens of each sequence.
    device : torch.device
        Where everything lives.
    window : int or None, default None
        Tokens that the last query of a sequence sees. Blocks wholly before it are freed: their
        columns in the block table hold the null block 0. None keeps everything.
    null_byte : int, default POISON
        What fills the null block.
    skip_blocks : int, default 0
        Blocks after the null block that no sequence uses, so that addresses become large.
    """

    def __init__(
        self,
        shape: PoolShape,
        lengths: tuple[int, ...],
        device: torch.device,
        *,
        window: int | None = None,
        null_byte: int = POISON,
        skip_blocks: int = 0,
    ) -> None:
        self.shape = shape
        self.lengths = lengths
        self.window = window
        self._first_block = [
            0 if window is None else max(length - window, 0) // shape.block_tokens
            for length in lengths
        ]
        generator = torch.Generator().manual_seed(11)
        per_row = [_cdiv(length, shape.block_tokens) for length in lengths]
        order = torch.randperm(sum(per_row), generator=generator) + 1 + skip_blocks
        table = torch.zeros((len(lengths), max(per_row)), dtype=torch.int32)
        taken = 0
        for row, count in enumerate(per_row):
            first = self._first_block[row]
            table[row, first:count] = order[taken + first : taken + count].int()
            taken += count
        self.num_blocks = taken + 1 + skip_blocks
        self.block_table = table.to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.tokens = [
            tuple(
                torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator)
                .to(shape.dtype)
                .to(device)
                for _ in range(2)
            )
            for length in lengths
        ]
        stride = 2 * shape.layer_bytes + shape.slack_bytes
        self._bytes = torch.full(
            (self.num_blocks * stride,), POISON, dtype=torch.uint8, device=device
        )
        self._bytes[:stride] = null_byte
        self.kv_cache = self._bind(stride)
        self._write_tokens(table)

    def _bind(self, block_stride: int) -> torch.Tensor:
        """Return vLLM's view [B, H, N, C] of the second layer in every block."""
        shape = self.shape
        size, content = shape.dtype.itemsize, 2 * shape.head_dim
        heads, tokens = shape.kv_heads, shape.block_tokens
        token_stride, head_stride = heads * content, content
        if shape.layout == "HND":
            token_stride, head_stride = content, tokens * content
        return self._bytes.view(shape.dtype).as_strided(
            (self.num_blocks, heads, tokens, content),
            (block_stride // size, head_stride, token_stride, 1),
            shape.layer_bytes // size,
        )

    def _write_tokens(self, table: torch.Tensor) -> None:
        size, head_dim = self.shape.block_tokens, self.shape.head_dim
        for row, (key, value) in enumerate(self.tokens):
            for column in range(self._first_block[row], _cdiv(self.lengths[row], size)):
                block = int(table[row, column])
                part = slice(column * size, (column + 1) * size)
                count = len(key[part])
                for index, tokens in enumerate((key[part], value[part])):
                    content = slice(index * head_dim, (index + 1) * head_dim)
                    self.kv_cache[block, :, :count, content] = tokens.transpose(0, 1)

    def first_live_token(self, row: int) -> int:
        """Return the first token of a sequence whose block is still there."""
        return self._first_block[row] * self.shape.block_tokens

    def plan(self, page_tokens: int) -> PagePlan:
        """Return the pages of the layer."""
        return PagePlan(BlockGeometry.from_tensor(self.kv_cache), page_tokens)

    def virtual_pages(self, page_tokens: int) -> KernelPages:
        """Return the packed blocks as kernel pages, through the product's own operations."""
        plan = self.plan(page_tokens)
        pages = virtual_view(self.kv_cache, plan)
        if self.shape.layout == "NHD":
            pages = pages.transpose(1, 2)
        indptr = self._kv_indptr(page_tokens)
        device = self.seq_lens.device
        indices = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=device)
        build_kv_indices(self.block_table, indptr.to(device), plan, out=indices)
        head_dim = self.shape.head_dim
        return KernelPages(
            layout=self.shape.layout,
            key=pages[..., :head_dim],
            value=pages[..., head_dim:],
            page_tokens=page_tokens,
            kv_indptr=indptr,
            kv_indices=indices,
            last_page_len=last_page_len(self.seq_lens, page_tokens).cpu(),
            page_table=build_page_table(self.block_table, plan, seq_lens=self.seq_lens),
            seq_lens=self.seq_lens,
        )

    def dense_pages(self, page_tokens: int, *, poison: bool = False) -> KernelPages:
        """Return the same tokens in dense K and V pages of their own, sequence after sequence.

        Parameters
        ----------
        page_tokens : int
            Tokens in a page.
        poison : bool, default False
            Whether tails and freed tokens hold `POISON` bytes, as in the packed blocks, or zeros.
        """
        shape, device = self.shape, self.seq_lens.device
        indptr = self._kv_indptr(page_tokens)
        count = int(indptr[-1])
        caches = []
        for part in range(2):
            raw = torch.full(
                (count * page_tokens * shape.kv_heads * shape.head_dim * shape.dtype.itemsize,),
                POISON if poison else 0,
                dtype=torch.uint8,
                device=device,
            )
            flat = raw.view(shape.dtype).view(-1, shape.kv_heads, shape.head_dim)
            for row, tokens in enumerate(self.tokens):
                first = self.first_live_token(row)
                begin = int(indptr[row]) * page_tokens
                flat[begin + first : begin + len(tokens[part])] = tokens[part][first:]
            pages = flat.view(count, page_tokens, shape.kv_heads, shape.head_dim)
            caches.append(pages.transpose(1, 2).contiguous() if shape.layout == "HND" else pages)
        rows = [_cdiv(length, page_tokens) for length in self.lengths]
        width = self.block_table.shape[1] * (shape.block_tokens // page_tokens)
        table = torch.zeros((len(rows), width), dtype=torch.int32)
        for row, pages_of_row in enumerate(rows):
            table[row, :pages_of_row] = torch.arange(int(indptr[row]), int(indptr[row + 1]))
        last = [length - (_cdiv(length, page_tokens) - 1) * page_tokens for length in self.lengths]
        return KernelPages(
            layout=shape.layout,
            key=caches[0],
            value=caches[1],
            page_tokens=page_tokens,
            kv_indptr=indptr,
            kv_indices=torch.arange(count, dtype=torch.int32, device=device),
            last_page_len=torch.tensor(last, dtype=torch.int32),
            page_table=table.to(device),
            seq_lens=self.seq_lens,
        )

    def _kv_indptr(self, page_tokens: int) -> torch.Tensor:
        counts = torch.tensor([0] + [_cdiv(length, page_tokens) for length in self.lengths])
        return counts.cumsum(0).to(torch.int32)


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
