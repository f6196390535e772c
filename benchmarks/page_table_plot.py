# SPDX-License-Identifier: Apache-2.0
"""The plot of `page_tables.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_table_targets import ratio


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the speed over vLLM's mapping and the time over a copy, by table size.

    Parameters
    ----------
    result : dict
        Of `page_tables.py`.
    path : Path
        PNG, SVG or PDF by its suffix.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = result["cases"]
    sizes = [case["table_bytes"] * case["shape"]["groups"] / 2**20 for case in cases]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, label in (
        ("repage", "whole table"),
        ("repage live 100%", "100% live"),
        ("repage live 10%", "10% live"),
        ("repage live 1%", "1% live"),
    ):
        left.scatter(sizes, [ratio(case, "vllm", name) for case in cases], s=10, label=label)
    left.axhline(1.0, color="grey", linewidth=1)
    left.set_ylabel("times faster than vLLM's mapping")
    for name, label in (("vllm", "vLLM"), ("numpy", "numpy"), ("repage", "repage, whole table")):
        if all(name in case["us"] for case in cases):
            values = [ratio(case, name, "copy") for case in cases]
            right.scatter(sizes, values, s=10, label=label)
    right.axhline(1.0, color="grey", linewidth=1)
    right.set_ylabel("time over that of copying the table")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("MiB of kernel page tables")
        axes.legend(fontsize=8)
    environment = result["environment"]
    figure.suptitle(f"{environment['device']}, torch {environment['versions']['torch']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
