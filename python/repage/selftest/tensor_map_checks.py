# SPDX-License-Identifier: Apache-2.0
"""Whether the driver takes the tensor maps of TMA kernels for virtual views."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from repage.geometry import BlockGeometry
from repage.plan import PagePlan
from repage.selftest.result import Check, CheckFailedError, Finding, NotAvailableError
from repage.tensor_map import TENSOR_MAP_RULES, TensorMapRule, probe_tensor_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from repage.geometry import Interior
    from repage.selftest.target import Target

_BLOCK_TOKENS = 640
_BLOCKS = 4096
# Qwen3.6-35B with its drafter; and a block stride that no page divides.
_SLACKS = (1_310_720, 32_768)
_BASE = 1 << 40


def tensor_map_checks() -> list[Check]:
    """Return a check for every kernel that reads pages with TMA, and interior."""
    interiors: tuple[Interior, ...] = ("NHC", "HNC")
    return [
        Check(
            f"tensor_map.{rule.name}.{interior}",
            functools.partial(_check_maps, rule=rule, interior=interior),
        )
        for rule in TENSOR_MAP_RULES.values()
        for interior in interiors
    ]


def probed_plans(interior: Interior) -> Iterator[tuple[PagePlan, int, torch.dtype]]:
    """Yield plans with their head dim and element type, overlapping pages among them."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for heads in (1, 2, 8):
            for head_dim in (128, 256):
                content = 2 * head_dim * dtype.itemsize
                layer = _BLOCK_TOKENS * heads * content
                for slack in _SLACKS:
                    geometry = BlockGeometry.dense(
                        interior,
                        num_blocks=_BLOCKS,
                        block_tokens=_BLOCK_TOKENS,
                        num_heads=heads,
                        content_bytes=content,
                        block_stride=10 * layer + slack,
                        element_size=dtype.itemsize,
                        base_offset=layer,
                    )
                    for page_tokens in (16, 32, 64, 128):
                        yield PagePlan(geometry, page_tokens), head_dim, dtype


def _check_maps(target: Target, *, rule: TensorMapRule, interior: Interior) -> Finding:
    accepted = overlapping = 0
    refusals = []
    for plan, head_dim, dtype in probed_plans(interior):
        probe = probe_tensor_map(
            plan,
            rule,
            head_dim=head_dim,
            dtype=dtype,
            base_address=_BASE + plan.geometry.base_offset,
            capability=target.capability,
            driver=target.driver,
        )
        if probe.status == "not available":
            raise NotAvailableError(probe.reason)
        if probe.refused:
            refusals.append(probe.reason)
        else:
            accepted += 1
            overlapping += plan.page_step > 1
    if refusals:
        raise CheckFailedError(
            f"{len(refusals)} of {len(refusals) + accepted} refused, the first: {refusals[0]}"
        )
    return Finding(
        f"the driver takes all {accepted}, {overlapping} of them with overlapping pages",
        {"accepted": accepted, "overlapping": overlapping},
    )
