# SPDX-License-Identifier: Apache-2.0
"""Starts a setup of the demonstration with the preference on, and prints what it chose.

``python engine_program.py SETUP OUT [EXECUTOR]``; ``uniform`` is a hybrid model without a drafter,
an executor of ``mp`` runs the worker in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from repage.demo import triton_cpu
from repage.demo.setups import SETUPS, EngineSetup


def find_setup(name: str) -> EngineSetup:
    if name != "uniform":
        return SETUPS[name]
    return replace(SETUPS["hybrid-dflash"], name=name, drafter=None, method=None)


def main() -> None:
    setup = find_setup(sys.argv[1])
    if len(sys.argv) > 3:
        executor = {"distributed_executor_backend": sys.argv[3]}
        setup = replace(setup, engine_args={**setup.engine_args, **executor})
    second = setup.runner == "V2"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ[triton_cpu.SWITCH] = str(int(second))
    if second:
        triton_cpu.install_if_asked()

    from repage.demo.checkpoints import default_cache_dir
    from repage.demo.engine_run import create_engine, generate_round

    llm = create_engine(setup, default_cache_dir())
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    config = llm.llm_engine.vllm_config.cache_config
    result = {
        "layout": config.kv_cache_layout,
        "groups": len(cache.kv_cache_groups),
        "capacity": config.kv_cache_size_tokens,
        "tokens": [list(map(int, g.token_ids)) for g in generate_round(llm, setup)],
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
