# SPDX-License-Identifier: Apache-2.0
"""Both versions of vLLM's planner, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("scenarios.py")
TESTS = Path(__file__).parents[1]
VLLM_033 = "REPAGE_TEST_VLLM_033"


@cache
def run_scenarios(site: str | None) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.pop("VLLM_KV_CACHE_LAYOUT", None)
    before = environment.get("PYTHONPATH") if site is None else site
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(TESTS)]))
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    if done.returncode or not lines:
        raise AssertionError(f"scenarios.py failed ({done.returncode}):\n{done.stderr[-4000:]}")
    return json.loads(lines[0].removeprefix("RESULTS "))


@pytest.fixture(params=["0.32", "0.33"])
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What every scenario gives with one version's planner."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    site = None
    if request.param == "0.33":
        site = os.environ.get(VLLM_033)
        if not site:
            pytest.skip(f"{VLLM_033} does not name the folder of vLLM 0.33.0")
    found = run_scenarios(site)
    assert found["version"].startswith(request.param)
    return found
