# SPDX-License-Identifier: Apache-2.0
"""MLA on packed blocks: a real engine on vLLM's own CPU_MLA kernel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_kernels.mla_engine import ENVIRONMENT
from repage.demo.processes import run_logged

pytestmark = pytest.mark.engine
TESTS = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run an engine to its end; its log is the error of one that fails."""
    out, log = folder / "result.json", folder / "log"
    command = [sys.executable, "-m", "reference_kernels.mla_engine", *arguments, "--out", str(out)]
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": search}
    if run_logged(command, environment, log, timeout=300) != 0:
        raise RuntimeError(log.read_text()[-6000:])
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("stock"), "--layout", "LBHNC", "--block", "16")


def test_packed_latents_are_read_in_kernel_pages(stock: dict[str, Any], tmp_path: Path) -> None:
    packed = run(tmp_path, "--layout", "BLHNC", "--block", "640", "--repaged")
    assert packed["page"] == 16
    # Three layers lie side by side in each block.
    assert packed["block_strides"] == [3 * 640 * 576]
    assert stock["page"] is None
    assert packed["generations"] == stock["generations"]


def test_vllm_itself_refuses_to_split_such_blocks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="CPU_MLA needs 16-token kernel blocks, which packed"):
        run(tmp_path, "--layout", "BLHNC", "--block", "64")


def test_a_wrong_step_shows_in_the_tokens(stock: dict[str, Any], tmp_path: Path) -> None:
    """Pages of other layers are read: nothing but the result can tell."""
    broken = run(
        tmp_path, "--layout", "BLHNC", "--block", "64", "--repaged", "--fault", "wrong-step"
    )
    assert broken["generations"] != stock["generations"]
