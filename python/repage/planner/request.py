# SPDX-License-Identifier: Apache-2.0
"""Planning a model by name: presets in, both layouts and the decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from repage.planner.decision import Decision, prefers_packed_kv_cache
from repage.planner.kernel_pages import kernel_pages
from repage.planner.layout_plan import LayoutPlan, MixedPagesError, plan_layout
from repage.planner.presets import Preset, drafter_preset, model_preset
from repage.planner.specs import ModelSpecs, ServingOptions, build_specs
from repage.vllm import compat

DEFAULT_MAX_MODEL_LEN = 65_536


@dataclass(frozen=True)
class PlanRequest:
    """A model and how it is served.

    Parameters
    ----------
    model : str
        Name of a preset.
    drafter : str or None
        Name of a drafter's preset.
    options : ServingOptions
        Dtypes, backend, ranks. ``spec_tokens`` 0 with a drafter means the drafter's own.
    memory : int or None
        Bytes for the KV cache on each rank.
    max_model_len : int or None
        Tokens of the longest request; None takes the model's, or `DEFAULT_MAX_MODEL_LEN`.
    max_num_batched_tokens : int
        Tokens in flight, which sliding-window layers hold on top of their window.
    min_group_layers : tuple of int
        What-if rows: layer-compact groups of at least so many layers.
    """

    model: str
    drafter: str | None = None
    options: ServingOptions = field(default_factory=ServingOptions)
    memory: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    min_group_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlanResult:
    """The outcome of `plan_request`.

    Parameters
    ----------
    title : str
        What was planned, for people.
    manager_block : int
        Tokens in a block of the target's attention.
    decision : Decision
        With the plans of both layouts.
    plans : tuple of LayoutPlan
        Every layout that was planned, the decision's two first.
    what_if : tuple of (int, LayoutPlan)
        Minimum group width and what it gives.
    notes : tuple of str
        What the presets assume, and from which length on the verdict would change.
    """

    title: str
    manager_block: int
    decision: Decision
    plans: tuple[LayoutPlan, ...]
    what_if: tuple[tuple[int, LayoutPlan], ...]
    notes: tuple[str, ...]


def plan_request(request: PlanRequest) -> PlanResult:
    """Plan a model of the presets under both kinds of layout.

    Parameters
    ----------
    request : PlanRequest
        What to plan.

    Returns
    -------
    PlanResult

    Raises
    ------
    UnknownNameError
        For a name without a preset.
    ArgumentError
        For options that do not fit the model.
    MixedPagesError
        When no layout can express the model.
    """
    target = model_preset(request.model)
    drafter = None if request.drafter is None else drafter_preset(request.drafter, target)
    planner = _Planner(request, target, drafter)
    decision = planner.decide(planner.max_model_len)
    notes = [preset.note for preset in (target, drafter) if preset is not None and preset.note]
    turn = planner.turning_point(decision)
    what_if = tuple((width, planner.widened(width)) for width in request.min_group_layers)
    plans = [plan for plan in (decision.stock, decision.packed) if plan is not None]
    title = target.title if drafter is None else f"{target.title} + {drafter.title}"
    return PlanResult(title, planner.block, decision, tuple(plans), what_if, (*turn, *notes))


class _Planner:
    def __init__(self, request: PlanRequest, target: Preset, drafter: Preset | None) -> None:
        options = request.options
        if drafter is not None and options.spec_tokens == 0:
            options = replace(options, spec_tokens=drafter.spec_tokens)
        self.request = request
        self.target = target
        self.max_model_len = request.max_model_len or target.max_model_len or DEFAULT_MAX_MODEL_LEN
        names = ("LBNHC", "LBHNC", "BLHNC", "BLNHC")
        self.models = {name: build_specs(target, drafter, options, name) for name in names}
        self.layouts = _common_layouts(self.models["LBNHC"])
        self.block = self.models["LBNHC"].manager_block

    def plan(self, layout: str, length: int, width: int = 1) -> LayoutPlan:
        model = self.models[layout]
        config = offline_config(
            length, self.request.max_num_batched_tokens, self.request.options.mamba_cache_mode
        )
        plan = plan_layout(
            config,
            [model.specs],
            layout,
            memory=self.request.memory,
            min_group_layers=width,
        )
        return plan.with_pages(kernel_pages(plan, model.specs, model.rules))

    def decide(self, length: int) -> Decision:
        compact, outermost = self.layouts
        stock = None
        for layout in compact[:1]:
            try:
                stock = self.plan(layout, length)
            except MixedPagesError:
                stock = None
        packed = [self.plan(layout, length) for layout in outermost]
        return prefers_packed_kv_cache(stock, packed, cannot_pack=_splitting(packed))

    def widened(self, width: int) -> LayoutPlan:
        return self.plan(self.layouts[0][0], self.max_model_len, width)

    def turning_point(self, decision: Decision) -> Sequence[str]:
        """Say at which length of requests the verdict changes, if it does up to 1M tokens."""
        if decision.stock is None or decision.packed is None:
            return ()
        if not decision.packed.mixed_page_sizes or _splitting([decision.packed]):
            return ()
        lengths = [2**power for power in range(11, 21)]
        verdicts = [self.decide(length).verdict for length in lengths]
        changes = [
            f"from {after:,} tokens on {verdict}"
            for before, after, old, verdict in zip(
                lengths, lengths[1:], verdicts, verdicts[1:], strict=False
            )
            if old != verdict and before
        ]
        if not changes:
            return ()
        start = f"The verdict depends on the longest request: {verdicts[0]} for {lengths[0]:,}"
        return (f"{start}, {', '.join(changes)} (powers of two looked at).",)


def offline_config(length: int, batched_tokens: int, mamba_cache_mode: str = "none") -> Any:
    """Return what vLLM's planner looks at in a config, without a model.

    Parameters
    ----------
    length : int
        Tokens of the longest request.
    batched_tokens : int
        Tokens in flight.
    mamba_cache_mode : str, default "none"
        ``"align"`` with prefix caching.

    Returns
    -------
    object
        Stands in for ``vllm.config.VllmConfig``.
    """
    return SimpleNamespace(
        cache_config=_CacheConfig(mamba_cache_mode),
        model_config=SimpleNamespace(max_model_len=length, supports_kv_cache_grouping=False),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=batched_tokens
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=batched_tokens,
        num_prefill_lookahead_tokens=0,
        num_speculative_tokens=0,
    )


class _CacheConfig:
    """The part of vLLM's CacheConfig that planning reads."""

    def __init__(self, mamba_cache_mode: str) -> None:
        self.mamba_cache_mode = mamba_cache_mode
        self.kv_cache_layout: str | None = None
        self.num_gpu_blocks_override: int | None = None
        self.prefix_cache_retention_interval: int | None = None
        self.enable_prefix_caching = mamba_cache_mode == "align"

    def get_resolved_kv_cache_layout(self) -> Any:
        return compat.layout_by_name(self.kv_cache_layout or "")


def _common_layouts(model: ModelSpecs) -> tuple[list[str], list[str]]:
    """Return the layer-compact and block-outermost layouts that every backend reads."""
    rules = list(dict.fromkeys(model.rules.values()))
    if not rules:
        return ["LBNHC"], ["BLHNC", "BLNHC"]
    return (
        [name for name in rules[0].layer_compact if all(name in r.layer_compact for r in rules)],
        [
            name
            for name in rules[0].block_outermost
            if all(name in r.block_outermost for r in rules)
        ],
    )


def _splitting(plans: Sequence[LayoutPlan]) -> list[str]:
    """Name the backends that find no page, where that is so on every packed layout."""
    if not plans:
        return []
    problems = [
        [
            f"{page.backend} has no kernel page for {page.block_tokens}-token blocks "
            f"({page.kind}): {page.problem}"
            for page in plan.kernel_pages
            if page.page_tokens is None
        ]
        for plan in plans
    ]
    return min(problems, key=len)
