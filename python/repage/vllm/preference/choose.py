# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout in the engine core, before vLLM resolves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from repage.errors import UnsupportedLayoutError
from repage.planner.decision import Decision, prefers_packed_kv_cache
from repage.planner.layout_plan import LayoutPlan, MixedPagesError, plan_layout
from repage.vllm import compat
from repage.vllm.preference import planner_compat, worker
from repage.vllm.preference.settings import LayoutMode
from repage.vllm.preference.worker import RankReport

Specs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Choice:
    """What the engine core returns to vLLM.

    Parameters
    ----------
    specs : sequence of mapping of str to KVCacheSpec
        Per rank, collected for the layout that was decided.
    decision : Decision or None
        None where something that outranks the preference has decided.
    first : str or None
        Block-outermost layout to move first on every rank.
    runs : mapping of str to sequence of mapping of str to KVCacheSpec
        Every layout that was looked at.
    """

    specs: Specs
    decision: Decision | None = None
    first: str | None = None
    runs: Mapping[str, Specs] = field(default_factory=dict)


def agree_on_layouts(lists: Sequence[Sequence[str]], names: Callable[[], list[str]]) -> list[str]:
    """Return the layouts that every rank supports, in rank 0's order.

    Parameters
    ----------
    lists : sequence of sequence of str
        Per rank, most preferred first.
    names : callable
        Returns per rank the names of its backends; asked only for the error.

    Returns
    -------
    list of str

    Raises
    ------
    UnsupportedLayoutError
        When there is none; names the ranks with their backends.
    """
    common = [name for name in lists[0] if all(name in other for other in lists[1:])]
    if common:
        return common
    ranks = "; ".join(
        f"rank {rank} ({backends}): {', '.join(own)}"
        for rank, (own, backends) in enumerate(zip(lists, names(), strict=True))
    )
    raise UnsupportedLayoutError(
        f"layout: no KV-cache layout is supported on every rank ({ranks}). Choose attention "
        "backends with a layout in common"
    )


def choose(
    executor: Any, stock_specs: Specs, lists: Sequence[Sequence[str]], mode: LayoutMode
) -> Choice:
    """Decide the layout of a run and collect its specs.

    Parameters
    ----------
    executor : vllm.v1.executor.abstract.Executor
        Its workers' models are loaded.
    stock_specs : sequence of mapping of str to KVCacheSpec
        Per rank, as a stock run collects them.
    lists : sequence of sequence of str
        The ranks' supported layouts, as they answered.
    mode : LayoutMode
        ``AUTO`` or ``PACKED``.

    Returns
    -------
    Choice
        The workers are left planned for it.

    Raises
    ------
    UnsupportedLayoutError
        When the ranks have no layout in common; when a packed layout is asked for, or is the only
        kind left, and a backend cannot read it.
    """
    config = executor.vllm_config
    common = agree_on_layouts(lists, lambda: rank_backends(executor))
    common = [name for name in common if _is_expressible(name)]
    if requires_block_outermost(stock_specs):
        common = [name for name in common if _is_outermost(name)]
    compact = [name for name in common if not _is_outermost(name)]
    outermost = [name for name in common if _is_outermost(name)]
    reports = {name: executor.collective_rpc(worker.collect, args=(name,)) for name in outermost}
    stock = _stock_plan(config, stock_specs, compact)
    problems = {name: _problems(ranks) for name, ranks in reports.items()}
    packed = []
    for name in outermost:
        try:
            packed += [] if problems[name] else [_packed_plan(config, name, reports[name])]
        except MixedPagesError as error:
            problems[name].append(str(error))
    decision = prefers_packed_kv_cache(
        stock,
        packed,
        cannot_pack=[] if packed else min(problems.values(), key=len, default=[]),
        default_layout=compact[0] if compact else common[0] if common else "LBNHC",
    )
    decision = _insist(decision, mode, must=not compact, problems=problems)
    chosen = decision.layout if decision.verdict == "packed" else None
    executor.collective_rpc(worker.set_mode, args=(chosen,))
    runs: dict[str, Specs] = {compact[0]: stock_specs} if compact else {}
    runs |= {plan.layout: [report.specs for report in reports[plan.layout]] for plan in packed}
    return Choice(stock_specs if chosen is None else runs[chosen], decision, chosen, runs)


