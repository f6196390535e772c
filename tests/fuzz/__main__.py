# SPDX-License-Identifier: Apache-2.0
"""``python -m fuzz``: fuzz for some minutes, then say how many seeds were looked at.

Exit status: 0 when nothing differed, 1 when something did; the last lines then say how to run that
seed alone.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fuzz import engine, ops, sanitizer

TARGETS = ("ops", "sanitizer", "engine")
# Of the time, when all of them run; an engine takes most of a minute to start.
SHARES = {"ops": 0.35, "sanitizer": 0.25, "engine": 0.4}
SEEDS = 2**32


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="default: all of them, in turn"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything; default 600")
    parser.add_argument("--seed", type=int, help="first seed; default: a random one, printed")
    parser.add_argument("--count", type=int, help="at most so many seeds of each target")
    parser.add_argument(
        "--requests", type=int, default=40, help="requests of a seed of the engine target"
    )
    return parser.parse_args(arguments)


def checker(target: str, requests: int, stack: ExitStack) -> Callable[[int], object]:
    """Return what checks one seed; builds what it needs first."""
    if target == "ops":
        return ops.check
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="repage-fuzz-")))
    if target == "engine":
        return lambda seed: engine.check(seed, folder, requests)
    programs = [sanitizer.build(folder, bits) for bits in sanitizer.VECTOR_BITS]
    twins = [stack.enter_context(sanitizer.SanitizedTwins(program)) for program in programs]
    return lambda seed: [sanitizer.check(seed, one) for one in twins]


def fuzz(target: str, options: argparse.Namespace, seed: int, seconds: float) -> int | None:
    """Check seeds for some time; return how many, or None when one failed."""
    print(f"fuzz {target}: seeds from {seed}, {seconds:.0f} s", flush=True)
    end = time.monotonic() + seconds
    done = 0
    with ExitStack() as stack:
        check = checker(target, options.requests, stack)
        while done != options.count and not (done and time.monotonic() > end):
            current = (seed + done) % SEEDS
            if target == "engine":
                print(f"fuzz engine: seed {current}", flush=True)
            try:
                check(current)
            except Exception:
                traceback.print_exc()
                print(
                    f"fuzz {target}: seed {current} failed after {done} good ones. Once more:\n"
                    f"  python -m fuzz --target {target} --seed {current} --count 1",
                    flush=True,
                )
                return None
            done += 1
    return done


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    seed = secrets.randbelow(SEEDS) if options.seed is None else options.seed
    targets = options.target or list(TARGETS)
    total = sum(SHARES[target] for target in targets)
    status = 0
    for target in targets:
        done = fuzz(target, options, seed, options.seconds * SHARES[target] / total)
        if done is None:
            status = 1
        else:
            print(f"fuzz {target}: {done} seeds, nothing differed", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
