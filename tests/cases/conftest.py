# SPDX-License-Identifier: Apache-2.0
"""vLLM for the cases that need it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest


@pytest.fixture(scope="session")
def vllm() -> None:
    """Import vLLM's backends, whose imports use what torch deprecates."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("attention.backends.cpu_attn", "worker.utils", "worker.block_table"):
            importlib.import_module(f"vllm.v1.{module}")
