# SPDX-License-Identifier: Apache-2.0
"""``repage selftest``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import repage
from repage.errors import ArgumentError
from repage.selftest.result import CheckResult, Status
from repage.selftest.run import exit_code, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_AVAILABLE: "yellow"}


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--quick", is_flag=True, help="Fewer page sizes and head counts.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only checks of this name, group (ops, tensor_map, attention, timing) or pattern.",
)
@click.pass_context
def selftest_command(
    context: click.Context, *, as_json: bool, quick: bool, only: tuple[str, ...]
) -> None:
    """Check repage on this machine's GPU.

    Ends with 0 when nothing failed, 1 when a check failed, and 2 when no check could run, for
    instance without a GPU.
    """
    try:
        results = run(quick=quick, only=only)
    except ArgumentError as error:
        raise click.BadParameter(str(error), param_hint="--only") from None
    if as_json:
        click.echo(json.dumps(_report(results), indent=2))
    else:
        _print_table(results, Console())
    context.exit(exit_code(results))


def _report(results: Sequence[CheckResult]) -> dict[str, object]:
    """Return the results with what they depend on."""
    build = repage.build_info()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "repage": build.version,
        "repage_cuda": build.cuda_version,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "results": [result.as_dict() for result in results],
    }


def _print_table(results: Sequence[CheckResult], console: Console) -> None:
    table = Table(show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("detail", overflow="fold")
    for result in results:
        table.add_row(
            Text(result.name),
            Text(result.status.value, style=_STYLES[result.status]),
            f"{result.seconds:.2f}",
            Text(result.detail),
        )
    console.print(table)
    counts = {status: sum(r.status is status for r in results) for status in Status}
    console.print(", ".join(f"{count} {status.value}" for status, count in counts.items()))
