# SPDX-License-Identifier: Apache-2.0
"""The plugin in API server, engine core and workers, forked and spawned; two engines in one."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from repage.demo.setups import SETUPS
from robustness.conftest import VARIABLES
from support.processes import output_of

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


def run(program: str, *arguments: str, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return output_of(
        [sys.executable, str(FOLDER / program), *arguments],
        {**environment, "VLLM_PLUGINS": "repage", "OMP_NUM_THREADS": "1", **variables},
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_registers_once(method: str) -> None:
    """Parent, child and grandchild load the plugin twice each."""
    out = run("process_program.py", method)
    (line,) = (line for line in out.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert len(found) == 3
    for process in found:
        assert len(process["registered"]) == 7
        assert (process["hooks"], process["handlers"]) == (1, 1)


@pytest.mark.engine
def test_a_packed_and_a_stock_engine_in_one_process(tmp_path: Path) -> None:
    out = tmp_path / "engines.json"
    run(
        "two_engines_program.py",
        str(out),
        REPAGE_CPU_PAGE="64",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    packed, stock = json.loads(out.read_text("utf-8"))
    setup = SETUPS["gemma4"]
    assert (packed["layout"], stock["layout"]) == ("BLHNC", "LBHNC")
    for record, expected in ((packed, setup.packed), (stock, setup.stock)):
        assert (record["groups"], record["capacity"]) == (expected.groups, expected.capacity)
    assert packed["tokens"] == stock["tokens"] == packed["again"]
