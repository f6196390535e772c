# SPDX-License-Identifier: Apache-2.0
"""A layer inside packed blocks of any size: real torch views, no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import repage


@dataclass(frozen=True)
class Layer:
    """One layer of a packed block, in bytes.

    ``E`` is K and V of a token and head; ``offset`` is where the layer begins in each block.
    """

    stride: int
    tokens: int
    heads: int
    content: int
    offset: int = 0
    interior: str = "NHC"
    blocks: int = 4

    def geometry(self) -> repage.BlockGeometry:
        return repage.BlockGeometry.dense(
            self.interior,
            num_blocks=self.blocks,
            block_tokens=self.tokens,
            num_heads=self.heads,
            content_bytes=self.content,
            block_stride=self.stride,
            base_offset=self.offset,
            storage_bytes=self.blocks * self.stride,
        )

    def cache(self) -> torch.Tensor:
        """Return vLLM's [B, H, N, C] view, on a device that has addresses but no memory."""
        memory = torch.empty(self.blocks * self.stride, dtype=torch.uint8, device="meta")
        if self.interior == "NHC":
            head, token = self.content, self.heads * self.content
        else:
            head, token = self.tokens * self.content, self.content
        return memory.as_strided(
            (self.blocks, self.heads, self.tokens, self.content),
            (self.stride, head, token, 1),
            self.offset,
        )

    def tiling(self, *page_sizes: int) -> repage.PagePlan:
        """Plan for a kernel whose pages must tile the pool (tensor maps)."""
        return repage.plan_pages(self.geometry(), tiling(*page_sizes))

    def walked(self, page_tokens: int) -> repage.PagePlan:
        """Plan pages, after finding every page of the view where torch finds its tokens."""
        cache = self.cache()
        plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), page_tokens)
        view = repage.virtual_view(cache, plan)
        last = page_tokens - 1
        for block in {0, 1, self.blocks - 1}:
            for index in range(plan.pages_per_block):
                page = view[plan.page(block, index)]
                token = index * page_tokens
                for head in {0, self.heads - 1}:
                    for offset in (0, last):
                        assert (
                            page[head, offset].storage_offset()
                            == cache[block, head, token + offset].storage_offset()
                        )
        return plan


def tiling(*page_sizes: int) -> repage.KernelPageRules:
    return repage.KernelPageRules(page_sizes=page_sizes, allow_overlapping_pages=False)


def int32(*rows: object) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int32)


# Qwen3.6-35B-A3B + DFlash, bf16: target (2 heads of 256) and full-attention drafter (8 of 128).
QWEN_STRIDE = 15_728_640
QWEN_TARGET = Layer(QWEN_STRIDE, 640, 2, 1024)
QWEN_DRAFT = Layer(QWEN_STRIDE, 640, 8, 512, 13_107_200)