def requires_block_outermost(specs: Specs) -> bool:
    """Whether vLLM would accept block-outermost layouts only.

    Parameters
    ----------
    specs : sequence of mapping of str to KVCacheSpec
        Per rank.

    Returns
    -------
    bool
        True for sharded targets with replicated drafters and pages of several sizes
        (``v1/attention/backends/utils.py``, `resolve_kv_cache_layout`, 0.32.0 and 0.33.0).
    """
    attention = compat.kv_cache_interface().AttentionSpec
    views = [spec for rank in specs for spec in rank.values() if spec.has_layer_views]
    sharding = {
        spec.dcp_sharded for spec in views if isinstance(spec, attention) and spec.uses_slot_mapping
    }
    return len(sharding) > 1 and len({spec.page_size_bytes for spec in views}) > 1


def rank_backends(executor: Any) -> list[str]:
    """Return per rank the names of its attention backends."""
    names = executor.collective_rpc(worker.backend_names)
    return [", ".join(own) or "no attention" for own in names]


def _is_outermost(name: str) -> bool:
    layout = compat.layout_by_name(name)
    return layout is not None and bool(layout.is_block_outermost)


def _is_expressible(name: str) -> bool:
    """Whether pages of several sizes can alias in a layout."""
    layout = compat.layout_by_name(name)
    return layout is not None and bool(layout.is_block_compact)


def _stock_plan(config: Any, specs: Specs, compact: Sequence[str]) -> LayoutPlan | None:
    if not compact:
        return None
    try:
        return plan_layout(config, specs, compact[0])
    except MixedPagesError:
        return None


def _packed_plan(config: Any, layout: str, ranks: Sequence[RankReport]) -> LayoutPlan:
    pages = {page.kind: page for rank in ranks for page in rank.pages}
    plan = plan_layout(config, [rank.specs for rank in ranks], layout)
    return plan.with_pages(tuple(pages.values()))


def _problems(ranks: Sequence[RankReport]) -> list[str]:
    """Say per rank why it does not prefer the layout."""
    found = []
    for rank, report in enumerate(ranks):
        if report.refusal is not None:
            found.append(f"rank {rank}: {report.refusal}")
        found += [
            f"rank {rank}: {page.problem}" for page in report.pages if page.problem is not None
        ]
    return found


def _insist(
    decision: Decision, mode: LayoutMode, *, must: bool, problems: Mapping[str, Sequence[str]]
) -> Decision:
    """Apply ``REPAGE_LAYOUT=packed``, and vLLM's own narrowing to packed layouts."""
    if decision.verdict == "packed" or not (must or mode is LayoutMode.PACKED):
        return decision
    why = "vLLM accepts block-outermost layouts only" if must else "REPAGE_LAYOUT=packed"
    possible = decision.packed is not None and not all(problems.values())
    if not possible:
        raise UnsupportedLayoutError(
            f"layout: {why}, but no block-outermost KV-cache layout can be used: "
            f"{'; '.join(decision.reasons)}"
        )
    packed = decision.packed
    return replace(
        decision,
        verdict="packed",
        layout="" if packed is None else packed.layout,
        reasons=(why, *decision.reasons),
    )


def connector_or_request(config: Any) -> str | None:
    """Name the layout that outranks the preference, None without one.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        Of the engine.

    Returns
    -------
    str or None
        A resolved layout, ``VLLM_KV_CACHE_LAYOUT``, or what a KV connector asks for.
    """
    resolved = config.cache_config.kv_cache_layout
    return resolved or compat.requested_layout_name() or planner_compat.connector_layout(config)
