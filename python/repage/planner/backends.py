# SPDX-License-Identifier: Apache-2.0
"""What attention backends ask of pages and layouts, for planning without a device.

Sources: ``get_supported_kernel_block_sizes`` and ``supported_kv_cache_layouts`` of each backend in
``vllm/v1/attention/backends`` (0.32.0 and 0.33.0). In an engine the backends themselves answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from repage.errors import ArgumentError
from repage.plan import KernelPageRules

ARCHITECTURES = ("sm90", "sm100", "cpu")

_COMPACT = ("LBNHC", "LBHNC")
_PACKED = ("BLHNC", "BLNHC")


@dataclass(frozen=True)
class BackendRules:
    """Pages and layouts of one backend.

    Parameters
    ----------
    name : str
        Member of vLLM's ``AttentionBackendEnum``.
    page_sizes : tuple of int
        Exact kernel pages in tokens.
    multiple_of : int or None
        Or any multiple of so many.
    layer_compact, block_outermost : tuple of str
        Layouts that its kernels read, most preferred first.
    min_block : int
        Smallest kernel block; vLLM aligns hybrid blocks to it.
    """

    name: str
    page_sizes: tuple[int, ...] = ()
    multiple_of: int | None = None
    layer_compact: tuple[str, ...] = _COMPACT
    block_outermost: tuple[str, ...] = _PACKED

    @property
    def min_block(self) -> int:
        """Smallest kernel block in tokens; vLLM aligns the blocks of hybrid models to it."""
        return min(size for size in (*self.page_sizes, self.multiple_of) if size is not None)

    def kernel_rules(self) -> KernelPageRules:
        """Return what the kernels accept as pages."""
        return KernelPageRules(
            name=self.name, page_sizes=self.page_sizes, multiple_of=self.multiple_of
        )

    def page_for(self, block_tokens: int) -> int | None:
        """Return the largest page that divides a block, in tokens; None without one."""
        pages = self.kernel_rules().candidates(block_tokens)
        return next((page for page in pages if block_tokens % page == 0), None)

    def window_block(self, block_tokens: int, *, packed: bool) -> int:
        """Return the manager block that vLLM gives a sliding-window layer.

        Parameters
        ----------
        block_tokens : int
            Block of the primary layers.
        packed : bool
            Re-paged backends answer with whole blocks on a packed layout
            (`repage.vllm.factory.RepagedBackend.get_supported_kernel_block_sizes`).

        Returns
        -------
        int
            The largest kernel block within the primary one
            (``model_executor/layers/attention/attention.py``, `_largest_kernel_block_within`).
        """
        if packed or self.multiple_of is not None:
            base = self.multiple_of or self.min_block
            return max(base, block_tokens // base * base)
        fitting = [size for size in self.page_sizes if size <= block_tokens]
        return max(fitting, default=min(self.page_sizes))


_FIXED = {
    "TRITON_ATTN": BackendRules("TRITON_ATTN", multiple_of=16),
    "CPU_ATTN": BackendRules(
        "CPU_ATTN", multiple_of=32, layer_compact=("LBHNC",), block_outermost=("BLHNC",)
    ),
    "FLASHMLA": BackendRules("FLASHMLA", page_sizes=(64,)),
    "CUTLASS_MLA": BackendRules("CUTLASS_MLA", page_sizes=(128,)),
    "FLASHINFER_MLA": BackendRules("FLASHINFER_MLA", page_sizes=(32, 64)),
    "FLASH_ATTN_MLA": BackendRules("FLASH_ATTN_MLA", multiple_of=16),
    "TRITON_MLA": BackendRules("TRITON_MLA", multiple_of=16),
}
BACKENDS = ("FLASHINFER", "FLASH_ATTN", *_FIXED)


def backend_rules(
    name: str, architecture: str, *, head_dim: int = 128, fp8: bool = False
) -> BackendRules:
    """Return the rules of a backend for one kind of layer.

    Parameters
    ----------
    name : str
        Of `BACKENDS`.
    architecture : str
        Of `ARCHITECTURES`.
    head_dim : int, default 128
        FlashAttention 4 has kernels of their own for 256 (SM100) and 512 (SM90, FP8).
    fp8 : bool, default False
        Whether the cache is FP8.

    Returns
    -------
    BackendRules

    Raises
    ------
    ArgumentError
        For an unknown backend or architecture.
    """
    if architecture not in ARCHITECTURES:
        raise ArgumentError(
            f"architecture: expected {', '.join(ARCHITECTURES)}, got {architecture!r}"
        )
    if name in _FIXED:
        return _FIXED[name]
    if name == "FLASHINFER":
        # Pages of 128 and more need grouped queries on SM100; 64 suits every group.
        if architecture == "sm100":  # trtllm-gen reads head-major interiors only
            return BackendRules(name, (16, 32, 64), None, ("LBHNC",), ("BLHNC",))
        return BackendRules(name, page_sizes=(16, 32, 64))
    if name == "FLASH_ATTN":
        if architecture == "sm100" and head_dim == 256:
            return BackendRules(name, page_sizes=(128,))
        if architecture == "sm90" and head_dim == 512 and fp8:
            return BackendRules(name, page_sizes=(64,))
        return BackendRules(name, multiple_of=16)
    raise ArgumentError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")


def backend_for_layer(name: str, architecture: str, *, latent: bool) -> str:
    """Return the backend that serves a layer next to a chosen one.

    Parameters
    ----------
    name : str
        The chosen backend.
    architecture : str
        Of `ARCHITECTURES`.
    latent : bool
        Whether the layer keeps a latent vector (MLA).

    Returns
    -------
    str
        The chosen one where it can; otherwise vLLM's usual choice of the other family.
    """
    if latent == name.endswith("MLA"):
        return name
    if latent:
        return {"sm100": "FLASHINFER_MLA", "sm90": "FLASHMLA"}.get(architecture, "TRITON_MLA")
    return "CPU_ATTN" if architecture == "cpu" else "FLASHINFER"
