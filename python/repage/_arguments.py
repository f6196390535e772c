# SPDX-License-Identifier: Apache-2.0
"""Checks of tensor arguments, and where to launch for them."""

from __future__ import annotations

import torch

from repage import _core
from repage.errors import (
    ContiguityError,
    CudaUnavailableError,
    DeviceError,
    DtypeError,
    ShapeError,
)

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
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name}: expected a CPU or CUDA tensor, got one on {tensor.device}")
    if like is not None and tensor.device != like.device:
        raise DeviceError(f"{name}: expected device {like.device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ContiguityError(
            f"{name}: expected a contiguous tensor, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; pass {name}.contiguous()"
        )
    if dense_last and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
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
