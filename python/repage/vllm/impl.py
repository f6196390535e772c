# SPDX-License-Identifier: Apache-2.0
"""Attention impls that read, and where they must write, through kernel pages."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import repage
from repage.errors import RepagingRefusedError
from repage.vllm.pages import kernel_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from repage.vllm.policy import PageChoice

CHOICE_ATTRIBUTE = "repage_choice"


class _Undecided(Enum):
    UNDECIDED = "no builder has decided for this layer yet"


UNDECIDED: Final = _Undecided.UNDECIDED

if TYPE_CHECKING:

    class _Parent:
        """The impl class of vLLM that follows the mixins in the bases (factory.py)."""

        def forward(self, *args: Any, **kwargs: Any) -> Any: ...

        def do_kv_cache_update(self, *args: Any) -> Any: ...
else:
    _Parent = object


class RepagedImpl(_Parent):
    """Mixin before an ``AttentionImpl``: ``forward`` reads the cache as kernel pages.

    Attributes
    ----------
    repage_choice : PageChoice or None
        Pushed by the layer's builder; None where it reads manager blocks. It serves the writes,
        which come without metadata, and metadata that lost its attributes on the way: vLLM's fast
        prefill copies dataclass fields only (``v1/attention/backends/utils.py:1036-1053``,
        0.32.0).
    """

    repage_choice: PageChoice | _Undecided | None = UNDECIDED

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the parent's ``forward`` on the kernel pages that the metadata's table names.

        Parameters
        ----------
        layer, query, key, value, attn_metadata, *args, **kwargs
            As in the parent.
        kv_cache : torch.Tensor
            [B, H, N, C], vLLM's bound view in manager blocks.

        Returns
        -------
        Any
            The parent's result.

        Raises
        ------
        RepagingRefusedError
            When no builder has said how a packed cache is to be read.
        """
        if attn_metadata is not None:
            kv_cache = self.kernel_view(kv_cache, attn_metadata)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def kernel_view(self, kv_cache: torch.Tensor, attn_metadata: Any) -> torch.Tensor:
        """Return a cache as the kernel pages that the metadata's table names.

        Parameters
        ----------
        kv_cache : torch.Tensor
            vLLM's view in manager blocks.
        attn_metadata : Any
            Of the batch.

        Returns
        -------
        torch.Tensor
            The cache itself where it is read in manager blocks, or is empty.

        Raises
        ------
        RepagingRefusedError
            When no builder has said how a packed cache is to be read.
        """
        choice = getattr(attn_metadata, CHOICE_ATTRIBUTE, None) or self.repage_choice
        if choice is None or not kv_cache.numel():
            return kv_cache
        if choice is UNDECIDED:
            refuse_undecided(self, kv_cache)
            return kv_cache
        return self.view_pages(kv_cache, choice)

    def view_pages(self, kv_cache: torch.Tensor, choice: PageChoice) -> torch.Tensor:
        """Return a cache in the pages of a choice; families may override it."""
        return kernel_pages(kv_cache, choice).view


class RepagedWritingImpl(RepagedImpl):
    """Mixin as `RepagedImpl`, for formats whose bytes in a page depend on the page size."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> Any:
        """Run the parent's write on kernel pages, with slots in terms of them.

        Parameters
        ----------
        layer, key, value
            As in the parent.
        kv_cache : torch.Tensor
            [B, H, N, C], vLLM's bound view in manager blocks.
        slot_mapping : torch.Tensor
            int64 [T], manager slots; negative for padding.

        Returns
        -------
        Any
            The parent's result.

        Raises
        ------
        RepagingRefusedError
            As `forward`.
        """
        choice = self.repage_choice
        if choice is not None and kv_cache.numel():
            if choice is UNDECIDED:
                refuse_undecided(self, kv_cache)
            else:
                pages = kernel_pages(kv_cache, choice)
                kv_cache, slot_mapping = pages.view, repage.map_slots(slot_mapping, pages.plan)
        return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


def push_choice(
    layers: Mapping[str, Any], layer_names: Iterable[str], choice: PageChoice | None
) -> None:
    """Tell the impls of a builder's layers how their caches are to be read.

    Parameters
    ----------
    layers : mapping of str to layer
        vLLM's ``static_forward_context``.
    layer_names : iterable of str
        The builder's layers; those that `layers` does not have are passed over.
    choice : PageChoice or None
        None for manager blocks.

    Raises
    ------
    RepagingRefusedError
        When a layer's impl is not re-paged but its builder is: it would take page ids for blocks.
    """
    for name in layer_names:
        impl = getattr(layers.get(name), "impl", None)
        if impl is None:
            continue
        variants = [item for item in impl.get_impl_variants() if isinstance(item, RepagedImpl)]
        if choice is not None and not variants:
            raise RepagingRefusedError(
                f"{name}: its attention impl {type(impl).__name__} reads manager blocks, but its "
                "metadata builder is re-paged. Set REPAGE_DISABLE=1, or a layer-compact "
                "VLLM_KV_CACHE_LAYOUT"
            )
        for variant in variants:
            variant.repage_choice = choice


def refuse_undecided(impl: RepagedImpl, kv_cache: torch.Tensor) -> None:
    """Raise for a packed cache whose pages no builder has decided on.

    Parameters
    ----------
    impl : RepagedImpl
        Named in the error.
    kv_cache : torch.Tensor
        vLLM's bound view, blocks first.

    Raises
    ------
    RepagingRefusedError
        When its blocks do not follow each other densely.
    """
    if kv_cache.stride(0) > kv_cache[0].numel():
        raise RepagingRefusedError(
            f"{type(impl).__name__}: got a packed cache of shape {tuple(kv_cache.shape)} with "
            f"block stride {kv_cache.stride(0)}, but no re-paged metadata builder has decided "
            "on its pages. Build metadata with the builder of the same backend, or set "
            "REPAGE_DISABLE=1"
        )
