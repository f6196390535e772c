# SPDX-License-Identifier: Apache-2.0
"""The builders of vLLM 0.33.0: the same tests, in a process that imports that version."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.vllm_033 import needs_vllm_033, run_tests


def test_the_version_under_test() -> None:
    import vllm

    expected = os.environ.get("REPAGE_EXPECT_VLLM", "0.32")
    assert vllm.__version__.startswith(expected)


@needs_vllm_033
@pytest.mark.skipif("REPAGE_EXPECT_VLLM" in os.environ, reason="this is the process of that run")
def test_builders() -> None:
    passed = re.search(r"(\d+) passed", run_tests(Path(__file__).parent))
    assert passed is not None
    assert int(passed[1]) > 60
