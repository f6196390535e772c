# SPDX-License-Identifier: Apache-2.0
"""What a KV-cache layout costs: vLLM's own planner, run on copies under both kinds of layout.

Importing this package does not import vLLM; planning does.
"""

from __future__ import annotations

from repage.planner.decision import Decision, prefers_packed_kv_cache
from repage.planner.layout_plan import (
    GroupPlan,
    KernelPage,
    LayerPlan,
    LayoutPlan,
    MixedPagesError,
)
from repage.planner.presets import UnknownNameError, drafter_preset, model_preset
from repage.planner.request import PlanRequest, PlanResult, plan_request

__all__ = [
    "Decision",
    "GroupPlan",
    "KernelPage",
    "LayerPlan",
    "LayoutPlan",
    "MixedPagesError",
    "PlanRequest",
    "PlanResult",
    "UnknownNameError",
    "drafter_preset",
    "model_preset",
    "plan_request",
    "prefers_packed_kv_cache",
]
