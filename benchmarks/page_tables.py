# SPDX-License-Identifier: Apache-2.0
"""Kernel page tables: vLLM's mapping, numpy and a plain copy next to repage's.

Everything runs in this process, in turns; ratios are between medians of the same run. Every
contender's output is poisoned and compared with the expected table before and after the timing.

    python benchmarks/page_tables.py --device cpu --out result.json --plot result.png
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import builder_cost
import measure
import page_table_targets
from page_table_cases import Contenders, Shape, sweep


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for the results")
@click.option("--plot", type=click.Path(path_type=Path), help="PNG or SVG file (matplotlib)")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="torch-profiler trace of one shape (JSON)"
)
@click.option("--quick", is_flag=True, help="two small shapes, a second each")
@click.option("--budget", default=0.5, show_default=True, help="seconds of timing per shape")
@click.option("--memory", default=4.0, show_default=True, help="GiB for one shape's tables")
@click.option(
    "--strict", is_flag=True, help="end with status 1 when a target is missed in some shape"
)
def main(
    device: str,
    out: Path | None,
    plot: Path | None,
    trace: Path | None,
    quick: bool,
    budget: float,
    memory: float,
    strict: bool,
) -> None:
    torch.set_num_threads(1)
    where = torch.device(device)
    console = Console(stderr=True)
    cases: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for shape in sweep(quick):
        needed = shape.table_bytes * shape.groups * Contenders.TABLES
        if needed > memory * 2**30:
            reason = f"its tables need {needed / 2**30:.1f} GiB (--memory {memory:g})"
            skipped.append({"shape": dataclasses.asdict(shape), "reason": reason})
            continue
        case = measure_shape(shape, where, 0.05 if quick else budget)
        cases.append(case)
        console.print(one_line(case), highlight=False)
    result = {
        "benchmark": "page_tables",
        "environment": measure.environment(where),
        "unit": "microseconds for all groups of a shape",
        "cases": cases,
        "skipped": skipped,
        "builder": builder_cost.measure_builders(quick) if device == "cpu" else None,
        "targets": page_table_targets.judge(cases, device),
    }
    if result["builder"] is not None:
        result["targets"].append(builder_cost.judge(result["builder"]))
    show(result, console)
    if out is not None:
        measure.write_json(out, result)
    if plot is not None:
        import page_table_plot

        page_table_plot.draw(result, plot)
    if trace is not None:
        record_trace(Shape(64, 131_072, 10), where, trace)
    if strict and not all(target.get("holds", True) for target in result["targets"]):
        raise SystemExit(1)


def measure_shape(shape: Shape, device: torch.device, budget: float) -> dict[str, Any]:
    """Check and time one shape."""
    contenders = Contenders(shape, device)
    contenders.check()
    timer = measure.CudaTimer() if device.type == "cuda" else measure.CpuTimer()
    medians = measure.interleaved_medians(contenders.functions, timer, budget_s=budget)
    for name in contenders.functions:
        contenders.check_after(name)
    return {
        "shape": dataclasses.asdict(shape),
        "table_bytes": shape.table_bytes,
        "us": medians,
        "left_out": contenders.left_out,
    }


def record_trace(shape: Shape, device: torch.device, path: Path) -> None:
    """Record one call of every contender, by name, for chrome://tracing or Perfetto."""
    contenders = Contenders(shape, device)
    contenders.check()
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        for name, function in contenders.functions.items():
            with torch.profiler.record_function(name):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def one_line(case: dict[str, Any]) -> str:
    """Return a line of progress."""
    shape, medians = case["shape"], case["us"]
    times = "  ".join(f"{name} {values['median']:.1f}" for name, values in medians.items())
    return (
        f"R={shape['batch']} len={shape['max_model_len']} r={shape['pages_per_block']} "
        f"groups={shape['groups']} {case['table_bytes'] / 2**20:.2f} MiB: {times}"
    )


def results_table(result: dict[str, Any]) -> Table:
    """Return medians of every shape, and how many times faster than vLLM's mapping repage is."""
    contenders = [
        name
        for name in ("vllm", "copy", "repage", "repage live 10%", "repage live 8K", "repage csr")
        if any(name in case["us"] for case in result["cases"])
    ]
    table = Table(title=f"{result['environment']['device']}, {result['unit']}")
    for column in ("batch", "room", "r", "groups", "MiB"):
        table.add_column(column, justify="right")
    for name in contenders:
        table.add_column(name, justify="right")
        if name not in ("vllm", "copy"):
            table.add_column("faster", justify="right")
    for case in result["cases"]:
        cells = [str(value) for value in case["shape"].values()]
        cells.append(f"{case['table_bytes'] / 2**20:.2f}")
        for name in contenders:
            measured = name in case["us"]
            cells.append(f"{case['us'][name]['median']:.1f}" if measured else "")
            if name not in ("vllm", "copy"):
                faster = page_table_targets.ratio(case, "vllm", name) if measured else 0.0
                cells.append(f"{faster:.1f}x" if measured else "")
        table.add_row(*cells)
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Print the results, the targets, and what was left out."""
    Console(width=160).print(results_table(result))
    table = Table(title=f"{result['environment']['device']}, one thread")
    for column in ("target", "limit", "worst", "missed", "where"):
        table.add_column(column, overflow="fold")
    for target in result["targets"]:
        shape = target.get("where")
        table.add_row(
            target["target"],
            f"{target['limit']:g}",
            f"{target['worst']:.2f}" if "worst" in target else "not measured",
            f"{target['missed']} of {target['cases']}" if "missed" in target else "",
            " ".join(f"{name}={value}" for name, value in shape.items()) if shape else "",
        )
    console.print(table)
    for entry in result["skipped"]:
        console.print(f"left out: {entry['shape']}: {entry['reason']}", highlight=False)


if __name__ == "__main__":
    main()
