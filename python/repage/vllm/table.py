# SPDX-License-Identifier: Apache-2.0
"""The kernel page table of one metadata builder."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

import repage
from repage.errors import GeometryError
from repage.vllm import compat
from repage.vllm.impl import push_choice
from repage.vllm.pages import kernel_pages

if TYPE_CHECKING:
    from repage.vllm.policy import PageChoice


class GroupTable:
    """Rewrites manager block tables for the layers of one builder.

    A builder owns one, so micro-batches, which have a builder each, do not share memory.

    Parameters
    ----------
    choice : PageChoice
        The builder's page.
    layer_names : list of str
        The builder's own list: vLLM's drafters append to it after the builder was made
        (``v1/spec_decode/llm_base_proposer.py:1758-1765``, 0.32.0).
    vllm_config : vllm.config.VllmConfig
        For the layers, the number of rows and the speculative tokens.
    device : torch.device
        Of the tables.
    persistent : bool
        Whether tables of the group's width live at one address, as CUDA graphs need. False where
        every batch has its own width.
    """

    def __init__(
        self,
        choice: PageChoice,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *,
        persistent: bool,
    ) -> None:
        self.choice = choice
        self._layer_names = layer_names
        self._layers = vllm_config.compilation_config.static_forward_context
        self._max_rows = vllm_config.scheduler_config.max_num_seqs
        self._device = device
        self._persistent = persistent
        # Every path that moves seq_lens rebuilds or refreshes the table before the next read: V1
        # rebuilds per draft step, V2 rebuilds or records update_draft_decode_metadata. The slack
        # is for lengths that are corrected on the device after a build; columns within it are
        # valid ids of blocks that the request may own by then, and lengths that shrink leave
        # valid ids behind. Under decode context parallelism a column is a local block while the
        # lengths are global, hence larger: that keeps more columns live than needed, never fewer.
        self.lookahead = compat.speculative_tokens(vllm_config) + 1
        self._plans: list[repage.PagePlan] = []
        self._bound: list[tuple[Any, weakref.ref[torch.Tensor]]] = []
        self._buffer: repage.PageTableBuffer | None = None
        self._last: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None

    def plan(self) -> repage.PagePlan:
        """Return the plan by which page ids of this group are made, from the caches bound now.

        Returns
        -------
        repage.PagePlan
            Of the first layer. The others may begin elsewhere in the block but share its steps.

        Raises
        ------
        GeometryError
            When a layer has no cache, or the layers' caches need different tables.
        NoValidPageError
            When the kernel cannot read such pages in these caches.

        Notes
        -----
        Profiling binds small caches before the real ones, so the bound tensors are compared by
        identity with those of the last call, which costs an attribute per layer. They are
        remembered weakly: a cache that vLLM drops must go.
        """
        if not self._is_current():
            self._adopt([self._layer_plan(name) for name in self._layer_names])
            layers = [self._layers[name] for name in self._layer_names]
            self._bound = [(layer, weakref.ref(layer.kv_cache)) for layer in layers]
        return self._plans[0]

    def build(self, block_table: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """Return the kernel page table of a batch.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W], manager block ids.
        seq_lens : torch.Tensor or None
            int32 [R], tokens per row; anything that does not fit the rows is not used, and then
            every column counts as live.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], contiguous. At the same address for every batch of the group's
            width; safe to capture.

        Raises
        ------
        GeometryError, NoValidPageError
            As `plan`.
        """
        plan = self.plan()
        seq_lens = _fitting(seq_lens, block_table)
        buffer = self._fitting_buffer(plan, block_table)
        if buffer is not None:
            table = buffer.build(block_table, seq_lens)
        else:
            table = repage.build_page_table(
                block_table, plan, seq_lens=seq_lens, lookahead=self.lookahead
            )
        self._last = (block_table, seq_lens, table)
        return table

    def unfilled(self, block_table: torch.Tensor) -> torch.Tensor:
        """Return the table of a batch before its entries are written.

        For parents that read none of them, or none before `fill`.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W], manager block ids.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], contiguous, where `build` puts this batch's table. No launch; the
            entries are valid page ids, of an earlier batch or of the null page.

        Raises
        ------
        GeometryError, NoValidPageError
            As `plan`.
        """
        plan = self.plan()
        rows, width = block_table.shape
        buffer = self._fitting_buffer(plan, block_table)
        if buffer is not None:
            return buffer.first_rows(rows)
        return torch.zeros(
            (rows, width * plan.pages_per_block), dtype=torch.int32, device=self._device
        )

    def fill(
        self,
        table: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
    ) -> None:
        """Write the entries of a batch's table, and its page list with them, in one launch.

        Parameters
        ----------
        table : torch.Tensor
            From `unfilled` or `build`, for the same batch.
        block_table, seq_lens : torch.Tensor
            As in `build`.
        kv_indptr, kv_indices : torch.Tensor or None, default None
            int32 [R + 1] and int32 [any], as in `repage.build_kv_indices`; both or none.
        """
        seq_lens = _fitting(seq_lens, block_table)
        if self._buffer is not None and table.data_ptr() == self._buffer.table.data_ptr():
            self._buffer.build(block_table, seq_lens, kv_indptr=kv_indptr, kv_indices=kv_indices)
        else:
            repage.build_page_table(
                block_table,
                self.plan(),
                seq_lens=seq_lens,
                lookahead=self.lookahead,
                out=table,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
            )
        self._last = (block_table, seq_lens, table)

    def list_pages(
        self, block_table: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor
    ) -> None:
        """Write the page list of a batch's leading rows, in one launch.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W], manager block ids, that a table was asked for before.
        kv_indptr, kv_indices : torch.Tensor
            int32 [R' + 1], R' <= R, and int32 [any], as in `repage.build_kv_indices`.
        """
        if self._buffer is not None:
            self._buffer.build_kv_indices(block_table, kv_indptr, kv_indices)
        else:
            rows = kv_indptr.shape[0] - 1
            plan = self._plans[0]
            repage.build_kv_indices(block_table[:rows], kv_indptr, plan, out=kv_indices)

    def refresh(self) -> None:
        """Rewrite the last batch's page table in place from its manager table as it is now.

        Recorded by draft graphs that replay without a build: they read the manager table and the
        lengths by address, so one launch here follows the batches that come after the capture.

        Raises
        ------
        GeometryError
            When nothing was built before.
        """
        if self._last is None:
            raise GeometryError("the draft update came before any metadata was built")
        block_table, seq_lens, table = self._last
        self.fill(table, block_table, seq_lens)

    def _is_current(self) -> bool:
        """Whether the plans are those of the caches that are bound now."""
        if not self._plans or len(self._bound) != len(self._layer_names):
            return False
        return all(layer.kv_cache is cache() for layer, cache in self._bound)

    def _fitting_buffer(
        self, plan: repage.PagePlan, block_table: torch.Tensor
    ) -> repage.PageTableBuffer | None:
        """Return the persistent table, made on first use, if a batch has its shape."""
        rows, width = block_table.shape
        if self._buffer is None and self._persistent:
            self._buffer = repage.PageTableBuffer(
                plan,
                max(self._max_rows, rows),
                width,
                self._device,
                lookahead=self.lookahead,
                name=self._layer_names[0],
            )
        buffer = self._buffer
        if buffer is None or width != buffer.block_table_width or rows > buffer.table.shape[0]:
            return None
        return buffer

    def _layer_plan(self, name: str) -> repage.PagePlan:
        layer = self._layers.get(name)
        kv_cache = None if layer is None else layer.kv_cache
        if not isinstance(kv_cache, torch.Tensor) or not kv_cache.numel():
            raise GeometryError(
                f"{name}: metadata is built for {self.choice.page_tokens}-token pages, but the "
                "layer has no KV cache bound"
            )
        return kernel_pages(kv_cache, self.choice).plan

    def _adopt(self, plans: list[repage.PagePlan]) -> None:
        first = plans[0]
        for name, plan in zip(self._layer_names, plans, strict=True):
            if plan.geometry.block_tokens != self.choice.block_tokens:
                raise GeometryError(
                    f"{name}: its cache has blocks of {plan.geometry.block_tokens} tokens, its "
                    f"metadata builder was made for {self.choice.block_tokens}"
                )
            if _steps(plan) != _steps(first):
                raise GeometryError(
                    f"{name}: one page table cannot serve it and {self._layer_names[0]}: their "
                    f"blocks and pages are {_steps(plan)} and {_steps(first)} virtual pages apart"
                )
        if not self._plans or self._plans[0] != first:
            # Graphs captured on other caches are void with them, and so is their table.
            self._buffer = None
        self._plans = plans
        push_choice(self._layers, self._layer_names, self.choice)


def _steps(plan: repage.PagePlan) -> tuple[int, int]:
    return plan.block_step, plan.page_step


def _fitting(seq_lens: torch.Tensor | None, block_table: torch.Tensor) -> torch.Tensor | None:
    if (
        seq_lens is None
        or seq_lens.dtype != torch.int32
        or seq_lens.shape != block_table.shape[:1]
        or seq_lens.device != block_table.device
        or not seq_lens.is_contiguous()
    ):
        return None
    return seq_lens
