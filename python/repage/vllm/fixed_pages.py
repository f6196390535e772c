# SPDX-License-Identifier: Apache-2.0
"""Backends whose kernels take a few fixed pages and nothing else of interest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repage.vllm import compat
from repage.vllm.policy import BackendPolicy, PageContext

if TYPE_CHECKING:
    from repage import KernelPageRules
    from repage.vllm.kernel_rules import KernelPath


class FixedPagePolicy(BackendPolicy):
    """Re-pages where vLLM's own answer names fixed pages only, by the kernel that has them.

    Where the backend takes multiples (FlashAttention 2 and 3, and most of 4), it is left as it is.

    Parameters
    ----------
    name : str
        Of the backend.
    class_path : str
        vLLM's class.
    paths : KernelPath
        The kernels with fixed pages; no two share a page.
    token_major_layouts : bool, default False
        Whether the backend names layer-compact token-major layouts only, although its kernels
        follow the strides of any block: then BLNHC is added.
    """

    def __init__(
        self, name: str, class_path: str, *paths: KernelPath, token_major_layouts: bool = False
    ) -> None:
        self.name = name
        self.class_path = class_path
        self._paths = paths
        self._token_major_layouts = token_major_layouts

    def page_rules(self, context: PageContext) -> KernelPageRules | None:
        """Return the rules of the kernel whose pages vLLM names for a cache.

        Parameters
        ----------
        context : PageContext
            The cache asked about.

        Returns
        -------
        repage.KernelPageRules or None
            None where vLLM names multiples or pages of a kernel that is not known here, and for
            manager blocks that the kernel's table rows cannot be made of.
        """
        spec, path = context.spec, self._path(context)
        if path is None or (spec.block_size > 1 and spec.block_size % path.block_multiple):
            return None
        return path.for_cache(int(spec.head_size), int(spec.dtype.itemsize))

    def tensor_map(self, context: PageContext) -> str | None:
        """Return the tensor map of the kernel whose pages vLLM names for a cache.

        Parameters
        ----------
        context : PageContext
            The cache asked about.

        Returns
        -------
        str or None
        """
        path = self._path(context)
        return None if path is None else path.tensor_map

    def _path(self, context: PageContext) -> KernelPath | None:
        native = compat.backend_class(self.class_path).get_supported_kernel_block_sizes(
            context.spec
        )
        if not all(isinstance(size, int) for size in native):
            return None
        return next(
            (path for path in self._paths if set(native) <= set(path.rules.page_sizes)), None
        )

    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the backend's layouts, with BLNHC where its kernels read it as well.

        Parameters
        ----------
        native : tuple of str or None
            None means any.

        Returns
        -------
        tuple of str or None
        """
        # TurboQuant on ROCm stores K and V of a page apart, by the page's size
        # (``turboquant_attn.py:366-370``, 0.33.0).
        if native is None or not self._token_major_layouts or compat.is_rocm():
            return native
        return (*native, "BLNHC") if "BLNHC" not in native else native
