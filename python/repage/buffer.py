# SPDX-License-Identifier: Apache-2.0
"""The kernel page table that serving engines rebuild for every batch."""

from __future__ import annotations

import torch

from repage import _core, nvtx
from repage._arguments import (
    check_block_table,
    check_kv_lists,
    check_lookahead,
    check_page_ids,
    check_tensor,
    check_width,
    checks_ids,
    launch_target,
    listed_blocks,
    live_blocks,
    raise_for_block_ids,
)
from repage.errors import ShapeError
from repage.plan import PagePlan


class PageTableBuffer:
    """A kernel page table at one address, rebuilt in place for every batch.

    CUDA graphs capture the address of a table, and kernels ask for tables exactly as wide as
    their row stride; so the memory is allocated once. The buffer remembers what each row holds:
    a build touches the live columns and those that the previous batch left behind, not the whole
    width that ``max_model_len`` gives.

    Parameters
    ----------
    plan : PagePlan
        Pages of the layers that the table serves.
    max_rows : int
        Largest number of rows (R), vLLM's ``max_num_seqs``.
    block_table_width : int
        Columns of the manager block table (W).
    device : torch.device
        Where the tables live.
    lookahead : int, default 0
        Tokens past ``seq_lens`` whose blocks are live too.
    name : str or None, default None
        The attention group, for the names of NVTX ranges (`repage.nvtx`).

    Raises
    ------
    ShapeError
        When a size is negative, or the table is too wide for int32 columns.
    GeometryError
        When page ids of the plan do not fit int32.
    """

    def __init__(
        self,
        plan: PagePlan,
        max_rows: int,
        block_table_width: int,
        device: torch.device,
        *,
        lookahead: int = 0,
        name: str | None = None,
    ) -> None:
        for size, value in (("max_rows", max_rows), ("block_table_width", block_table_width)):
            if value < 0:
                raise ShapeError(f"{size}: expected at least 0, got {value}")
        check_lookahead(lookahead)
        check_page_ids(plan)
        check_width(plan, block_table_width)
        self.plan = plan
        self.lookahead = lookahead
        self.block_table_width = block_table_width
        columns = block_table_width * plan.pages_per_block
        self.table = torch.zeros((max_rows, columns), dtype=torch.int32, device=device)
        self._device = self.table.device
        self._ordinal = self.table.get_device()
        self._row_parts = _core.row_parts(max_rows, columns, self._ordinal)
        self._watermarks = torch.zeros(
            (max_rows, self._row_parts), dtype=torch.int32, device=device
        )
        self._max_rows = max_rows
        # A view per number of rows: making one costs more than a small build.
        self._views: dict[int, torch.Tensor] = {}
        # Rows that may hold pages. Only known on the CPU: replays of a CUDA graph leave no trace
        # here, so there every build looks at every row.
        self._on_cpu = self.table.is_cpu
        self._used_rows = 0
        self._page_map = plan.page_map
        self._table_address = self.table.data_ptr()
        self._watermarks_address = self._watermarks.data_ptr()
        self._debug = checks_ids(None)
        self._launch = nvtx.ranged(_core.build_page_table, "build_page_table", name)
        self._launch_both = nvtx.ranged(_core.build_group_tables, "build_group_tables", name)

    def build(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        *,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        check_ids: bool | None = None,
    ) -> torch.Tensor:
        """Rebuild the table for one batch, and the CSR form with it where that is wanted.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W] on the buffer's device, R <= max_rows, W = block_table_width; the row
            stride is free.
        seq_lens : torch.Tensor or None, default None
            int32 [R], tokens per row, as in `build_page_table`.
        kv_indptr, kv_indices : torch.Tensor or None, default None
            int32 [R + 1] and int32 [any], as `build_kv_indices` takes them (the latter as its
            `out`), both or none. They are written in the same launch.
        check_ids : bool or None, default None
            Raise for ids outside the pool. None follows ``REPAGE_DEBUG`` as it was when the
            buffer was made.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], the first R rows of `table`, contiguous. The buffer owns the memory
            (and the tensor: it is the same object in every build of R rows); it holds until the
            next build. The rows after them are 0.

        Raises
        ------
        DtypeError, DeviceError, ShapeError, ContiguityError, PageIdError, CudaUnavailableError
            As `build_page_table`.
        """
        # Every step of every attention group comes through here: one cheap test for what is
        # right, and the named checks only when it fails.
        shape = block_table.shape
        stride = block_table.stride()
        if not (
            block_table.dtype is torch.int32
            and len(shape) == 2
            and shape[1] == self.block_table_width
            and shape[0] <= self._max_rows
            and (stride[1] == 1 or shape[1] <= 1)
            and (block_table.is_cpu if self._on_cpu else block_table.device == self._device)
            and (
                seq_lens is None
                or (
                    seq_lens.dtype is torch.int32
                    and seq_lens.dim() == 1
                    and len(seq_lens) == shape[0]
                    and seq_lens.is_contiguous()
                    and (seq_lens.is_cpu if self._on_cpu else seq_lens.device == self._device)
                )
            )
        ):
            self._raise_for(block_table, seq_lens)
        rows = shape[0]
        lists = None
        if kv_indptr is not None or kv_indices is not None:
            lists = check_kv_lists(block_table, kv_indptr, kv_indices)
        if self._debug if check_ids is None else check_ids:
            live = live_blocks(self.plan, seq_lens, self.lookahead)
            raise_for_block_ids(block_table, self.plan, live)
            if lists is not None:
                raise_for_block_ids(block_table, self.plan, listed_blocks(self.plan, lists[0]))
        table_rows = self._max_rows
        if self._on_cpu:
            device, stream = self._ordinal, 0
            table_rows = max(rows, self._used_rows)
            self._used_rows = rows
        else:
            device, stream = launch_target(block_table)
        if lists is None:
            self._launch(
                self._page_map,
                block_table.data_ptr(),
                stride[0],
                0 if seq_lens is None else seq_lens.data_ptr(),
                self._table_address,
                self._watermarks_address,
                rows,
                table_rows,
                self.block_table_width,
                self.lookahead,
                self._row_parts,
                device,
                stream,
            )
        else:
            self._launch_both(
                self._page_map,
                block_table.data_ptr(),
                stride[0],
                0 if seq_lens is None else seq_lens.data_ptr(),
                self._table_address,
                self._watermarks_address,
                lists[0].data_ptr(),
                lists[1].data_ptr(),
                lists[1].shape[0],
                rows,
                table_rows,
                self.block_table_width,
                self.lookahead,
                self._row_parts,
                device,
                stream,
            )
        view = self._views.get(rows)
        if view is None:
            view = self._views[rows] = self.table[:rows]
        return view

    def _raise_for(self, block_table: torch.Tensor, seq_lens: torch.Tensor | None) -> None:
        check_tensor("block_table", block_table, torch.int32, 2, like=self.table)
        check_block_table(block_table, self.plan, seq_lens, self.lookahead)
        if block_table.shape[0] > self._max_rows or block_table.shape[1] != self.block_table_width:
            raise ShapeError(
                f"block_table: expected at most {self._max_rows} rows of exactly "
                f"{self.block_table_width} columns, got {tuple(block_table.shape)}"
            )
