# SPDX-License-Identifier: Apache-2.0
"""The cases of the planner with vLLM 0.33.0, in a process that imports that version."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.vllm_033 import needs_vllm_033, run_tests


@needs_vllm_033
@pytest.mark.parametrize("name", ["test_preference.py", "test_connectors.py"])
def test_cases(name: str) -> None:
    run_tests(Path(__file__).with_name(name))
