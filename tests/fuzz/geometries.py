# SPDX-License-Identifier: Apache-2.0
"""Random pools: small ones in real memory, huge ones as addresses alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import repage
from support import oracle

INT32_MAX = 2**31 - 1


def random_pool(rng: np.random.Generator) -> oracle.Pool:
    """Return a pool of up to about a megabyte, of any interior, offset and stride."""
    interior = str(rng.choice(["NHC", "HNC", "HLNC"]))
    page_tokens = int(rng.choice([1, 2, 3, 5, 8, 16, 32]))
    pages_per_block = int(rng.choice([1, 2, 3, 5, 7, 10, 15, 16, 17, 31, 33, 40]))
    num_heads = int(rng.integers(1, 5))
    content = int(rng.choice([8, 16, 24, 32, 48, 72, 144]))
    num_blocks = int(rng.integers(1, 9))
    block_tokens = page_tokens * pages_per_block
    layers = oracle.LAYERS_IN_HLNC if interior == "HLNC" else 1
    layer_bytes = block_tokens * num_heads * content * layers
    unit = page_tokens * content * (num_heads if interior == "NHC" else 1)
    # Half of the strides are whole units, as planners align them; the others may be anything.
    step = unit if rng.random() < 0.5 else 8
    stride = (math.ceil(layer_bytes / step) + int(rng.integers(0, 50))) * step
    return oracle.Pool(
        interior=interior,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        page_tokens=page_tokens,
        num_heads=num_heads,
        content_bytes=content,
        offset=8 * int(rng.integers(0, 200)),
        block_stride=stride,
    )


@dataclass(frozen=True)
class Addresses:
    """Page ids of a pool too large for memory, each from its byte address.

    Has the part of a numpy array that `support.oracle` looks at.
    """

    num_blocks: int
    block_tokens: int
    page_tokens: int
    token_stride: int
    block_stride: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_blocks, self.block_tokens // self.page_tokens

    def __getitem__(self, place: tuple[int, int]) -> int:
        block, page = map(int, place)
        address = block * self.block_stride + page * self.page_tokens * self.token_stride
        return address // math.gcd(self.block_stride, self.page_tokens * self.token_stride)

    @property
    def plan(self) -> repage.PagePlan:
        return repage.PagePlan(
            repage.BlockGeometry.dense(
                "NHC",
                num_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                num_heads=1,
                content_bytes=self.token_stride,
                block_stride=self.block_stride,
            ),
            self.page_tokens,
        )


def random_addresses(rng: np.random.Generator) -> Addresses:
    """Return a pool whose largest page id comes close to what int32 tables hold."""
    page_tokens = int(rng.choice([1, 16, 64, 128]))
    pages_per_block = int(rng.integers(1, 80))
    token_stride = 16 * int(rng.integers(1, 600))
    unit = page_tokens * token_stride
    layers = int(rng.integers(1, 60))
    stride = unit * (pages_per_block * layers + int(rng.integers(0, 9)))
    if rng.random() < 0.5:
        stride += 16 * int(rng.integers(0, 64))
    step = stride // math.gcd(stride, unit)
    last = (pages_per_block - 1) * (unit // math.gcd(stride, unit))
    most = max(1, (INT32_MAX - last) // step + 1)
    blocks = most if rng.random() < 0.5 else int(rng.integers(1, most + 1))
    blocks = min(blocks, INT32_MAX, 2**60 // stride)
    return Addresses(blocks, page_tokens * pages_per_block, page_tokens, token_stride, stride)


Ids = np.ndarray | Addresses


@dataclass(frozen=True)
class Batch:
    """A block table in memory with a free row stride, and lengths."""

    memory: np.ndarray
    row_stride: int
    rows: int
    columns: int
    seq_lens: np.ndarray | None
    lookahead: int

    @property
    def table(self) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(
            self.memory, (self.rows, self.columns), (4 * self.row_stride, 4)
        )


def random_batch(
    rng: np.random.Generator, num_blocks: int, block_tokens: int, *, columns: int | None = None
) -> Batch:
    """Return a batch; some ids and lengths are out of range, as in a half-written table."""
    rows = int(rng.integers(0, 6))
    columns = int(rng.integers(0, 9)) if columns is None else columns
    row_stride = columns + int(rng.integers(0, 4))
    # Not a byte behind the last column: reading there is a mistake that a sanitizer sees.
    size = (rows - 1) * row_stride + columns if rows else 0
    memory = rng.integers(0, num_blocks, max(size, 0), dtype=np.int32)
    wild = rng.random(memory.shape) < 0.1
    memory[wild] = rng.choice([-1, num_blocks, INT32_MAX, -(2**31)], int(wild.sum())).clip(
        -(2**31), INT32_MAX
    )
    seq_lens = None
    if rng.random() < 0.8:
        longest = max(columns * block_tokens + 2 * block_tokens, 2)
        seq_lens = rng.integers(-2, min(longest, INT32_MAX), rows, dtype=np.int32)
        if rows and rng.random() < 0.1:
            seq_lens[0] = INT32_MAX
    lookahead = int(rng.choice([0, 1, 5, block_tokens, INT32_MAX]))
    return Batch(memory, row_stride, rows, columns, seq_lens, lookahead)


def random_indptr(rng: np.random.Generator, batch: Batch, pages_per_block: int) -> np.ndarray:
    """Return row ends of a CSR list; some rows are longer than their table."""
    longest = batch.columns * pages_per_block + 3
    lengths = rng.integers(0, longest + 1, batch.rows)
    begin = int(rng.integers(0, 4))
    return np.concatenate([[begin], begin + np.cumsum(lengths)]).astype(np.int32)
