# SPDX-License-Identifier: Apache-2.0
"""The decision as a plain-text table, for the log."""

from __future__ import annotations

from repage.planner.decision import Decision

_HEADERS = ("layout", "groups", "bytes/block", "bytes/request", "capacity", "padding/token")


def decision_table(decision: Decision) -> str:
    """Return both layouts and the kernel pages, one line each.

    Parameters
    ----------
    decision : Decision
        With its plans.

    Returns
    -------
    str
        Lines of equal columns, then one per kind of attention layer.
    """
    rows = [_HEADERS]
    pages = []
    for plan in (decision.stock, decision.packed):
        if plan is None:
            continue
        capacity = "-" if plan.capacity_tokens is None else f"{plan.capacity_tokens:,}"
        rows.append(
            (
                plan.layout,
                str(plan.num_groups),
                f"{plan.bytes_per_block:,}",
                f"{plan.bytes_per_request:,}",
                capacity,
                f"{plan.padding_bytes_per_token:,}",
            )
        )
        pages += [
            f"  {plan.layout}: {page.kind}: {page.backend}, blocks of {page.block_tokens} tokens, "
            f"{page.problem or f'pages of {page.page_tokens}'}"
            for page in plan.kernel_pages
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADERS))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"verdict: {decision.verdict}", *lines, *pages])
