# SPDX-License-Identifier: Apache-2.0
"""A plan as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from repage.planner.layout_plan import KernelPage, LayoutPlan
from repage.planner.request import PlanResult

_MIB = 2**20


def result_as_json(result: PlanResult) -> dict[str, Any]:
    """Return a plan as plain data.

    Parameters
    ----------
    result : PlanResult
        What was planned.

    Returns
    -------
    dict
        ``verdict``, ``layout``, ``reasons``, ``manager_block``, and per layout ``groups``,
        ``bytes_per_block``, ``bytes_per_request``, ``capacity_tokens``,
        ``padding_bytes_per_token``, ``kernel_pages``.
    """
    decision = result.decision
    return {
        "model": result.title,
        "verdict": decision.verdict,
        "layout": decision.layout,
        "reasons": list(decision.reasons),
        "manager_block": result.manager_block,
        "layouts": {plan.layout: plan_as_json(plan) for plan in result.plans},
        "what_if": [
            {"min_group_layers": width, **plan_as_json(plan)} for width, plan in result.what_if
        ],
        "notes": list(result.notes),
    }


def plan_as_json(plan: LayoutPlan) -> dict[str, Any]:
    """Return one layout's plan as plain data.

    Parameters
    ----------
    plan : LayoutPlan
        A planned layout.

    Returns
    -------
    dict
    """
    return {
        "groups": plan.num_groups,
        "bytes_per_block": plan.bytes_per_block,
        "bytes_per_request": plan.bytes_per_request,
        "capacity_tokens": plan.capacity_tokens,
        "padding_bytes_per_token": plan.padding_bytes_per_token,
        "padded_slots": plan.padded_slots,
        "max_model_len": plan.max_model_len,
        "kernel_pages": [_page_as_json(page) for page in plan.kernel_pages],
    }


def _page_as_json(page: KernelPage) -> dict[str, Any]:
    return {
        "kind": page.kind,
        "backend": page.backend,
        "block_tokens": page.block_tokens,
        "page_tokens": page.page_tokens,
        "pages_per_block": page.pages_per_block,
        "block_step": page.block_step,
        "page_step": page.page_step,
        "problem": page.problem,
    }


def print_report(result: PlanResult, console: Console | None = None) -> None:
    """Print a plan's tables, verdict and reasons.

    Parameters
    ----------
    result : PlanResult
        What was planned.
    console : rich.console.Console or None, default None
        None prints to standard output.
    """
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    length = result.plans[0].max_model_len
    console.print(
        f"[bold]{escape(result.title)}[/], manager block {result.manager_block} tokens, "
        f"longest request {length:,} tokens\n"
    )
    console.print(_layout_table(result))
    if any(plan.kernel_pages for plan in result.plans):
        console.print(_page_table(result))
    decision = result.decision
    console.print(f"Verdict: [bold]{decision.verdict}[/], layout {decision.layout}")
    for line in (*decision.reasons, *result.notes):
        console.print(f"  - {escape(line)}", soft_wrap=True)


def _layout_table(result: PlanResult) -> Table:
    table = Table(title="KV cache by layout", title_justify="left")
    for header in ("layout", "groups", "bytes per block", "per request", "capacity", "padding"):
        table.add_column(header, justify="left" if header == "layout" else "right")
    for label, plan in _labelled(result):
        capacity = "-" if plan.capacity_tokens is None else f"{plan.capacity_tokens:,} tokens"
        plural = "s" * (plan.padded_slots > 1)
        slots = f", {plan.padded_slots} empty slot{plural}" if plan.padded_slots else ""
        table.add_row(
            label,
            str(plan.num_groups),
            f"{plan.bytes_per_block:,}",
            f"{plan.bytes_per_request / _MIB:,.1f} MiB",
            capacity,
            f"{plan.padding_bytes_per_token:,} B/token{slots}",
        )
    return table


def _labelled(result: PlanResult) -> Iterator[tuple[str, LayoutPlan]]:
    for plan in result.plans:
        yield f"{plan.layout} ({'packed' if plan.is_packed else 'stock'})", plan
    for width, plan in result.what_if:
        yield f"{plan.layout}, groups of {width} or more", plan


def _page_table(result: PlanResult) -> Table:
    table = Table(title="Kernel pages", title_justify="left")
    for header in ("layout", "layers", "backend", "block", "page", "page ids"):
        table.add_column(header, justify="right" if header in ("block", "page") else "left")
    for plan in result.plans:
        for page in plan.kernel_pages:
            table.add_row(
                plan.layout,
                escape(page.kind),
                page.backend,
                str(page.block_tokens),
                "none" if page.page_tokens is None else str(page.page_tokens),
                escape(_ids(page)),
            )
    return table


def _ids(page: KernelPage) -> str:
    if page.problem is not None:
        return page.problem
    if page.block_step is None:
        return "block id" if page.page_tokens == page.block_tokens else "virtual pages"
    step = "" if page.page_step == 1 else f"{page.page_step}*"
    return f"{page.block_step}*b + {step}j"
