# SPDX-License-Identifier: Apache-2.0
"""The hooks with vLLM 0.33.0: the same tests, in a process that imports that version."""

from __future__ import annotations

from pathlib import Path

from support.vllm_033 import needs_vllm_033, run_tests


@needs_vllm_033
def test_hooks():
    run_tests(Path(__file__).with_name("test_hooks.py"))
