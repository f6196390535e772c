# SPDX-License-Identifier: Apache-2.0
"""Asking the CUDA driver about a page before anything is committed to it.

TMA kernels encode the strides of a virtual view into a tensor map. A head-major view of several
heads has a page stride below its head stride, which no layout of vLLM has; the driver is asked
with the real shape and strides, host-side and in microseconds, while a refusal still costs
nothing but the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repage import BlockGeometry, PagePlan
from repage.tensor_map import TENSOR_MAP_RULES, probe_tensor_map
from repage.vllm.layouts import is_token_major
from repage.vllm.policy import page_unit_bytes

if TYPE_CHECKING:
    from repage.vllm.policy import BackendPolicy, PageChoice, PageContext

# Encoding a map looks at numbers only. Blocks of one layer stand for the pool: the planner keeps
# the real block stride a multiple of the page unit, so the virtual view has the same strides.
_BASE_ADDRESS = 1 << 40
_BLOCKS = 2


def driver_refusal(policy: BackendPolicy, context: PageContext, choice: PageChoice) -> str | None:
    """Return why the driver takes a page away, if it does.

    Parameters
    ----------
    policy : BackendPolicy
        Names the kernel's tensor map, if it has one.
    context : PageContext
        The cache.
    choice : PageChoice
        The page asked about.

    Returns
    -------
    str or None
        None where the driver accepts the maps, where the kernel has none, and where there is no
        driver to ask.
    """
    name = policy.tensor_map(context)
    if name is None:
        return None
    probe = probe_tensor_map(
        PagePlan(_one_layer(context, choice), choice.page_tokens),
        TENSOR_MAP_RULES[name],
        head_dim=int(context.spec.head_size),
        dtype=context.spec.dtype,
        base_address=_BASE_ADDRESS,
    )
    if not probe.refused:
        return None
    return (
        f"{policy.name}: the CUDA driver refuses the tensor map of {name} for "
        f"{choice.page_tokens}-token pages of {choice.block_tokens}-token {context.layout.name} "
        f"blocks ({probe.reason})"
    )


def _one_layer(context: PageContext, choice: PageChoice) -> BlockGeometry:
    spec: Any = context.spec
    content = int(spec.state_content_size_bytes)
    block_bytes = page_unit_bytes(spec, context.layout, choice.block_tokens) * (
        1 if is_token_major(context.layout) else int(spec.num_heads)
    )
    return BlockGeometry.dense(
        "NHC" if is_token_major(context.layout) else "HNC",
        num_blocks=_BLOCKS,
        block_tokens=choice.block_tokens,
        num_heads=int(spec.num_heads),
        content_bytes=content,
        block_stride=block_bytes,
        element_size=int(spec.dtype.itemsize),
    )
