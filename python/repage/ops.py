# SPDX-License-Identifier: Apache-2.0
"""Kernel page tables from manager block tables, on CPU and CUDA.

Every operation is one launch on the current stream of its tensors' device (none when there is
nothing to do), allocates nothing when `out` is given, and never waits for the device: CUDA graphs
can capture it. CPU and CUDA give bit-identical results.

Ids outside the pool map to the pages of block 0, vLLM's null block, so that a kernel never follows
a wild pointer. That hides mistakes: with ``REPAGE_DEBUG=1``, or ``check_ids=True``, they raise
instead. The check reads values back to the host, so it cannot be used during graph capture.
"""

from __future__ import annotations

import torch

from repage import _core, nvtx
from repage._arguments import (
    check_block_table,
    check_kv_indptr,
    check_kv_lists,
    check_tensor,
    checks_ids,
    launch_target,
    listed_blocks,
    live_blocks,
    raise_for_block_ids,
)
from repage.errors import GeometryError, PageIdError, ShapeError
from repage.plan import PagePlan

_INT32_MAX = 2**31 - 1


def build_page_table(
    block_table: torch.Tensor,
    plan: PagePlan,
    *,
    seq_lens: torch.Tensor | None = None,
    lookahead: int = 0,
    out: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    check_ids: bool | None = None,
) -> torch.Tensor:
    """Expand a manager block table into a 2-D kernel page table.

    Parameters
    ----------
    block_table : torch.Tensor
        int32 [R, W], manager block ids; the row stride is free, columns are dense.
    plan : PagePlan
        Pages of the layers that the table serves.
    seq_lens : torch.Tensor or None, default None
        int32 [R] on the same device, tokens per row; zero or less marks a padding row. None takes
        every column as live.
    lookahead : int, default 0
        Tokens past `seq_lens` whose blocks are live too.
    out : torch.Tensor or None, default None
        int32 [R', W * r], R' >= R, contiguous, on the same device; allocated when None. Every
        element is written.
    kv_indptr, kv_indices : torch.Tensor or None, default None
        int32 [R + 1] and int32 [any], as `build_kv_indices` takes them (the latter as its `out`),
        both or none. That form is then written too, in the same launch.
    check_ids : bool or None, default None
        Raise for ids outside the pool. None follows ``REPAGE_DEBUG``.

    Returns
    -------
    torch.Tensor
        `out`. Row i holds ``page(block_table[i, k // r], k % r)`` in the columns of its live
        blocks, ``ceil((seq_lens[i] + lookahead) / N)`` of them, and 0 in the others. Rows from R
        on hold 0. Every entry is a valid id.

    Raises
    ------
    DtypeError, DeviceError, ShapeError, ContiguityError
        When a tensor does not fit the description above.
    GeometryError
        When page ids of the plan do not fit int32.
    PageIdError
        When ids are checked and one is outside the pool.
    CudaUnavailableError
        For CUDA tensors in a build without CUDA kernels.
    """
    rows, block_columns = check_block_table(block_table, plan, seq_lens, lookahead)
    columns = block_columns * plan.pages_per_block
    if out is None:
        out = torch.empty((rows, columns), dtype=torch.int32, device=block_table.device)
    else:
        check_tensor("out", out, torch.int32, 2, like=block_table, contiguous=True)
        if out.shape[0] < rows or out.shape[1] != columns:
            raise ShapeError(
                f"out: expected at least {rows} rows of exactly {columns} columns "
                f"({block_columns} blocks of {plan.pages_per_block} pages), "
                f"got {tuple(out.shape)}"
            )
    checks = checks_ids(check_ids)
    if checks:
        raise_for_block_ids(block_table, plan, live_blocks(plan, seq_lens, lookahead))
    device, stream = launch_target(block_table)
    table = (
        plan.page_map,
        block_table.data_ptr(),
        block_table.stride(0),
        0 if seq_lens is None else seq_lens.data_ptr(),
        out.data_ptr(),
        0,
    )
    row_parts = _core.row_parts(out.shape[0], columns, device)
    sizes = (rows, out.shape[0], block_columns, lookahead, row_parts, device, stream)
    if kv_indptr is None and kv_indices is None:
        _core.build_page_table(*table, *sizes)
    else:
        kv_indptr, kv_indices = check_kv_lists(block_table, kv_indptr, kv_indices)
        if checks:
            raise_for_block_ids(block_table, plan, listed_blocks(plan, kv_indptr))
        lists = (kv_indptr.data_ptr(), kv_indices.data_ptr(), kv_indices.shape[0])
        _core.build_group_tables(*table, *lists, *sizes)
    return out


