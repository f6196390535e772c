# SPDX-License-Identifier: Apache-2.0
"""Re-paging broken on purpose: what the strict kernels and the comparisons must catch.

A fault is chosen by ``REPAGE_TEST_FAULT``. All of them yield ids and views inside the storage,
except where noted: shapes and ranges alone would let them through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import repage

__all__ = ["FAULTS"]

Number = Callable[[repage.PagePlan], tuple[int, int]]


def wrong_step() -> None:
    """Number pages as if a layer's blocks were dense: ``page(b, j) = b * r + j``."""
    _renumber(lambda plan: (plan.pages_per_block, 1))


def half_unit() -> None:
    """Take half the page unit: blocks are found, all but the first of their pages are not."""
    view = repage.virtual_view

    def half_view(kv_cache: Tensor, plan: repage.PagePlan) -> Tensor:
        pages = view(kv_cache, plan)
        count = 2 * (pages.shape[0] - plan.pages_per_block * plan.page_step) + plan.pages_per_block
        stride = (pages.stride(0) // 2, *pages.stride()[1:])
        return pages.as_strided((count, *pages.shape[1:]), stride, pages.storage_offset())

    repage.virtual_view = half_view
    _renumber(lambda plan: (2 * plan.block_step, plan.page_step))


def manager_slots() -> None:
    """Write manager slots through the view of kernel pages."""
    from repage.vllm.impl import RepagedImpl
    from repage.vllm.pages import kernel_pages
    from repage.vllm.policy import PageChoice

    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> Any:
        if kv_cache.numel() and isinstance(self.repage_choice, PageChoice):
            kv_cache = kernel_pages(kv_cache, self.repage_choice).view
        return super(RepagedImpl, self).do_kv_cache_update(layer, key, value, kv_cache, slots)

    RepagedImpl.do_kv_cache_update = do_kv_cache_update  # type: ignore[method-assign]


def stale_table() -> None:
    """Leave the first batch's table, or page list, in the persistent buffer."""
    build, build_list = repage.PageTableBuffer.build, repage.PageTableBuffer.build_kv_indices
    built: set[int] = set()

    def build_once(
        self: repage.PageTableBuffer, block_table: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if id(self) in built:
            return self.table[: block_table.shape[0]]
        built.add(id(self))
        return build(self, block_table, *args, **kwargs)

    def build_list_once(
        self: repage.PageTableBuffer, block_table: Tensor, kv_indptr: Tensor, kv_indices: Tensor
    ) -> Tensor:
        if kv_indices.data_ptr() in built:
            return kv_indices
        built.add(kv_indices.data_ptr())
        return build_list(self, block_table, kv_indptr, kv_indices)

    repage.PageTableBuffer.build = build_once  # type: ignore[method-assign, assignment]
    repage.PageTableBuffer.build_kv_indices = build_list_once  # type: ignore[method-assign]


def wild_dead_columns() -> None:
    """Put an id outside the view behind the live pages; no kernel reads it."""
    build = repage.PageTableBuffer.build

    def build_wild(self: repage.PageTableBuffer, *args: Any, **kwargs: Any) -> Tensor:
        table = build(self, *args, **kwargs)
        table[:, -1] = self.plan.num_virtual_pages
        return table

    repage.PageTableBuffer.build = build_wild  # type: ignore[method-assign, assignment]


def _renumber(number: Number) -> None:
    """Give pages the ids ``block * block_step + index * page_step`` of ``number(plan)``."""
    build_buffer = repage.PageTableBuffer.build
    build_list = repage.PageTableBuffer.build_kv_indices
    build_table = repage.build_page_table

    def fill(table: Tensor, block_table: Tensor, plan: repage.PagePlan) -> Tensor:
        block_step, page_step = number(plan)
        for index in range(plan.pages_per_block):
            table[:, index :: plan.pages_per_block] = block_table * block_step + index * page_step
        return table

    def fill_list(
        indices: Tensor, block_table: Tensor, kv_indptr: Tensor, plan: repage.PagePlan
    ) -> Tensor:
        width = block_table.shape[1] * plan.pages_per_block
        rows = torch.empty(block_table.shape[0], width, dtype=torch.int32)
        fill(rows, block_table, plan)
        starts = kv_indptr.tolist()
        for row in range(len(starts) - 1):
            indices[starts[row] : starts[row + 1]] = rows[row, : starts[row + 1] - starts[row]]
        return indices

    def buffer(
        self: repage.PageTableBuffer,
        block_table: Tensor,
        seq_lens: Tensor | None = None,
        *,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
    ) -> Tensor:
        lists = {"kv_indptr": kv_indptr, "kv_indices": kv_indices}
        table = build_buffer(self, block_table, seq_lens, **lists)
        if kv_indptr is not None and kv_indices is not None:
            fill_list(kv_indices, block_table, kv_indptr, self.plan)
        return fill(table, block_table, self.plan)

    def buffer_list(
        self: repage.PageTableBuffer, block_table: Tensor, kv_indptr: Tensor, kv_indices: Tensor
    ) -> Tensor:
        build_list(self, block_table, kv_indptr, kv_indices)
        return fill_list(kv_indices, block_table, kv_indptr, self.plan)

    def page_table(block_table: Tensor, plan: repage.PagePlan, **kwargs: Any) -> Tensor:
        return fill(build_table(block_table, plan, **kwargs), block_table, plan)

    repage.PageTableBuffer.build = buffer  # type: ignore[method-assign, assignment]
    repage.PageTableBuffer.build_kv_indices = buffer_list  # type: ignore[method-assign]
    repage.build_page_table = page_table


FAULTS: Mapping[str, Callable[[], None]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (wrong_step, half_unit, manager_slots, stale_table, wild_dead_columns)
}
"""Each installs itself for the rest of the process."""
