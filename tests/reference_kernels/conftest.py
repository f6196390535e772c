# SPDX-License-Identifier: Apache-2.0
"""Leaves these tests out where the real libraries, whose calls they take, are not installed."""

from __future__ import annotations

import importlib.util

MISSING = [name for name in ("flashinfer", "vllm") if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    if MISSING:
        return f"reference_kernels: left out, {' and '.join(MISSING)} not installed"
    return "reference_kernels: on the real flashinfer and vllm"
