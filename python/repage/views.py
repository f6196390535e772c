# SPDX-License-Identifier: Apache-2.0
"""The pool as an attention kernel sees it: one strided tensor of virtual pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repage.errors import GeometryError
from repage.geometry import BlockGeometry

if TYPE_CHECKING:
    import torch

    from repage.plan import PagePlan


def virtual_view(kv_cache: torch.Tensor, plan: PagePlan) -> torch.Tensor:
    """View a layer's packed cache as kernel pages.

    Parameters
    ----------
    kv_cache : torch.Tensor
        vLLM's view of the layer, shape [B, H, N, C], any dtype and device. The memory stays the
        caller's.
    plan : PagePlan
        Pages planned on this cache's geometry.

    Returns
    -------
    torch.Tensor
        Shape [num_virtual_pages, H, P, C] on the same storage, never a copy. Page ids of
        `build_page_table` index its first dimension. Most ids in between belong to other layers
        of the block: read only what a page table names.

    Raises
    ------
    GeometryError
        When the plan was made for another geometry.

    Notes
    -----
    The stride of a size-1 head dimension is written out as a dense cache would have it. Torch
    leaves such strides arbitrary, but kernels encode them into tensor maps, which take multiples
    of 16 bytes only (CUDA 13.0, cuda.h, cuTensorMapEncodeTiled).

    Host-side only: safe before, during and after CUDA-graph capture. The view must be made again
    when the cache is bound to other memory.
    """
    geometry = BlockGeometry.from_tensor(kv_cache)
    if geometry != plan.geometry:
        raise GeometryError(
            "plan: made for another cache; make a new plan with plan_pages or PagePlan. "
            f"Planned {plan.geometry}, got {geometry}"
        )
    size = geometry.element_size
    token_stride = geometry.token_stride // size
    head_stride = geometry.head_stride // size
    if geometry.num_heads == 1 and geometry.interior == "HNC":
        head_stride = plan.page_tokens * token_stride
    content = kv_cache.shape[3]
    return kv_cache.as_strided(
        (plan.num_virtual_pages, geometry.num_heads, plan.page_tokens, content),
        (plan.page_stride // size, head_stride, token_stride, 1),
    )
