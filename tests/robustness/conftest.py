# SPDX-License-Identifier: Apache-2.0
"""A process in which the plugin is not registered, and the lines that it logs."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator

import pytest

# Read and set by the plugin.
VARIABLES = (
    *("REPAGE_DISABLE", "REPAGE_STRICT", "REPAGE_DEBUG", "REPAGE_CPU_PAGE", "REPAGE_LAYOUT"),
    *("REPAGE_DUMP", "VLLM_KV_CACHE_LAYOUT"),
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither registered backends, nor hooks, nor a planned layout; before and after."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports use what torch deprecates
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.executor.abstract
        import vllm.v1.worker.cpu_model_runner  # noqa: F401
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from repage.vllm import set_packed_mode
    from repage.vllm.preference.hooks import remove_hooks
    from repage.vllm.registration import BACKENDS

    for name in BACKENDS:
        AttentionBackendEnum[name].clear_override()
    remove_hooks()
    set_packed_mode(None)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Lines that reach vLLM's handlers from now on."""
    from support import vllm_log

    with vllm_log.kept(monkeypatch) as records:
        yield records