def build_kv_indices(
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    plan: PagePlan,
    *,
    out: torch.Tensor | None = None,
    check_ids: bool | None = None,
) -> torch.Tensor:
    """Build FlashInfer's ``paged_kv_indices`` straight from a manager block table.

    Parameters
    ----------
    block_table : torch.Tensor
        int32 [R, W], manager block ids; the row stride is free, columns are dense.
    kv_indptr : torch.Tensor
        int32 [R + 1] on the same device, contiguous, non-decreasing: where each row's pages begin
        in the output. It need not begin at 0.
    plan : PagePlan
        Pages of the layers that the table serves.
    out : torch.Tensor or None, default None
        int32, one-dimensional, contiguous, on the same device. None allocates
        ``kv_indptr[-1]`` elements, which waits for the device; pass it on hot paths.
    check_ids : bool or None, default None
        Raise for ids outside the pool. None follows ``REPAGE_DEBUG``.

    Returns
    -------
    torch.Tensor
        `out`, with ``out[kv_indptr[i] + k] = page(block_table[i, k // r], k % r)``. A row longer
        than the table ends with page 0; what would lie past the output is dropped. Elements that
        belong to no row are left as they are.

    Raises
    ------
    DtypeError, DeviceError, ShapeError, ContiguityError
        When a tensor does not fit the description above.
    GeometryError
        When page ids of the plan do not fit int32.
    PageIdError
        When ids are checked and one is outside the pool.
    CudaUnavailableError
        For CUDA tensors in a build without CUDA kernels.
    """
    rows, block_columns = check_block_table(block_table, plan, None, 0)
    check_tensor("kv_indptr", kv_indptr, torch.int32, 1, like=block_table, contiguous=True)
    check_kv_indptr(kv_indptr, rows)
    if out is None:
        size = max(int(kv_indptr[-1]), 0) if rows else 0
        out = torch.zeros(size, dtype=torch.int32, device=block_table.device)
    else:
        check_tensor("out", out, torch.int32, 1, like=block_table, contiguous=True)
    if checks_ids(check_ids):
        raise_for_block_ids(block_table, plan, listed_blocks(plan, kv_indptr))
    device, stream = launch_target(block_table)
    _core.build_kv_indices(
        plan.page_map,
        block_table.data_ptr(),
        block_table.stride(0),
        kv_indptr.data_ptr(),
        out.data_ptr(),
        out.shape[0],
        rows,
        block_columns,
        _core.row_parts(rows, block_columns * plan.pages_per_block, device),
        device,
        stream,
    )
    return out


