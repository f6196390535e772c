# SPDX-License-Identifier: Apache-2.0
"""The blocks of both layouts as an SVG drawing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from repage.cli.picture import BlockRow, block_rows, kind_colours
from repage.planner.layout_plan import LayoutPlan
from repage.planner.request import PlanResult

_LEFT, _WIDTH, _ROW, _GAP = 20, 760, 26, 8
_TEXT = 240
_FONT = "font: 12px sans-serif; fill: #222"


def write_svg(result: PlanResult, path: Path) -> None:
    """Draw one block of each group under both layouts.

    Parameters
    ----------
    result : PlanResult
        What was planned.
    path : pathlib.Path
        Of the file to write. Widths are in proportion to bytes within a layout; each rectangle
        says its layer and bytes when pointed at.
    """
    root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
    _text(root, _LEFT, 24, result.title, "font: bold 15px sans-serif; fill: #222")
    y = 36
    for plan in result.plans:
        y = _draw_layout(root, plan, y)
    width = _LEFT + _WIDTH + _TEXT
    root.set("viewBox", f"0 0 {width} {y + _GAP}")
    root.set("width", str(width))
    root.set("height", str(y + _GAP))
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _draw_layout(root: ElementTree.Element, plan: LayoutPlan, y: int) -> int:
    colours = kind_colours(plan)
    size = f"{plan.bytes_per_block:,} bytes per block, {plan.num_groups} groups"
    _text(root, _LEFT, y + 18, f"{plan.layout}: {size}", _FONT)
    y += 28
    for row in block_rows(plan):
        _draw_row(root, row, plan.bytes_per_block, y, colours)
        y += _ROW + _GAP
    x = _LEFT
    for kind, colour in (*colours.items(), ("idle or padding", "#e8e8e8")):
        _box(root, x, y, 12, 12, colour)
        _text(root, x + 16, y + 10, kind, _FONT)
        x += 30 + 7 * len(kind)
    return y + 30


def _draw_row(
    root: ElementTree.Element, row: BlockRow, block: int, y: int, colours: Mapping[str, str]
) -> None:
    offset = 0
    for segment in row.segments:
        x = _LEFT + _WIDTH * offset / block
        width = _WIDTH * segment.size / block
        colour = "#e8e8e8" if segment.kind is None else colours[segment.kind]
        box = _box(root, x, y, width, _ROW, colour)
        title = ElementTree.SubElement(box, "title")
        title.text = f"{segment.label}: {segment.size:,} bytes at {offset:,}"
        offset += segment.size
    _text(root, _LEFT + _WIDTH + 8, y + 17, row.title, _FONT)


def _box(
    root: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str
) -> ElementTree.Element:
    return ElementTree.SubElement(
        root,
        "rect",
        x=f"{x:.2f}",
        y=f"{y:.2f}",
        width=f"{width:.2f}",
        height=f"{height:.2f}",
        fill=colour,
        stroke="#ffffff",
    )


def _text(root: ElementTree.Element, x: float, y: float, words: str, style: str) -> None:
    element = ElementTree.SubElement(root, "text", x=f"{x:.2f}", y=f"{y:.2f}", style=style)
    element.text = words
