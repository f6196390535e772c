# SPDX-License-Identifier: Apache-2.0
"""Checks of tensor arguments, and where to launch for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from repage import _core
from repage.errors import (
    ContiguityError,
    CudaUnavailableError,
    DeviceError,
    DtypeError,
    GeometryError,
    PageIdError,
    ShapeError,
)

if TYPE_CHECKING:
    from repage.plan import PagePlan

_INT32_MAX = 2**31 - 1
_CPU = -1  # the ordinal that the compiled core takes for CPU memory


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    dims: int,
    *,
    like: torch.Tensor | None = None,
    contiguous: bool = False,
    dense_last: bool = False,
) -> None:
    """Raise a typed error that names the argument when a tensor does not fit.

    Parameters
    ----------
    name : str
        The argument's name in the caller.
    tensor : torch.Tensor
        The argument.
    dtype : torch.dtype
        Required dtype.
    dims : int
        Required number of dimensions.
    like : torch.Tensor or None, default None
        A tensor on whose device it must be.
    contiguous : bool, default False
        Whether it must be contiguous.
    dense_last : bool, default False
        Whether its last dimension must be dense and its first one not broadcast backwards.

    Raises
    ------
    DtypeError, DeviceError, ShapeError, ContiguityError
    """
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise DtypeError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    if tensor.dim() != dims:
        raise ShapeError(
            f"{name}: expected {dims} dimension{'s' if dims > 1 else ''}, "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.layout != torch.strided:
        raise ContiguityError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name}: expected a CPU or CUDA tensor, got one on {tensor.device}")
    if like is not None and tensor.device != like.device:
        raise DeviceError(f"{name}: expected device {like.device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ContiguityError(
            f"{name}: expected a contiguous tensor, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; pass {name}.contiguous()"
        )
    if dense_last and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ContiguityError(
            f"{name}: expected dense columns (stride 1), got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; pass {name}.contiguous()"
        )


def launch_target(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the device ordinal and stream on which to work for a tensor.

    Parameters
    ----------
    tensor : torch.Tensor
        On CPU or CUDA.

    Returns
    -------
    tuple of int
        (-1, 0) for CPU memory; the CUDA device's ordinal and its current stream otherwise.

    Raises
    ------
    CudaUnavailableError
        For a CUDA tensor when the package was built without CUDA kernels.
    """
    if tensor.device.type == "cpu":
        return _CPU, 0
    if _core.CUDA_VERSION is None:
        raise CudaUnavailableError(
            "this build of repage has no CUDA kernels, but a CUDA tensor came in; reinstall it "
            "with nvcc on PATH (REPAGE_CUDA=ON makes a missing nvcc an error)"
        )
    index = tensor.get_device()
    return index, torch.cuda.current_stream(index).cuda_stream


def check_block_table(
    block_table: torch.Tensor, plan: PagePlan, seq_lens: torch.Tensor | None, lookahead: int
) -> tuple[int, int]:
    """Check a manager block table and its lengths; return its rows and columns."""
    check_tensor("block_table", block_table, torch.int32, 2, dense_last=True)
    rows, block_columns = block_table.shape
    check_page_ids(plan)
    check_width(plan, block_columns)
    check_lookahead(lookahead)
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, torch.int32, 1, like=block_table, contiguous=True)
        if seq_lens.shape[0] != rows:
            raise ShapeError(
                f"seq_lens: expected one length for each of the {rows} rows of block_table, "
                f"got {seq_lens.shape[0]}"
            )
    return rows, block_columns


def check_kv_lists(
    block_table: torch.Tensor, kv_indptr: torch.Tensor | None, kv_indices: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the two lists of the CSR form, which go together; return them."""
    if kv_indptr is None or kv_indices is None:
        missing, given = ("kv_indptr", "kv_indices")[:: 1 if kv_indptr is None else -1]
        raise DtypeError(f"{missing}: expected a torch.Tensor next to {given}, got None")
    for name, tensor in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices)):
        check_tensor(name, tensor, torch.int32, 1, like=block_table, contiguous=True)
    check_kv_indptr(kv_indptr, block_table.shape[0])
    return kv_indptr, kv_indices


def check_kv_indptr(kv_indptr: torch.Tensor, rows: int) -> None:
    """Check the number of row beginnings of the CSR form."""
    if kv_indptr.shape[0] != rows + 1:
        raise ShapeError(
            f"kv_indptr: expected {rows + 1} elements for {rows} rows of block_table, "
            f"got {kv_indptr.shape[0]}"
        )


def check_lookahead(lookahead: int) -> None:
    """Check a number of tokens past the sequence lengths."""
    if not 0 <= lookahead <= _INT32_MAX:
        raise ShapeError(f"lookahead: expected 0 .. 2**31 - 1 tokens, got {lookahead}")


def check_page_ids(plan: PagePlan) -> None:
    """Check that a plan's page ids fit int32 tables."""
    if plan.max_page_id > _INT32_MAX:
        raise GeometryError(
            f"plan: page tables hold int32 ids, but the largest page id is {plan.max_page_id}; "
            "plan with KernelPageRules.max_page_index at most 2**31 - 1"
        )


def check_width(plan: PagePlan, block_columns: int) -> None:
    """Check that a page table's columns can be counted in int32."""
    if block_columns * plan.pages_per_block > _INT32_MAX:
        raise ShapeError(
            f"block_table: {block_columns} columns of {plan.pages_per_block} pages are more than "
            "2**31 - 1 columns"
        )


def checks_ids(check_ids: bool | None) -> bool:
    """Whether ids are checked: as asked for, or as ``REPAGE_DEBUG`` says."""
    return os.environ.get("REPAGE_DEBUG") == "1" if check_ids is None else check_ids


def live_blocks(
    plan: PagePlan, seq_lens: torch.Tensor | None, lookahead: int
) -> torch.Tensor | None:
    """Return the live blocks of each row, None for all."""
    if seq_lens is None:
        return None
    size = plan.geometry.block_tokens
    tokens = torch.where(seq_lens > 0, seq_lens.long() + lookahead, 0)
    return torch.div(tokens + size - 1, size, rounding_mode="floor")


def listed_blocks(plan: PagePlan, kv_indptr: torch.Tensor) -> torch.Tensor:
    """Return the blocks of each row that the CSR form lists pages of."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    size = plan.pages_per_block
    return torch.div(pages + size - 1, size, rounding_mode="floor")


def raise_for_block_ids(
    block_table: torch.Tensor, plan: PagePlan, live_blocks: torch.Tensor | None
) -> None:
    """Raise `PageIdError` for an id outside the pool in a live column; reads back to the host."""
    num_blocks = plan.geometry.num_blocks
    outside = (block_table < 0) | (block_table >= num_blocks)
    if live_blocks is not None:
        columns = torch.arange(block_table.shape[1], device=block_table.device)
        outside &= columns < live_blocks.unsqueeze(1)
    wrong = torch.nonzero(outside)
    if wrong.numel():
        row, column = wrong[0].tolist()
        raise PageIdError(
            f"block_table: expected ids from 0 to {num_blocks - 1}, got "
            f"{int(block_table[row, column])} at [{row}, {column}]; {wrong.shape[0]} such ids. "
            "The table belongs to another pool, or holds stale columns"
        )
