# SPDX-License-Identifier: Apache-2.0
"""Test files once more, in a process that imports vLLM 0.33.0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("REPAGE_TEST_VLLM_033")
needs_vllm_033 = pytest.mark.skipif(
    not SITE, reason="REPAGE_TEST_VLLM_033 does not name the folder of vLLM 0.33.0"
)


def run_tests(path: Path) -> str:
    """Run a file or folder of tests and return what pytest printed; fails when one of them does."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            str(path),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(SITE),
            "REPAGE_EXPECT_VLLM": "0.33",
            # The package is built for CUDA, the machine may have no such device.
            "VLLM_TARGET_DEVICE": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
