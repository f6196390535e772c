# SPDX-License-Identifier: Apache-2.0
"""Who competes in `page_tables.py`, and that each of them computes the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import repage
import vllm_code

PAGE_TOKENS = 16
"""P: with it the sweep's r = N / P gives manager blocks of 80 to 1280 tokens."""
POISON = 0x5A5A5A5A
LIVE_PERCENT = (1, 10, 50, 100)
LIVE_8K = 8192


@dataclass(frozen=True)
class Shape:
    """One point of the sweep.

    Attributes
    ----------
    batch : int
        Rows.
    max_model_len : int
        Tokens that a row has room for.
    pages_per_block : int
        r.
    groups : int
        Attention groups, each with a table of its own, mapped one after the other.
    """

    batch: int
    max_model_len: int
    pages_per_block: int
    groups: int = 1

    @property
    def block_tokens(self) -> int:
        return self.pages_per_block * PAGE_TOKENS

    @property
    def width(self) -> int:
        return -(-self.max_model_len // self.block_tokens)

    @property
    def table_bytes(self) -> int:
        """Bytes of one group's kernel page table."""
        return 4 * self.batch * self.width * self.pages_per_block

    def live_lengths(self) -> dict[str, int]:
        """Return the sequence lengths that are measured, by name."""
        lengths = {f"{p}%": max(self.max_model_len * p // 100, 1) for p in LIVE_PERCENT}
        if self.max_model_len > LIVE_8K:
            lengths["8K"] = LIVE_8K
        return lengths


class Contenders:
    """All ways to make one shape's tables, ready to run.

    Each has memory of its own. Block ids are random; lengths differ a little from row to row.
    """

    # Tables that exist at the same time for each group: vLLM's, numpy's and its scratch, the
    # expected one and its copy, ours, up to three CSR lists, and one to compare with.
    TABLES = 10

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.block_step = 7 * shape.pages_per_block
        num_blocks = 4096
        self.plan = repage.PagePlan(
            repage.BlockGeometry.dense(
                "NHC",
                num_blocks=num_blocks,
                block_tokens=shape.block_tokens,
                num_heads=2,
                content_bytes=1024,
                block_stride=self.block_step * PAGE_TOKENS * 2048,
            ),
            PAGE_TOKENS,
        )
        rng = np.random.default_rng(shape.batch + shape.width)
        self.block_tables = [
            torch.from_numpy(
                rng.integers(0, num_blocks, (shape.batch, shape.width), dtype=np.int32)
            ).to(device)
            for _ in range(shape.groups)
        ]
        offsets = torch.arange(shape.pages_per_block, dtype=torch.int32, device=device)
        self.expected = [
            (table.unsqueeze(-1) * self.block_step + offsets).flatten(1)
            for table in self.block_tables
        ]
        jitter = rng.integers(0, PAGE_TOKENS, shape.batch)
        self.lengths = {
            name: torch.from_numpy(np.maximum(length - jitter, 1).astype(np.int32)).to(device)
            for name, length in shape.live_lengths().items()
        }
        self.functions: dict[str, Callable[[], Any]] = {}
        self.left_out: dict[str, str] = {}
        self._vllm()
        if device.type == "cpu":
            self._numpy()
        self._copy()
        self._ours()
        self._csr()

    def _vllm(self) -> None:
        attention_group = vllm_code.attention_group()
        shape = self.shape
        self.vllm_groups = []
        for _ in range(shape.groups):
            group = attention_group(
                backend=None,
                layer_names=["layer"],
                kv_cache_spec=SimpleNamespace(block_size=shape.block_tokens),
                kv_cache_group_id=0,
                kernel_block_size=PAGE_TOKENS,
                kernel_block_stride=self.block_step,
            )
            group.kernel_block_table = self._zeros().unsqueeze(0)
            group.kernel_block_offsets = torch.arange(
                shape.pages_per_block, dtype=torch.int32, device=self.device
            )
            self.vllm_groups.append(group)
        self._each("vllm", [group.map_to_kernel_block_table for group in self.vllm_groups])

    def _numpy(self) -> None:
        self.numpy_tables = [self._zeros() for _ in self.block_tables]
        offsets = np.arange(self.shape.pages_per_block, dtype=np.int32)
        step = np.int32(self.block_step)

        def expand(out: np.ndarray, table: torch.Tensor) -> None:
            np.add((table.numpy() * step)[:, :, None], offsets, out=out)

        wide = (self.shape.batch, self.shape.width, self.shape.pages_per_block)
        self._each("numpy", [partial(expand, t.numpy().reshape(wide)) for t in self.numpy_tables])

    def _copy(self) -> None:
        copies = [(torch.empty_like(table), table) for table in self.expected]

        def copy(pair: tuple[torch.Tensor, torch.Tensor], _table: torch.Tensor) -> None:
            pair[0].copy_(pair[1])

        self._each("copy", [partial(copy, pair) for pair in copies])

    def _ours(self) -> None:
        shape = self.shape
        self.buffers = [
            repage.PageTableBuffer(self.plan, shape.batch, shape.width, self.device)
            for _ in self.block_tables
        ]
        self._each("repage", [buffer.build for buffer in self.buffers])
        for name, lengths in self.lengths.items():
            builds = [partial(self._build_live, buffer, lengths) for buffer in self.buffers]
            self._each(f"repage live {name}", builds)

    def _csr(self) -> None:
        """FlashInfer's list of a full batch: what vLLM does today, and from the manager table."""
        rows, columns = self.expected[0].shape
        indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * columns
        names = ["repage csr", "repage both"]
        if vllm_code.list_kernel_runs_on(self.device):
            names.insert(0, "vllm csr")
        else:
            self.left_out["vllm csr"] = "vLLM copies the list with a Triton kernel for GPUs"
        self.csr = {
            name: [torch.zeros_like(table).flatten() for table in self.expected] for name in names
        }

        def vllm_csr(group: Any, out: torch.Tensor, table: torch.Tensor) -> None:
            mapped = group.map_to_kernel_block_table(table)
            copy_page_indices[(rows,)](out, mapped, mapped.stride(0), indptr, BLOCK_SIZE=1024)

        def repage_csr(buffer: Any, out: torch.Tensor, table: torch.Tensor) -> None:
            buffer.build_kv_indices(table, indptr, out)

        def repage_both(buffer: Any, out: torch.Tensor, table: torch.Tensor) -> None:
            buffer.build(table, kv_indptr=indptr, kv_indices=out)

        if "vllm csr" in names:
            copy_page_indices = vllm_code.list_kernel()
            pairs = zip(self.vllm_groups, self.csr["vllm csr"], strict=True)
            self._each("vllm csr", [partial(vllm_csr, group, out) for group, out in pairs])
        for name, build in (("repage csr", repage_csr), ("repage both", repage_both)):
            pairs = zip(self.buffers, self.csr[name], strict=True)
            self._each(name, [partial(build, buffer, out) for buffer, out in pairs])

    @staticmethod
    def _build_live(buffer: Any, lengths: torch.Tensor, table: torch.Tensor) -> None:
        buffer.build(table, lengths)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.expected[0])

    def _each(self, name: str, builds: list[Callable[[torch.Tensor], Any]]) -> None:
        pairs = list(zip(builds, self.block_tables, strict=True))

        def run() -> None:
            for build, table in pairs:
                build(table)

        self.functions[name] = run if len(pairs) > 1 else partial(*pairs[0])

    def check(self) -> None:
        """Poison every output, run everybody, and compare with the expected tables.

        Raises
        ------
        SystemExit
            When somebody's table is wrong.
        """
        for name in self.functions:
            for memory in self._outputs(name):
                memory.fill_(POISON)
            if "live" in name:
                # Marks every column as used, so that the poison must go.
                for buffer, table in zip(self.buffers, self.block_tables, strict=True):
                    buffer.build(table)
                    buffer.table.fill_(POISON)
            self.functions[name]()
            self._compare(name)

    def check_after(self, name: str) -> None:
        """Run one more time and compare; for after the timing."""
        self.functions[name]()
        self._compare(name)

    def _outputs(self, name: str) -> list[torch.Tensor]:
        if name == "vllm":
            return [group.kernel_block_table[0] for group in self.vllm_groups]
        if name == "numpy":
            return self.numpy_tables
        if name == "copy":
            return []
        if name.endswith(("csr", "both")):
            return [*self.csr[name], *(b.table for b in self.buffers if name.endswith("both"))]
        return [buffer.table for buffer in self.buffers]

    def _compare(self, name: str) -> None:
        live = self.lengths.get(name.removeprefix("repage live "))
        for index, memory in enumerate(self._outputs(name)):
            expected = self.expected[index % self.shape.groups]
            if live is not None:
                columns = torch.arange(expected.shape[1], device=self.device)
                blocks = -(-live // self.shape.block_tokens)
                limit = (blocks * self.shape.pages_per_block).unsqueeze(1)
                expected = expected * (columns < limit)
            if not torch.equal(memory.view(expected.shape), expected):
                raise SystemExit(f"{name} made a wrong table for {self.shape}")


def sweep(quick: bool) -> Iterator[Shape]:
    """Yield the shapes of the sweep, small tables first."""
    if quick:
        yield Shape(1, 8192, 5)
        yield Shape(8, 131_072, 40, groups=2)
        return
    shapes = [
        Shape(batch, length, pages, groups)
        for batch in (1, 8, 64, 256, 1024)
        for length in (8192, 32_768, 131_072, 1_048_576)
        for pages in (5, 10, 20, 40, 80)
        for groups in (1, 4)
    ]
    yield from sorted(shapes, key=lambda shape: shape.table_bytes * shape.groups)
