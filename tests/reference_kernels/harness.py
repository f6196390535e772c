# SPDX-License-Identifier: Apache-2.0
"""Puts the reference kernels under vLLM's real FlashInfer and FlashAttention backend modules.

Replaced are kernels, device queries and CUDA allocations, each as a global of one module; metadata
builders, impls and backend classes stay vLLM's own. The CPU platform only ever picks ``CPU_ATTN``
(``platforms/cpu.py``), so the chosen class is registered under that name.

With FlashAttention, one process pretends to be one device: the module decides on import. With
FlashInfer a later `install` may pretend to another.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference_kernels.cache_writer import register_cache_writer, reshape_and_cache_flash
from reference_kernels.capability import CapabilityProxy
from reference_kernels.context import KernelContext
from reference_kernels.signatures import flash_attention_interface
from reference_kernels.vllm_033 import load_backend_module

__all__ = [
    "FLASHINFER_ENVIRONMENT",
    "KERNEL_PATHS",
    "HarnessSettings",
    "KernelPath",
    "install",
]

_FLASHINFER_UTILS = "vllm.utils.flashinfer"
_FA_UTILS = "vllm.v1.attention.backends.fa_utils"
_WORKSPACE_BYTES = 1 << 20
_COUNTER_BYTES = 1 << 24
_MULTIPROCESSORS = 132

FLASHINFER_ENVIRONMENT = {
    # The artifact server is asked for cubins otherwise (utils/flashinfer.py).
    "VLLM_HAS_FLASHINFER_CUBIN": "1",
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": str(_WORKSPACE_BYTES),
}
"""What vLLM's FlashInfer module needs in the environment on a machine without a GPU."""


@dataclass(frozen=True)
class KernelPath:
    """A way through vLLM's backends: the module, and the device on which it takes that way.

    Attributes
    ----------
    backend : str
        ``"flashinfer"`` or ``"flash_attn"``.
    capability : tuple[int, int]
        Compute capability that makes vLLM choose these kernels.
    """

    backend: str
    capability: tuple[int, int]


KERNEL_PATHS: Mapping[str, KernelPath] = {
    "fi-native": KernelPath("flashinfer", (8, 0)),
    "xqa": KernelPath("flashinfer", (9, 0)),
    "trtllm-gen": KernelPath("flashinfer", (10, 0)),
    "fa2": KernelPath("flash_attn", (8, 0)),
    "fa3": KernelPath("flash_attn", (9, 0)),
    "fa4": KernelPath("flash_attn", (10, 0)),
}
"""``xqa`` and ``trtllm-gen`` decode with those kernels; on SM90 FlashInfer prefills natively.
``fa4`` uses the dedicated kernel where the head dim is 256."""


