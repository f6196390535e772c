# SPDX-License-Identifier: Apache-2.0
"""Reading MLA caches as kernel pages.

MLA impls have no ``forward``: decode reads the cache in ``forward_mqa``, prefill gathers its
context from it in ``forward_mha``, both with the metadata's tables. Writes go token by token
through manager slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repage.vllm.impl import RepagedImpl
from repage.vllm.pages import kernel_pages

if TYPE_CHECKING:
    import torch

    from repage.vllm.policy import PageChoice

    class _Parent:
        """The impl class of vLLM that follows the mixin in the bases (factory.py)."""

        def forward_mqa(self, *args: Any, **kwargs: Any) -> Any: ...

        def forward_mha(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Parent = object


class RepagedMLAImpl(RepagedImpl, _Parent):
    """Mixin before an ``MLAAttentionImpl``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._view_layouts: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def forward_mqa(
        self,
        q: Any,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the parent's decode on kernel pages.

        Parameters
        ----------
        q, attn_metadata, layer, *args, **kwargs
            As in the parent.
        kv_c_and_k_pe_cache : torch.Tensor
            [B, N, C] in manager blocks.

        Returns
        -------
        Any
            The parent's result.

        Raises
        ------
        RepagingRefusedError
            When no builder has said how a packed cache is to be read.
        """
        pages = self.kernel_view(kv_c_and_k_pe_cache, attn_metadata)
        return super().forward_mqa(q, pages, attn_metadata, layer, *args, **kwargs)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the parent's prefill, which gathers earlier context from kernel pages.

        Parameters
        ----------
        q, kv_c_normed, k_pe, attn_metadata, *args, **kwargs
            As in the parent.
        kv_c_and_k_pe_cache : torch.Tensor
            [B, N, C] in manager blocks.

        Returns
        -------
        Any
            The parent's result.

        Raises
        ------
        RepagingRefusedError
            When no builder has said how a packed cache is to be read.
        """
        pages = self.kernel_view(kv_c_and_k_pe_cache, attn_metadata)
        return super().forward_mha(q, kv_c_normed, k_pe, pages, attn_metadata, *args, **kwargs)

    def view_pages(self, kv_cache: torch.Tensor, choice: PageChoice) -> torch.Tensor:
        """Return a cache in the pages of a choice, for a tensor object seen once."""
        # For fp8 vLLM passes a new alias of the cache on every call (``mla_attention.py:979``,
        # 0.33.0), so the shape of the view is kept, not the view.
        key = (kv_cache.shape, kv_cache.stride(), kv_cache.dtype, choice.page_tokens)
        layout = self._view_layouts.get(key)
        if layout is None:
            view = kernel_pages(kv_cache, choice).view
            layout = self._view_layouts[key] = (tuple(view.shape), view.stride())
        return kv_cache.as_strided(*layout)
