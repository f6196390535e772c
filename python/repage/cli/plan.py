# SPDX-License-Identifier: Apache-2.0
"""``repage plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from repage.cli.picture import print_picture
from repage.cli.report import print_report, result_as_json
from repage.cli.svg import write_svg
from repage.errors import ArgumentError, RepageError
from repage.planner.backends import ARCHITECTURES, BACKENDS
from repage.planner.dump import DumpError, plan_dump
from repage.planner.presets import UnknownNameError, drafter_names, model_names
from repage.planner.request import PlanRequest, PlanResult, plan_request
from repage.planner.specs import KV_DTYPES, STATE_DTYPES, ServingOptions

EXAMPLES = """\b
Examples:
  repage plan qwen3.6-35b-a3b --drafter dflash --memory 178GiB \\
      --kv-dtype bf16 --ssm-dtype bf16 --spec-tokens 7 --backend FLASHINFER
  repage plan qwen3.6-35b-a3b --drafter dflash --min-group-layers 3 --min-group-layers 5
  repage plan gpt-oss-20b --drafter eagle3 --json
  repage plan repage-plan-4711.json --svg blocks.svg
"""

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class MemorySize(click.ParamType[int]):
    """Bytes, or a number with a unit such as ``178GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size.

        Parameters
        ----------
        value : str or int
            As given.
        param, ctx
            For click's error.

        Returns
        -------
        int
            Bytes.
        """
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)?", str(value))
        unit = None if match is None else _UNITS.get(match[2] or "")
        if match is None or unit is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is no size; give one like 178GiB", param, ctx)
        return int(float(match[1]) * unit)


def _choice(values: tuple[str, ...]) -> click.Choice[str]:
    return click.Choice(values, case_sensitive=False)


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--drafter", metavar="NAME", help="Drafter next to the model, such as dflash.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option(
    "--memory",
    type=MemorySize(),
    default="80GiB",
    show_default=True,
    help="Memory of the KV cache on each rank.",
)
@click.option("--kv-dtype", type=_choice(KV_DTYPES), default="bf16", show_default=True)
@click.option("--drafter-kv-dtype", type=_choice(KV_DTYPES), default="bf16", show_default=True)
@click.option(
    "--ssm-dtype",
    type=_choice(STATE_DTYPES),
    default="auto",
    show_default=True,
    help="Dtype of recurrent states.",
)
@click.option("--spec-tokens", type=click.IntRange(0), default=0, help="Drafted tokens per step.")
@click.option("--backend", type=_choice(BACKENDS), default="FLASHINFER", show_default=True)
@click.option("--arch", type=_choice(ARCHITECTURES), default="sm100", show_default=True)
@click.option("--block-size", type=click.IntRange(1), help="As vLLM's option of this name.")
@click.option("--prefix-caching", is_flag=True, help="States at block boundaries are kept.")
@click.option("--max-model-len", type=click.IntRange(1), help="Tokens of the longest request.")
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Tokens in flight.",
)
@click.option(
    "--min-group-layers",
    type=click.IntRange(2),
    multiple=True,
    help="What if layer-compact groups held at least so many layers; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the blocks.")
@click.option("--list", "list_names", is_flag=True, help="List known models and drafters.")
def plan(
    model: str | None,
    as_json: bool,
    svg: Path | None,
    list_names: bool,
    **options: Any,
) -> None:
    """Show what both kinds of KV-cache layout make of MODEL, and which one pays.

    MODEL is a known name, or the JSON file that an engine wrote with REPAGE_DUMP. The numbers
    come from the planner of the installed vLLM.
    """
    if list_names:
        click.echo("\n".join([*model_names(), *(f"--drafter {name}" for name in drafter_names())]))
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    result = _plan(model, options)
    if svg is not None:
        write_svg(result, svg)
    if as_json:
        click.echo(json.dumps(result_as_json(result), indent=2))
        return
    print_report(result)
    print_picture(result)
    if svg is not None:
        click.echo(f"Wrote {svg}")


def _plan(model: str, options: dict[str, Any]) -> PlanResult:
    try:
        if model.endswith(".json"):
            widths = tuple(options["min_group_layers"])
            return plan_dump(Path(model), memory=options["memory"], min_group_layers=widths)
        return plan_request(_request(model, options))
    except (UnknownNameError, ArgumentError, DumpError) as error:
        raise click.UsageError(str(error)) from error
    except RepageError as error:
        raise click.ClickException(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        raise click.ClickException(
            "repage plan runs vLLM's own planner, and vLLM is not installed here"
        ) from error


def _request(model: str, options: dict[str, Any]) -> PlanRequest:
    serving = ServingOptions(
        tensor_parallel=options["tp"],
        kv_dtype=options["kv_dtype"],
        drafter_kv_dtype=options["drafter_kv_dtype"],
        ssm_dtype=options["ssm_dtype"],
        spec_tokens=options["spec_tokens"],
        backend=options["backend"],
        architecture=options["arch"],
        block_size=options["block_size"],
        mamba_cache_mode="align" if options["prefix_caching"] else "none",
    )
    return PlanRequest(
        model,
        options["drafter"],
        serving,
        memory=options["memory"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        min_group_layers=tuple(options["min_group_layers"]),
    )
