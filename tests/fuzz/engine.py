# SPDX-License-Identifier: Apache-2.0
"""Random traffic on a stock and a packed engine: every token must be the same.

The model is Gemma-like with two head widths, in float32: prefix hits of other lengths and
preemption at other moments change the order of additions, and float32 keeps greedy tokens apart.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz.traffic import make_traffic
from repage.demo.launch import STOCK, Variant, child_environment, packed
from repage.demo.setups import SETUPS, EngineSetup

PROGRAM = Path(__file__).with_name("engine_program.py")
BLOCK_BYTES = 2 * 1_310_720
LONGEST_PROMPT = 1900


def engine_setup(seed: int) -> EngineSetup:
    """Return an engine with few blocks, prefix caching and chunked prefill."""
    source = random.Random(seed)
    setup = SETUPS["gemma4-preempted"]
    arguments = {
        **setup.engine_args,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": source.choice([256, 512, 768]),
        "kv_cache_memory_bytes": source.choice([14, 16, 20, 28]) * BLOCK_BYTES,
    }
    return replace(setup, engine_args=arguments)


def packed_variant(seed: int) -> Variant:
    return packed(random.Random(seed).choice([32, 64, 128]))


def run(seed: int, variant: Variant, count: int, folder: Path) -> dict[str, Any]:
    """Run one engine in a process of its own.

    Raises
    ------
    AssertionError
        When it does not end well; with the end of its log.
    """
    out = folder / f"{seed}-{variant.label()}.json"
    environment = child_environment(engine_setup(seed), variant)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(PROGRAM.parents[1]), environment.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(seed), str(count), str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{variant.label()}:\n{done.stdout[-6000:]}"
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def check(seed: int, folder: Path, count: int = 40) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send the traffic of one seed to both engines and compare.

    Returns
    -------
    tuple of dict
        The stock and the packed record.

    Raises
    ------
    AssertionError
        Where a request's tokens differ, or the packed engine did not read kernel pages.
    """
    variant = packed_variant(seed)
    stock, found = run(seed, STOCK, count, folder), run(seed, variant, count, folder)
    assert (stock["layout"], found["layout"]) == (STOCK.layout, variant.layout)
    assert found["pages"] == [variant.page]
    lengths = [
        request.max_tokens if request.abort_after is None else request.abort_after
        for request in make_traffic(seed, count, LONGEST_PROMPT)
    ]
    assert [len(tokens) for tokens in stock["tokens"]] == lengths
    wrong = [
        index
        for index, (a, b) in enumerate(zip(stock["tokens"], found["tokens"], strict=True))
        if a != b
    ]
    assert not wrong, f"requests {wrong} differ between stock and packed ({variant.label()})"
    return stock, found
