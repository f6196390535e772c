# SPDX-License-Identifier: Apache-2.0
"""The blocks of a layout as rows of segments: which layer sits where, what is idle."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from repage.planner.layout_plan import GroupPlan, LayoutPlan
from repage.planner.request import PlanResult

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#e45756", "#eeca3b")
_WIDTH = 64


@dataclass(frozen=True)
class Segment:
    """A run of bytes in a block.

    Parameters
    ----------
    label : str
        Name of the layer, ``"padding"`` or ``"idle"``.
    kind : str or None
        Kind of the layer; None where nothing is kept.
    size : int
        Bytes.
    """

    label: str
    kind: str | None
    size: int


@dataclass(frozen=True)
class BlockRow:
    """The block of one group, or of several groups that look the same.

    Parameters
    ----------
    title : str
        How many groups, and their tokens.
    segments : tuple of Segment
        From the first byte to the last.
    """

    title: str
    segments: tuple[Segment, ...]


def block_rows(plan: LayoutPlan) -> list[BlockRow]:
    """Return the blocks of a layout, groups that look the same once.

    Parameters
    ----------
    plan : LayoutPlan
        A planned layout.

    Returns
    -------
    list of BlockRow
    """
    rows: dict[tuple[object, ...], list[GroupPlan]] = {}
    for group in plan.groups:
        look = (group.block_tokens, *((layer.kind, layer.page_bytes) for layer in group.layers))
        rows.setdefault(look, []).append(group)
    return [
        BlockRow(_title(groups), _segments(groups[0], plan.bytes_per_block))
        for groups in rows.values()
    ]


def kind_colours(plan: LayoutPlan) -> dict[str, str]:
    """Return a colour per kind of layer.

    Parameters
    ----------
    plan : LayoutPlan
        A planned layout.

    Returns
    -------
    dict of str to str
    """
    kinds = sorted({layer.kind for group in plan.groups for layer in group.layers})
    return {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}


def print_picture(result: PlanResult, console: Console | None = None) -> None:
    """Draw the blocks of both layouts in the terminal.

    Parameters
    ----------
    result : PlanResult
        What was planned.
    console : rich.console.Console or None, default None
        None draws to standard output.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    for plan in result.plans:
        colours = kind_colours(plan)
        letters = {kind: chr(ord("A") + index % 26) for index, kind in enumerate(colours)}
        size = f"{plan.bytes_per_block:,} bytes"
        console.print(f"\nOne block of {plan.layout}, {size}, per group")
        for row in block_rows(plan):
            line = Text()
            for segment, width in zip(row.segments, _widths(row), strict=True):
                if segment.kind is None:
                    line.append(("." if segment.label == "idle" else "~") * width, style="dim")
                else:
                    text = letters[segment.kind] * max(0, width - 1) + "|" * min(1, width)
                    line.append(text, style=colours[segment.kind])
            console.print(Text("  ").append(line).append(f"  {row.title}"))
        legend = ", ".join(f"{letters[kind]} {kind}" for kind in colours)
        console.print(Text(f"  {legend}, ~ padding, . idle", style="dim"))


def _widths(row: BlockRow) -> list[int]:
    """Return columns per segment, so that ends are where the bytes are."""
    total = sum(segment.size for segment in row.segments)
    widths, done, columns = [], 0, 0
    for segment in row.segments:
        done += segment.size
        end = round(done * _WIDTH / total)
        widths.append(end - columns)
        columns = end
    return widths


def _title(groups: list[GroupPlan]) -> str:
    times = f"{len(groups)} groups" if len(groups) > 1 else "1 group"
    layers = len(groups[0].layers)
    return f"{times} of {layers} layer{'s' * (layers > 1)}, {groups[0].block_tokens:,} tokens"


def _segments(group: GroupPlan, block: int) -> tuple[Segment, ...]:
    segments = []
    for layer in group.layers:
        segments.append(Segment(layer.name, layer.kind, layer.used_bytes))
        if layer.page_bytes > layer.used_bytes:
            segments.append(Segment("padding", None, layer.page_bytes - layer.used_bytes))
    idle = block - sum(segment.size for segment in segments)
    if idle > 0:
        segments.append(Segment("idle", None, idle))
    return tuple(segments)
