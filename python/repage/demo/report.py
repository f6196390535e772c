# SPDX-License-Identifier: Apache-2.0
"""Tables that show what two runs of a setup did."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from repage.demo.launch import Variant
from repage.demo.result import KVGroup, RunResult
from repage.demo.setups import EngineSetup

SHOWN_IDS = 3
"""Ids shown of a list: its first ones and its last."""


def print_comparison(
    console: Console,
    setup: EngineSetup,
    stock: RunResult,
    packed: RunResult,
    verdict: str,
) -> None:
    """Print the KV cache of both runs side by side, the packed tables, and the verdict."""
    console.print(f"[bold]{setup.name}[/]: {setup.summary}", highlight=False)
    table = Table()
    for heading in ("", "stock", "packed"):
        table.add_column(heading, justify="left" if not heading else "right")
    for label, values in (
        ("layout", (stock.layout, packed.layout)),
        ("KV-cache groups", (stock.num_groups, packed.num_groups)),
        ("block stride, bytes", (_strides(stock), _strides(packed))),
        ("manager block, tokens", (_manager_blocks(stock), _manager_blocks(packed))),
        ("kernel page, tokens", (_kernel_pages(stock), _kernel_pages(packed))),
        ("KV capacity, tokens", (f"{stock.capacity:,}", f"{packed.capacity:,}")),
        ("generated tokens/s", (_rate(stock), _rate(packed))),
    ):
        table.add_row(label, *(str(value) for value in values))
    console.print(table)
    console.print("one request's block table on the packed layout:", highlight=False)
    console.print(_rows_table(packed))
    style = "bold green" if verdict == "identical" else "bold red"
    scope = "token ids, logprobs, draft tokens" if setup.agreement == "everything" else "token ids"
    console.print(f"[{style}]{setup.name}: {verdict}[/] ({scope})\n", highlight=False)


def variant_words(variant: Variant) -> str:
    """Return a variant in a few words, for progress lines."""
    if not variant.plugin:
        return f"stock vLLM, {variant.layout}"
    page = f"kernel pages of {variant.page}" if variant.page else "whole blocks"
    return f"repage, {variant.layout}, {page}"


def _rows_table(result: RunResult) -> Table:
    table = Table()
    table.add_column("group", justify="right")
    table.add_column("layers")
    table.add_column("manager ids")
    table.add_column("kernel page ids, block by block", overflow="fold")
    for group in result.attention_groups():
        name = f"{len(group.layers)} x {group.spec.removesuffix('Spec')}"
        table.add_row(str(group.group), name, _ids(group.manager_row), _kernel_ids(group))
    return table


def _kernel_ids(group: KVGroup) -> str:
    pages = group.manager_block // group.kernel_page
    blocks = [
        group.kernel_row[start : start + pages] for start in range(0, len(group.kernel_row), pages)
    ]
    return " | ".join(_ids(block) for block in blocks)


def _ids(ids: list[int]) -> str:
    if len(ids) <= SHOWN_IDS:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[: SHOWN_IDS - 1]), "..", str(ids[-1])])


def _strides(result: RunResult) -> str:
    return _distinct([group.block_stride for group in result.attention_groups()])


def _manager_blocks(result: RunResult) -> str:
    return _distinct([group.manager_block for group in result.attention_groups()])


def _kernel_pages(result: RunResult) -> str:
    return _distinct([group.kernel_page for group in result.attention_groups()])


def _distinct(values: list[int]) -> str:
    return ", ".join(f"{value:,}" for value in sorted(set(values)))


def _rate(result: RunResult) -> str:
    return f"{result.tokens_per_second:.1f}"
