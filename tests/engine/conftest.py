# SPDX-License-Identifier: Apache-2.0
"""The engine runs as a fixture, and how long they took."""

from __future__ import annotations

import importlib.util

import pytest

from engine.runs import Duration, EngineRuns
from repage.demo.checkpoints import default_cache_dir

_durations = pytest.StashKey[list[Duration]]()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> EngineRuns:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    runs = EngineRuns(tmp_path_factory.mktemp("engine"), default_cache_dir())
    request.config.stash[_durations] = runs.durations
    return runs


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    durations = config.stash.get(_durations, [])
    if not durations:
        return
    terminalreporter.section("engine runs")
    for name, total, generating in durations:
        terminalreporter.line(f"{name:45} {total:6.1f} s, {generating:6.1f} s generating")
    terminalreporter.line(f"{'total':45} {sum(item.total for item in durations):6.1f} s")
