# SPDX-License-Identifier: Apache-2.0
"""``python -m repage.demo``: vLLM on packed KV blocks, compared with the stock layout, and served.

Exit status: 0 if every packed run is identical to its stock run, 1 if one differs, 2 if something
could not run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from repage.demo.checkpoints import default_cache_dir, materialize
from repage.demo.compare import IDENTICAL, compare
from repage.demo.launch import STOCK, RunFailedError, Variant, packed, run_variant
from repage.demo.report import print_comparison, variant_words
from repage.demo.result import RunResult
from repage.demo.serve import ServerError, ask_served
from repage.demo.setups import SETUPS, EngineSetup

DEFAULT_SETUPS = ("gemma4", "hybrid-dflash", "hybrid-eagle3", "headline")
SHORT_SETUPS = ("hybrid-dflash",)
COMPARABLE_SETUPS = tuple(name for name, setup in SETUPS.items() if setup.agreement != "nothing")
DEFAULT_PAGE = 64

EXIT_IDENTICAL, EXIT_DIFFERENT, EXIT_FAILED = 0, 1, 2


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m repage.demo", description=__doc__)
    parser.add_argument(
        "--setup",
        action="append",
        choices=COMPARABLE_SETUPS,
        metavar="NAME",
        help=f"run this setup (repeatable); default: {', '.join(DEFAULT_SETUPS)}; "
        f"all: {', '.join(COMPARABLE_SETUPS)}",
    )
    parser.add_argument(
        "--short", action="store_true", help=f"only {', '.join(SHORT_SETUPS)} (about a minute)"
    )
    parser.add_argument(
        "--page",
        type=int,
        choices=(32, 64, 128),
        default=DEFAULT_PAGE,
        help=f"tokens of a kernel page; default {DEFAULT_PAGE}",
    )
    parser.add_argument("--no-serve", action="store_true", help="do not start the OpenAI server")
    parser.add_argument(
        "--cache-dir", type=Path, default=default_cache_dir(), help="folder of built checkpoints"
    )
    parser.add_argument("--out", type=Path, help="keep records and logs in this folder")
    return parser.parse_args(arguments)


def chosen_setups(options: argparse.Namespace) -> list[EngineSetup]:
    """Return the setups that the command line asks for."""
    names = options.setup or (SHORT_SETUPS if options.short else DEFAULT_SETUPS)
    return [SETUPS[name] for name in dict.fromkeys(names)]


def run_shown(
    console: Console, setup: EngineSetup, variant: Variant, out: Path, cache_dir: Path
) -> RunResult:
    """Run one variant and show how far it is."""
    title = f"{setup.name}: {variant_words(variant)}"
    with console.status(title) as status:

        def show(words: str) -> None:
            status.update(f"{title}: {words}")
            if not console.is_terminal:
                console.print(f"{title}: {words}", highlight=False)

        return run_variant(
            setup,
            variant,
            out=out / f"{setup.name}-{variant.label()}.json",
            cache_dir=cache_dir,
            on_stage=show,
        )


def compare_setup(
    console: Console, setup: EngineSetup, page: int, out: Path, cache_dir: Path
) -> bool:
    """Run a setup stock and packed, print both, and return whether they are identical."""
    stock = run_shown(console, setup, STOCK, out, cache_dir)
    repaged = run_shown(console, setup, packed(page), out, cache_dir)
    verdict = compare(stock, repaged, exact=setup.agreement == "everything")
    print_comparison(console, setup, stock, repaged, verdict)
    return verdict == IDENTICAL


def serve_setup(
    console: Console, setup: EngineSetup, page: int, out: Path, cache_dir: Path
) -> None:
    """Serve a setup with the packed layout and print one answer."""
    variant = packed(page)
    with console.status(f"serving {setup.name}: {variant_words(variant)}"):
        answer = ask_served(
            setup, variant, log=out / f"{setup.name}-server.log", cache_dir=cache_dir
        )
    console.print(
        f"served {setup.name} ({variant_words(variant)}): a prompt of {len(answer.prompt)} "
        f"bytes, {answer.completion_tokens} tokens back over HTTP in {answer.seconds:.1f} s",
        highlight=False,
    )
    console.print(f"  ... {answer.prompt[-40:]!r} -> {answer.text!r}", markup=False)


def run_demo(console: Console, options: argparse.Namespace, out: Path) -> int:
    """Run everything that ``options`` ask for and return the exit status."""
    setups = chosen_setups(options)
    try:
        with console.status("building the checkpoints"):
            for setup in setups:
                for checkpoint in filter(None, (setup.target, setup.drafter)):
                    materialize(checkpoint, options.cache_dir)
        identical = [
            compare_setup(console, setup, options.page, out, options.cache_dir) for setup in setups
        ]
        if not options.no_serve:
            served = next((setup for setup in setups if setup.runner == "V1"), setups[0])
            serve_setup(console, served, options.page, out, options.cache_dir)
    except (RunFailedError, ServerError, ImportError, OSError) as error:
        console.print(f"could not run: {error}", style="bold red", markup=False)
        return EXIT_FAILED
    return EXIT_IDENTICAL if all(identical) else EXIT_DIFFERENT


def main(arguments: Sequence[str]) -> int:
    """Run the demonstration and return the exit status."""
    options = parse_arguments(arguments)
    console = Console(soft_wrap=True)
    default = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            return run_demo(console, options, options.out)
        scratch = Path(tempfile.mkdtemp(prefix="repage-demo-"))
        status = run_demo(console, options, scratch)
        if status != EXIT_FAILED:  # its message names the logs
            shutil.rmtree(scratch)
        return status
    except KeyboardInterrupt:
        console.print("interrupted", style="bold red")
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, default)


def _interrupt(_number: int, _frame: object) -> None:
    """Leave on SIGTERM the way Ctrl-C does, so that child processes are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
