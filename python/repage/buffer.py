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
from repage.ops import build_kv_indices
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
        ordinal = self.table.get_device()
        row_parts = _core.row_parts(max_rows, columns, ordinal)
        self._watermarks = torch.zeros((max_rows, row_parts), dtype=torch.int32, device=device)
        # A view per number of rows: making one costs more than a small build.
        self._views: dict[int, torch.Tensor] = {}
        self._debug = checks_ids(None)
        builder = _core.TableBuilder(
            plan.page_map,
            self.table.data_ptr(),
            self._watermarks.data_ptr(),
            max_rows,
            block_table_width,
            lookahead,
            row_parts,
            ordinal,
            torch.Tensor,
        )
        self._build = nvtx.ranged(builder.build, "build_page_table", name)
        self._build_both = nvtx.ranged(builder.build, "build_group_tables", name)
        self._build_list = nvtx.ranged(builder.build_list, "build_kv_indices", name)
        self._launch = nvtx.ranged(builder.launch, "build_page_table", name)
        self._launch_both = nvtx.ranged(builder.launch, "build_group_tables", name)

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
        if self._debug if check_ids is None else check_ids:
            lists = self._check(block_table, seq_lens, kv_indptr, kv_indices)
            live = live_blocks(self.plan, seq_lens, self.lookahead)
            raise_for_block_ids(block_table, self.plan, live)
            if lists is not None:
                raise_for_block_ids(block_table, self.plan, listed_blocks(self.plan, lists[0]))
        # Every step of every attention group comes through here. The core reads and checks the
        # tensors by itself; the named checks are for what it does not take.
        if kv_indptr is None and kv_indices is None:
            rows = self._build(block_table, seq_lens)
        else:
            rows = self._build_both(block_table, seq_lens, kv_indptr, kv_indices)
        if rows < 0:
            rows = self._check_and_launch(block_table, seq_lens, kv_indptr, kv_indices)
        return self.first_rows(rows)

    def first_rows(self, rows: int) -> torch.Tensor:
        """Return the table of a batch as `build` would, without building it.

        Parameters
        ----------
        rows : int
            R.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], contiguous; the same object for as many rows every time.

        Raises
        ------
        ShapeError
            When the table has fewer rows.
        """
        view = self._views.get(rows)
        if view is None:
            if not 0 <= rows <= self.table.shape[0]:
                raise ShapeError(f"rows: expected 0 .. {self.table.shape[0]}, got {rows}")
            view = self._views[rows] = self.table[:rows]
        return view

    def build_kv_indices(
        self, block_table: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor
    ) -> torch.Tensor:
        """Build the CSR form of a batch alone: `repage.build_kv_indices` at the price of `build`.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [R, W], on the buffer's device.
        kv_indptr : torch.Tensor
            int32 [R' + 1], R' <= R, as in `repage.build_kv_indices`, for the leading rows.
        kv_indices : torch.Tensor
            int32 [any], which is written.

        Returns
        -------
        torch.Tensor
            `kv_indices`. The table is as it was.

        Raises
        ------
        DtypeError, DeviceError, ShapeError, ContiguityError, PageIdError, CudaUnavailableError
            As `repage.build_kv_indices`; ids are checked as in `build`.
        """
        if self._debug or self._build_list(block_table, kv_indptr, kv_indices) < 0:
            check_tensor("block_table", block_table, torch.int32, 2, like=self.table)
            check_tensor("kv_indptr", kv_indptr, torch.int32, 1, like=block_table)
            rows = max(kv_indptr.shape[0] - 1, 0)
            build_kv_indices(
                block_table[:rows], kv_indptr, self.plan, out=kv_indices, check_ids=self._debug
            )
        return kv_indices

    def _check(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Raise for the first argument that does not fit; return the lists, if there are any."""
        check_tensor("block_table", block_table, torch.int32, 2, like=self.table)
        check_block_table(block_table, self.plan, seq_lens, self.lookahead)
        max_rows = self.table.shape[0]
        if block_table.shape[0] > max_rows or block_table.shape[1] != self.block_table_width:
            raise ShapeError(
                f"block_table: expected at most {max_rows} rows of exactly "
                f"{self.block_table_width} columns, got {tuple(block_table.shape)}"
            )
        if kv_indptr is None and kv_indices is None:
            return None
        return check_kv_lists(block_table, kv_indptr, kv_indices)

    def _check_and_launch(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
    ) -> int:
        """Build from tensors that the core cannot read: subclasses, or of a torch before 2.10."""
        lists = self._check(block_table, seq_lens, kv_indptr, kv_indices)
        rows = block_table.shape[0]
        _, stream = launch_target(block_table)
        launch = self._launch if lists is None else self._launch_both
        launch(
            block_table.data_ptr(),
            block_table.stride(0),
            0 if seq_lens is None else seq_lens.data_ptr(),
            0 if lists is None else lists[0].data_ptr(),
            0 if lists is None else lists[1].data_ptr(),
            0 if lists is None else lists[1].shape[0],
            rows,
            stream,
        )
        return rows
