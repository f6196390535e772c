# SPDX-License-Identifier: Apache-2.0
"""One engine in one process, timed step by step; `engine_steps.py` starts it."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from repage.demo import triton_cpu
from repage.demo.checkpoints import DFlashCheckpoint, HybridCheckpoint
from repage.demo.engine_run import adopt_environment, create_engine, generate_round, versions
from repage.demo.launch import Variant
from repage.demo.observe import EngineObserver
from repage.demo.setups import FLOAT32_STATE, EngineSetup, KVExpectation

MANY_LAYERS = EngineSetup(
    name="many-layers",
    summary="30 recurrent and 10 full-attention layers, DFlash drafter of one",
    target=HybridCheckpoint(name="hybrid-40", num_layers=40),
    drafter=DFlashCheckpoint(name="dflash-full"),
    method="dflash",
    engine_args={**FLOAT32_STATE, "kv_cache_memory_bytes": 3 << 30, "max_num_seqs": 8},
    stock=KVExpectation(groups=41, capacity=0),
    packed=KVExpectation(groups=4, capacity=0),
    prompt_lengths=(300, 200, 100, 250, 310, 150, 220, 130),
    max_tokens=64,
)
QUICK = replace(
    MANY_LAYERS,
    name="few-layers",
    target=HybridCheckpoint(),
    stock=KVExpectation(groups=9, capacity=0),
    packed=KVExpectation(groups=3, capacity=0),
    max_tokens=8,
)
SETUPS = {setup.name: setup for setup in (MANY_LAYERS, QUICK)}


@dataclass
class StepClock:
    """Host time of each step, by part.

    Attributes
    ----------
    steps : list of dict
        One entry per step: wall and thread-CPU seconds by part.
    """

    steps: list[dict[str, list[float]]] = field(default_factory=list)

    def watch(self, holder: Any, method: str, part: str, *, begins_step: bool = False) -> None:
        """Add the time of a method to a part of the step that is running."""
        function: Callable[..., Any] = getattr(holder, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if begins_step:
                self.steps.append({})
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                if self.steps:
                    total = self.steps[-1].setdefault(part, [0.0, 0.0])
                    total[0] += wall
                    total[1] += cpu

        setattr(holder, method, timed)


def attach(llm: Any) -> StepClock:
    """Time the host's work of an engine whose core lives in this process (runner V1)."""
    clock = StepClock()
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    clock.watch(core.scheduler, "schedule", "schedule", begins_step=True)
    clock.watch(core.scheduler, "update_from_output", "update")
    clock.watch(runner, "_update_states", "update")
    clock.watch(runner, "_prepare_inputs", "inputs")
    clock.watch(runner, "_get_slot_mappings", "slots")
    clock.watch(runner, "_build_attention_metadata", "metadata")
    return clock


def run(setup: EngineSetup, variant: Variant, rounds: int, cache_dir: Path | None) -> dict:
    """Start the engine, warm it up with one round, time the others."""
    llm = create_engine(setup, cache_dir)
    observer = EngineObserver(llm, in_process=True)
    generate_round(llm, setup)
    clock = attach(llm)
    seconds, tokens, ids = [], 0, []
    for _ in range(rounds):
        began = time.perf_counter()
        generations = generate_round(llm, setup)
        seconds.append(time.perf_counter() - began)
        tokens = sum(len(item.token_ids) for item in generations)
        ids = [item.token_ids for item in generations]
    return {
        "setup": setup.name,
        "variant": variant.label(),
        "layout": observer.layout,
        "groups": observer.num_groups,
        "capacity": observer.capacity,
        "tokens_per_second": [tokens / value for value in seconds],
        # A step without the runner's part scheduled nothing.
        "steps": [step for step in clock.steps if "metadata" in step],
        "token_ids": ids,
        "versions": versions(),
    }


def main(arguments: list[str]) -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setup", choices=sorted(SETUPS))
    parser.add_argument("--layout", required=True)
    parser.add_argument("--page", type=int)
    parser.add_argument("--no-plugin", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    setup = SETUPS[options.setup]
    variant = Variant(options.layout, page=options.page, plugin=not options.no_plugin)
    adopt_environment(setup, variant)
    triton_cpu.install_if_asked()
    options.out.write_text(json.dumps(run(setup, variant, options.rounds, options.cache_dir)))


if __name__ == "__main__":
    main(sys.argv[1:])
