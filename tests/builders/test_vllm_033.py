# SPDX-License-Identifier: Apache-2.0
"""The builders of vLLM 0.33.0: the same tests, in a process that imports that version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("REPAGE_TEST_VLLM_033")
HERE = Path(__file__).parent


def test_the_version_under_test() -> None:
    import vllm

    expected = os.environ.get("REPAGE_EXPECT_VLLM", "0.32")
    assert vllm.__version__.startswith(expected)


@pytest.mark.skipif(
    not SITE or "REPAGE_EXPECT_VLLM" in os.environ,
    reason="REPAGE_TEST_VLLM_033 does not name the folder of vLLM 0.33.0",
)
def test_builders() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "default", str(HERE)],
        env={
            **os.environ,
            "PYTHONPATH": str(SITE),
            "REPAGE_EXPECT_VLLM": "0.33",
            # The package is built for CUDA, the machine has no such device.
            "VLLM_TARGET_DEVICE": "cpu",
        },
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 60
