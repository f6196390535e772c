# SPDX-License-Identifier: Apache-2.0
"""The kernel pages of one bound cache, kept where they cannot outlive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import repage

if TYPE_CHECKING:
    import torch

    from repage.vllm.policy import PageChoice

_ATTRIBUTE = "_repage_pages"


@dataclass(frozen=True)
class KernelPages:
    """A layer's cache as kernel pages.

    Parameters
    ----------
    plan : repage.PagePlan
        On this cache's geometry. Holds no memory.
    view : torch.Tensor
        [num_virtual_pages, H, P, C] on the cache's storage, without H where the cache has none.
    """

    plan: repage.PagePlan
    view: torch.Tensor


def kernel_pages(kv_cache: torch.Tensor, choice: PageChoice) -> KernelPages:
    """Return a cache's kernel pages, planned and viewed on first use.

    Parameters
    ----------
    kv_cache : torch.Tensor
        vLLM's bound view of a layer, not empty; any dtype and device: [B, H, N, C], or [B, N, C]
        for MLA, whose layers drop the head dimension (``mla_attention.py:750``, 0.33.0).
    choice : PageChoice
        The page of the layer's builder.

    Returns
    -------
    KernelPages
        The same object for as long as the tensor object lives.

    Raises
    ------
    NoValidPageError, UnsupportedLayoutError, GeometryError
        When the cache cannot be read in such pages.

    Notes
    -----
    The result is an attribute of the tensor object itself: nothing else holds it, so the memory
    goes when vLLM drops the cache, and a cache bound in its place has pages of its own. The view
    is made from a detached alias, since a view of the tensor would hold it in turn (``_base``), a
    cycle through C++ that no garbage collector sees. Host-side only: safe during graph capture.
    """
    attached: dict[int, KernelPages] | None = getattr(kv_cache, _ATTRIBUTE, None)
    if attached is not None:
        pages = attached.get(choice.page_tokens)
        if pages is not None:
            return pages
    no_heads = kv_cache.dim() == 3
    cache = kv_cache.detach().unsqueeze(1) if no_heads else kv_cache.detach()
    plan = repage.plan_pages(repage.BlockGeometry.from_tensor(cache), choice.rules)
    view = repage.virtual_view(cache, plan)
    pages = KernelPages(plan, view.squeeze(1) if no_heads else view)
    if attached is None:
        attached = {}
        setattr(kv_cache, _ATTRIBUTE, attached)
    attached[choice.page_tokens] = pages
    return pages
