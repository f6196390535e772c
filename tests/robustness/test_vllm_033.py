# SPDX-License-Identifier: Apache-2.0
"""The guard and the processes with vLLM 0.33.0, in a process that imports that version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("REPAGE_TEST_VLLM_033")


@pytest.mark.skipif(not SITE, reason="REPAGE_TEST_VLLM_033 does not name the folder of vLLM 0.33.0")
@pytest.mark.parametrize("name", ["test_version_guard.py", "test_planned_layout.py"])
def test_robustness(name: str) -> None:
    tests = str(Path(__file__).with_name(name))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", tests],
        env={**os.environ, "PYTHONPATH": str(SITE), "REPAGE_EXPECT_VLLM": "0.33"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