@dataclass(frozen=True)
class HarnessSettings:
    """What to install, as it travels to engine processes in their environment.

    Attributes
    ----------
    path : str
        A key of :data:`KERNEL_PATHS`; ``REPAGE_TEST_KERNELS``.
    factory : str | None
        ``module:attribute`` of a function from backend class to backend class;
        ``REPAGE_TEST_BACKEND_FACTORY``. ``None`` leaves the backend stock.
    vllm_033 : Path | None
        A directory with an unpacked vLLM 0.33.0, whose backend module replaces the installed one;
        ``REPAGE_TEST_VLLM_033``.
    float32 : bool
        Accept float32; ``REPAGE_TEST_FLOAT32=1``.
    page_tokens : int | None
        The page for the factories of `reference_kernels.paged_factory`; ``REPAGE_TEST_PAGE``.
    fault : str | None
        A fault of `reference_kernels.faults`; ``REPAGE_TEST_FAULT``.
    report : Path | None
        Where the process writes its counters when it ends; ``REPAGE_TEST_REPORT``.
    """

    path: str
    factory: str | None = None
    vllm_033: Path | None = None
    float32: bool = False
    page_tokens: int | None = None
    fault: str | None = None
    report: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> HarnessSettings:
        """Read the settings.

        Raises
        ------
        KeyError
            If ``REPAGE_TEST_KERNELS`` is not set or unknown.
        """
        path = environment["REPAGE_TEST_KERNELS"]
        KERNEL_PATHS[path]
        site_dir = environment.get("REPAGE_TEST_VLLM_033")
        page = environment.get("REPAGE_TEST_PAGE")
        report = environment.get("REPAGE_TEST_REPORT")
        return cls(
            path=path,
            factory=environment.get("REPAGE_TEST_BACKEND_FACTORY"),
            vllm_033=Path(site_dir) if site_dir else None,
            float32=environment.get("REPAGE_TEST_FLOAT32") == "1",
            page_tokens=int(page) if page else None,
            fault=environment.get("REPAGE_TEST_FAULT"),
            report=Path(report) if report else None,
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that make an engine process install these settings."""
        optional = {
            "REPAGE_TEST_BACKEND_FACTORY": self.factory,
            "REPAGE_TEST_VLLM_033": self.vllm_033,
            "REPAGE_TEST_FLOAT32": "1" if self.float32 else None,
            "REPAGE_TEST_PAGE": self.page_tokens,
            "REPAGE_TEST_FAULT": self.fault,
            "REPAGE_TEST_REPORT": self.report,
        }
        given = {name: str(value) for name, value in optional.items() if value is not None}
        return {"REPAGE_TEST_KERNELS": self.path, **given, **FLASHINFER_ENVIRONMENT}

    def context(self) -> KernelContext:
        """A fresh context for the pretended device."""
        return KernelContext(KERNEL_PATHS[self.path].capability, float32=self.float32)


def install(settings: HarnessSettings, context: KernelContext) -> type[Any]:
    """Replace kernels and device queries; returns the backend class to register.

    Parameters
    ----------
    settings : HarnessSettings
        The kernel path, and what to do with the real backend class.
    context : KernelContext
        Shared by every kernel and by the cache writer.
    """
    register_cache_writer(context)
    if KERNEL_PATHS[settings.path].backend == "flashinfer":
        real = _install_flashinfer(context, settings.vllm_033)
    else:
        real = _install_flash_attention(context, settings.vllm_033)
    return real if settings.factory is None else _load(settings.factory)(real)


def _load(name: str) -> Callable[[type[Any]], type[Any]]:
    module, _, attribute = name.partition(":")
    factory: Callable[[type[Any]], type[Any]] = getattr(importlib.import_module(module), attribute)
    return factory


def _patch(module: ModuleType, **replacements: object) -> None:
    """Replace globals that the module has; a name it does not have is a harness out of date."""
    for name, value in replacements.items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} to replace")
        setattr(module, name, value)


def _install_flashinfer(context: KernelContext, vllm_033: Path | None) -> type[Any]:
    from reference_kernels.flashinfer_native import fast_decode_plan, wrappers_for
    from reference_kernels.trtllm import TrtllmContext, TrtllmDecode
    from reference_kernels.xqa import XqaDecode

    for name, value in FLASHINFER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    utils = importlib.import_module(_FLASHINFER_UTILS)
    module = load_backend_module("flashinfer", vllm_033)
    proxy = CapabilityProxy.of_current_platform(context.capability)
    decode, prefill = wrappers_for(context)
    _patch(utils, current_platform=proxy)
    _patch(
        module,
        current_platform=proxy,
        BatchDecodeWithPagedKVCacheWrapper=decode,
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        fast_decode_plan=fast_decode_plan,
        trtllm_batch_decode_with_kv_cache=TrtllmDecode(context),
        trtllm_batch_context_with_kv_cache=TrtllmContext(context),
        flashinfer_xqa_batch_decode_with_kv_cache=XqaDecode(context),
        # Allocated on device="cuda" otherwise.
        trtllm_workspace_buffer=torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8),
    )
    if vllm_033 is not None:
        _patch(
            module,
            get_device_sm_count=lambda _device: _MULTIPROCESSORS,
            _fi_multi_ctas_kv_counter=torch.zeros(_COUNTER_BYTES, dtype=torch.uint8),
        )
    triton_utils = importlib.import_module("vllm.triton_utils")
    if not triton_utils.HAS_TRITON:
        _patch(module, _copy_page_indices_kernel=_CopyPageIndices())
    # Answers of an earlier device.
    for function in (
        utils.has_flashinfer_cubin,
        utils.has_nvidia_artifactory,
        utils.supports_trtllm_attention,
    ):
        function.cache_clear()
    backend: type[Any] = module.FlashInferBackend
    return backend


def _install_flash_attention(context: KernelContext, vllm_033: Path | None) -> type[Any]:
    from reference_kernels.flash_attention import FlashAttentionVarlen, SchedulerMetadata

    proxy = CapabilityProxy.of_current_platform(context.capability)
    interface = flash_attention_interface(vllm_033)
    major = context.capability[0]
    _patch(
        interface,
        _is_fa2_supported=lambda: (major >= 8, None),
        _is_fa3_supported=lambda: (major == 9, None),
        _is_fa4_supported=lambda: (major in (9, 10, 11), None),
    )
    fa_utils = importlib.import_module(_FA_UTILS)
    _patch(fa_utils, current_platform=proxy)
    module = load_backend_module("flash_attn", vllm_033)
    _patch(module, current_platform=proxy)
    # Imported under `if current_platform.is_cuda()`; absent on a CPU build.
    kernels = {
        "flash_attn_varlen_func": FlashAttentionVarlen(context, interface),
        "get_scheduler_metadata": SchedulerMetadata(context, interface),
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "flash_attn_supports_sinks": fa_utils.flash_attn_supports_sinks,
        "compile_flash_attn_varlen_func_from_specs": None,
    }
    for name, value in kernels.items():
        setattr(module, name, value)
    backend: type[Any] = module.FlashAttentionBackend
    return backend


class _CopyPageIndices:
    """``_copy_page_indices_kernel`` of vLLM's ``flashinfer.py``, where Triton is missing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            page_indices: Tensor,
            block_table: Tensor,
            block_table_stride: int,
            cu_num_blocks: Tensor,
            BLOCK_SIZE: int,  # noqa: N803
        ) -> None:
            assert BLOCK_SIZE > 0
            assert block_table.stride() == (block_table_stride, 1)
            assert page_indices.dtype == block_table.dtype == torch.int32
            starts = cu_num_blocks.tolist()
            for row in range(grid[0]):
                count = starts[row + 1] - starts[row]
                page_indices[starts[row] : starts[row + 1]] = block_table[row, :count]

        return launch