def map_slots(
    slot_mapping: torch.Tensor,
    plan: PagePlan,
    *,
    out: torch.Tensor | None = None,
    check_ids: bool | None = None,
) -> torch.Tensor:
    """Turn manager slots into slots of the virtual view.

    Only for writers that must use kernel pages, because the format inside a page depends on its
    size. A writer that goes token by token keeps the manager's view and slots.

    Parameters
    ----------
    slot_mapping : torch.Tensor
        int64 [T], contiguous: ``block * N + token``, negative for padding.
    plan : PagePlan
        Pages of the layer that is written.
    out : torch.Tensor or None, default None
        int64 [T], contiguous, on the same device; may be `slot_mapping`. Allocated when None.
    check_ids : bool or None, default None
        Raise for slots past the pool. None follows ``REPAGE_DEBUG``.

    Returns
    -------
    torch.Tensor
        `out`: ``page * P + offset``. Padding stays as it is; a slot past the pool becomes -1,
        which writers skip.

    Raises
    ------
    DtypeError, DeviceError, ShapeError, ContiguityError
        When a tensor does not fit the description above.
    PageIdError
        When slots are checked and one is past the pool.
    CudaUnavailableError
        For CUDA tensors in a build without CUDA kernels.
    """
    check_tensor("slot_mapping", slot_mapping, torch.int64, 1, contiguous=True)
    if out is None:
        out = torch.empty_like(slot_mapping)
    else:
        check_tensor("out", out, torch.int64, 1, like=slot_mapping, contiguous=True)
        if out.shape != slot_mapping.shape:
            raise ShapeError(f"out: expected {slot_mapping.shape[0]} elements, got {out.shape[0]}")
    if checks_ids(check_ids):
        slots = plan.geometry.num_blocks * plan.geometry.block_tokens
        wrong = torch.nonzero(slot_mapping >= slots)
        if wrong.numel():
            position = int(wrong[0])
            raise PageIdError(
                f"slot_mapping: expected slots below {slots} ({plan.geometry.num_blocks} blocks "
                f"of {plan.geometry.block_tokens} tokens), got {int(slot_mapping[position])} at "
                f"[{position}]"
            )
    device, stream = launch_target(slot_mapping)
    _core.map_slots(
        plan.page_map,
        slot_mapping.data_ptr(),
        out.data_ptr(),
        slot_mapping.shape[0],
        device,
        stream,
    )
    return out


def last_page_len(
    seq_lens: torch.Tensor, page_tokens: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the tokens in each sequence's last page (FlashInfer's ``paged_kv_last_page_len``).

    Parameters
    ----------
    seq_lens : torch.Tensor
        int32 [R], contiguous, tokens.
    page_tokens : int
        Tokens in a kernel page (P).
    out : torch.Tensor or None, default None
        int32 [R], contiguous, on the same device; may be `seq_lens`. Allocated when None.

    Returns
    -------
    torch.Tensor
        `out`: ``(seq_lens - 1) % P + 1``, and 0 for empty sequences.

    Raises
    ------
    DtypeError, DeviceError, ShapeError, ContiguityError
        When a tensor does not fit the description above.
    GeometryError
        When `page_tokens` is not in 1 .. 2**31 - 1.
    CudaUnavailableError
        For CUDA tensors in a build without CUDA kernels.
    """
    check_tensor("seq_lens", seq_lens, torch.int32, 1, contiguous=True)
    if not isinstance(page_tokens, int) or not 1 <= page_tokens <= _INT32_MAX:
        raise GeometryError(f"page_tokens: expected 1 .. 2**31 - 1, got {page_tokens!r}")
    if out is None:
        out = torch.empty_like(seq_lens)
    else:
        check_tensor("out", out, torch.int32, 1, like=seq_lens, contiguous=True)
        if out.shape != seq_lens.shape:
            raise ShapeError(f"out: expected {seq_lens.shape[0]} elements, got {out.shape[0]}")
    device, stream = launch_target(seq_lens)
    _core.last_page_len(
        page_tokens, seq_lens.data_ptr(), out.data_ptr(), seq_lens.shape[0], device, stream
    )
    return out


# With REPAGE_NVTX=1 each operation is a range of a profiler; otherwise these are the functions.
build_page_table = nvtx.ranged(build_page_table, "build_page_table")
build_kv_indices = nvtx.ranged(build_kv_indices, "build_kv_indices")
map_slots = nvtx.ranged(map_slots, "map_slots")
last_page_len = nvtx.ranged(last_page_len, "last_page_len")
