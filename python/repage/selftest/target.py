# SPDX-License-Identifier: Apache-2.0
"""Where checks run: a device, and the attention kernels that are installed for it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from repage.build_info import build_info
from repage.selftest.result import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class AttentionKernels:
    """The FlashInfer entry points that the checks call.

    Parameters
    ----------
    version : str
        Version of the package.
    decode_wrapper : callable
        ``flashinfer.BatchDecodeWithPagedKVCacheWrapper``.
    prefill_wrapper : callable
        ``flashinfer.BatchPrefillWithPagedKVCacheWrapper``.
    xqa_decode : callable
        ``flashinfer.decode.xqa_batch_decode_with_kv_cache``.
    missing_module_errors : tuple of exception types
        What the package raises when a kernel was not built beforehand and must not be built now.
    """

    version: str
    decode_wrapper: Callable[..., Any]
    prefill_wrapper: Callable[..., Any]
    xqa_decode: Callable[..., Any]
    missing_module_errors: tuple[type[Exception], ...] = ()


def load_attention_kernels() -> AttentionKernels:
    """Import FlashInfer.

    Returns
    -------
    AttentionKernels

    Raises
    ------
    NotAvailableError
        When it is not installed, cannot be imported, or lacks an entry point.
    """
    try:
        flashinfer = importlib.import_module("flashinfer")
        decode = importlib.import_module("flashinfer.decode")
        core = importlib.import_module("flashinfer.jit.core")
        return AttentionKernels(
            version=str(flashinfer.__version__),
            decode_wrapper=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            prefill_wrapper=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            xqa_decode=decode.xqa_batch_decode_with_kv_cache,
            missing_module_errors=(core.MissingJITCacheError,),
        )
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            raise NotAvailableError("flashinfer is not installed") from None
        raise NotAvailableError(f"flashinfer cannot be imported: {error}") from error
    except Exception as error:  # its import builds, probes and links
        raise NotAvailableError(
            f"flashinfer cannot be imported: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Target:
    """A device and what can be checked on it.

    Parameters
    ----------
    device : torch.device
        Where tensors live. Checks that need CUDA graphs or a driver ask for its type.
    capability : tuple of int
        Compute capability.
    attention : AttentionKernels or None
        Attention kernels; None when there are none.
    attention_reason : str, default ""
        Why there are none.
    driver : module or None, default None
        Stand-in for ``cuda.bindings.driver`` in the tensor-map checks; None imports it.
    quick : bool, default False
        Fewer sizes.
    """

    device: torch.device
    capability: tuple[int, int]
    attention: AttentionKernels | None
    attention_reason: str = ""
    driver: Any = None
    quick: bool = False

    @classmethod
    def of_device(cls, device: torch.device | None = None, *, quick: bool = False) -> Target:
        """Look at a CUDA device and at what is installed.

        Parameters
        ----------
        device : torch.device or None, default None
            None takes the current CUDA device.
        quick : bool, default False
            As in the class.

        Returns
        -------
        Target

        Raises
        ------
        NotAvailableError
            When there is no such CUDA device, or repage was built without CUDA kernels.
        """
        if device is not None and device.type != "cuda":
            raise NotAvailableError(f"needs a CUDA device, got {device}")
        if not torch.cuda.is_available():
            raise NotAvailableError("no CUDA device")
        if not build_info().cuda:
            raise NotAvailableError(
                "repage was built without CUDA kernels; reinstall it with nvcc on PATH"
            )
        device = device or torch.device("cuda", torch.cuda.current_device())
        if (device.index or 0) >= torch.cuda.device_count():
            raise NotAvailableError(f"no {device}, only {torch.cuda.device_count()} CUDA devices")
        attention, reason = None, ""
        try:
            attention = load_attention_kernels()
        except NotAvailableError as error:
            reason = str(error)
        return cls(device, torch.cuda.get_device_capability(device), attention, reason, quick=quick)

    def attention_kernels(self) -> AttentionKernels:
        """Return the attention kernels, or raise `NotAvailableError` with the reason."""
        if self.attention is None:
            raise NotAvailableError(self.attention_reason)
        return self.attention

    def require_cuda(self, what: str) -> None:
        """Raise `NotAvailableError` unless the device is a CUDA device."""
        if self.device.type != "cuda":
            raise NotAvailableError(f"{what} needs a CUDA device, got {self.device}")
