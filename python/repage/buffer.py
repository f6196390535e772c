# SPDX-License-Identifier: Apache-2.0
"""The kernel page table that serving engines rebuild for every batch."""

from __future__ import annotations

import torch

from repage import _core
from repage._arguments import (
    check_block_table,
    check_lookahead,
    check_page_ids,
    check_tensor,
    check_width,
    checks_ids,
    launch_target,
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
    ) -> None:
        for name, value in (("max_rows", max_rows), ("block_table_width", block_table_width)):
            if value < 0:
                raise ShapeError(f"{name}: expected at least 0, got {value}")
        check_lookahead(lookahead)
        check_page_ids(plan)
        check_width(plan, block_table_width)
        self.plan = plan
        self.lookahead = lookahead
        self.block_table_width = block_table_width
        columns = block_table_width * plan.pages_per_block
        self.table = torch.zeros((max_rows, columns), dtype=torch.int32, device=device)
        self._watermarks = torch.zeros(
            (max_rows, _core.ROW_PARTS), dtype=torch.int32, device=device
        )
        self._max_rows = max_rows
        self._device = self.table.device
        self._page_map = plan.page_map
        self._table_address = self.table.data_ptr()
        self._watermarks_address = self._watermarks.data_ptr()
        self._debug = checks_ids(None)

    def build(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        *,
        check_ids: bool | None = None,
    ) -> torch.Tensor:
        """Rebuild the table for one batch.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W] on the buffer's device, R <= max_rows, W = block_table_width; the row
            stride is free.
        seq_lens : torch.Tensor or None, default None
            int32 [R], tokens per row, as in `build_page_table`.
        check_ids : bool or None, default None
            Raise for ids outside the pool. None follows ``REPAGE_DEBUG`` as it was when the
            buffer was made.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], the first R rows of `table`, contiguous. The buffer owns the memory;
            it holds until the next build. The rows after them are 0.

        Raises
        ------
        DtypeError, DeviceError, ShapeError, ContiguityError, PageIdError, CudaUnavailableError
            As `build_page_table`.
        """
        # Every step of every attention group comes through here: one cheap test for what is
        # right, and the named checks only when it fails.
        shape = block_table.shape
        if not (
            block_table.dtype is torch.int32
            and len(shape) == 2
            and shape[1] == self.block_table_width
            and shape[0] <= self._max_rows
            and (shape[1] == 1 or block_table.stride(1) == 1)
            and block_table.device == self._device
            and (
                seq_lens is None
                or (
                    seq_lens.dtype is torch.int32
                    and seq_lens.shape == shape[:1]
                    and seq_lens.is_contiguous()
                    and seq_lens.device == self._device
                )
            )
        ):
            self._raise_for(block_table, seq_lens)
        rows = shape[0]
        if self._debug if check_ids is None else check_ids:
            live = live_blocks(self.plan, seq_lens, self.lookahead)
            raise_for_block_ids(block_table, self.plan, live)
        device, stream = launch_target(block_table)
        _core.build_page_table(
            self._page_map,
            block_table.data_ptr(),
            block_table.stride(0),
            0 if seq_lens is None else seq_lens.data_ptr(),
            self._table_address,
            self._watermarks_address,
            rows,
            self._max_rows,
            shape[1],
            self.lookahead,
            device,
            stream,
        )
        return self.table[:rows]

    def _raise_for(self, block_table: torch.Tensor, seq_lens: torch.Tensor | None) -> None:
        check_tensor("block_table", block_table, torch.int32, 2, like=self.table)
        check_block_table(block_table, self.plan, seq_lens, self.lookahead)
        if block_table.shape[0] > self._max_rows or block_table.shape[1] != self.block_table_width:
            raise ShapeError(
                f"block_table: expected at most {self._max_rows} rows of exactly "
                f"{self.block_table_width} columns, got {tuple(block_table.shape)}"
            )
