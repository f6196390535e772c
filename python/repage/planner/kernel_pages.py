# SPDX-License-Identifier: Apache-2.0
"""The kernel page of each kind of layer under a planned layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repage import BlockGeometry, plan_pages
from repage.errors import GeometryError, NoValidPageError
from repage.planner.backends import BackendRules
from repage.planner.layout_plan import GroupPlan, KernelPage, LayerPlan, LayoutPlan
from repage.vllm import compat
from repage.vllm.layouts import is_token_major
from repage.vllm.policy import is_repageable


def kernel_pages(
    plan: LayoutPlan, specs: Mapping[str, Any], rules: Mapping[str, BackendRules]
) -> tuple[KernelPage, ...]:
    """Choose the kernel page of each kind of attention layer.

    Parameters
    ----------
    plan : LayoutPlan
        A planned layout.
    specs : mapping of str to vllm.v1.kv_cache_interface.KVCacheSpec
        Of the run that was planned.
    rules : mapping of str to BackendRules
        Of the attention layers; others are left out.

    Returns
    -------
    tuple of KernelPage
        One per kind, in the order of groups.
    """
    pages: dict[str, KernelPage] = {}
    for group in plan.groups:
        for layer in group.layers:
            if layer.name in rules and layer.kind not in pages:
                own = rules[layer.name]
                pages[layer.kind] = _page(plan, group, layer, specs[layer.name], own)
    return tuple(pages.values())


def _page(
    plan: LayoutPlan, group: GroupPlan, layer: LayerPlan, spec: Any, rules: BackendRules
) -> KernelPage:
    block = group.block_tokens
    whole = KernelPage(layer.kind, rules.name, block, block, 1)
    if rules.page_for(block) == block:
        return whole
    if not is_repageable(spec):
        return KernelPage(
            layer.kind, rules.name, block, None, problem="compressed: vLLM maps it itself"
        )
    if not plan.is_packed and layer.page_bytes != layer.used_bytes:
        return KernelPage(
            layer.kind, rules.name, block, None, problem="padded pages cannot be split"
        )
    try:
        chosen = plan_pages(_geometry(plan, group, layer, spec), rules.kernel_rules())
    except NoValidPageError as error:
        why = "; ".join(f"{size}: {reason}" for size, reason in error.failures)
        return KernelPage(
            layer.kind, rules.name, block, None, problem=why or f"no page divides {block} tokens"
        )
    except GeometryError as error:
        return KernelPage(layer.kind, rules.name, block, None, problem=str(error))
    return KernelPage(
        layer.kind,
        rules.name,
        block,
        chosen.page_tokens,
        chosen.pages_per_block,
        chosen.block_step,
        chosen.page_step,
    )


def _geometry(plan: LayoutPlan, group: GroupPlan, layer: LayerPlan, spec: Any) -> BlockGeometry:
    content, heads, block = spec.state_content_size_bytes, spec.num_heads, group.block_tokens
    stride = plan.bytes_per_block if plan.is_packed else layer.page_bytes
    offset = layer.offset if plan.is_packed else 0
    token_major = is_token_major(compat.layout_by_name(plan.layout))
    return BlockGeometry(
        num_blocks=2,
        block_tokens=block,
        num_heads=heads,
        content_bytes=content,
        element_size=1,
        block_stride=stride,
        head_stride=content if token_major else block * content,
        token_stride=heads * content if token_major else content,
        base_offset=offset,
        storage_bytes=2 * stride,
    )
