# SPDX-License-Identifier: Apache-2.0
"""The preference in a real engine: it packs by itself where pages are mixed and it pays."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from repage.demo.setups import SETUPS
from support.processes import output_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROGRAM = Path(__file__).with_name("engine_program.py")


def run(name: str, folder: Path, *executor: str, **variables: str) -> tuple[dict[str, Any], str]:
    out = folder / "result.json"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("REPAGE_")},
        "VLLM_PLUGINS": "repage",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "REPAGE_CPU_PAGE": "64",
        **variables,
    }
    environment.pop("VLLM_KV_CACHE_LAYOUT", None)
    log = output_of(
        [sys.executable, str(PROGRAM), name, str(out), *executor], environment, seconds=600
    )
    return json.loads(out.read_text("utf-8")), log


@pytest.mark.parametrize("name", ["hybrid-dflash", "gemma4"])
def test_mixed_pages_are_packed_and_the_log_says_why(name, tmp_path):
    setup = SETUPS[name]
    result, log = run(name, tmp_path, REPAGE_DUMP=str(tmp_path / "dump"))
    assert result["layout"] == "BLHNC"
    assert (result["groups"], result["capacity"]) == (setup.packed.groups, setup.packed.capacity)
    why = f"{setup.packed.groups} groups instead of {setup.stock.groups}"
    assert any("repage: packed KV cache" in line and why in line for line in log.splitlines())
    (dump,) = (tmp_path / "dump").iterdir()
    assert json.loads(dump.read_text("utf-8"))["decision"]["verdict"] == "packed"


def test_pages_of_one_size_stay_stock(tmp_path):
    result, log = run("uniform", tmp_path)
    assert result["layout"] == "LBHNC"
    assert "repage: stock KV cache, layout LBHNC: all layers have pages of one size" in log


def test_stock_on_request_generates_the_same_tokens(tmp_path):
    packed, _ = run("hybrid-dflash", tmp_path)
    stock, log = run("hybrid-dflash", tmp_path, REPAGE_LAYOUT="stock")
    assert stock["layout"] == "LBHNC"
    assert stock["groups"] == SETUPS["hybrid-dflash"].stock.groups
    assert "repage: packed" not in log
    assert packed["tokens"] == stock["tokens"]


def test_workers_in_processes_of_their_own_are_asked_over_rpc(tmp_path):
    setup = SETUPS["hybrid-dflash"]
    result, log = run("hybrid-dflash", tmp_path, "mp")
    assert (result["layout"], result["groups"]) == ("BLHNC", setup.packed.groups)
    assert any("repage: packed KV cache" in line for line in log.splitlines())
