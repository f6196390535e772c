# SPDX-License-Identifier: Apache-2.0
"""A device to pretend to, a world of layers, and counters of what repage launches."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("flashinfer", "vllm") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    with warnings.catch_warnings():
        # vLLM's imports use what torch deprecates; repage's own code still runs with errors on.
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.model_executor.layers.attention")
        importlib.import_module("flashinfer")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPAGE_STRICT", "REPAGE_CPU_PAGE", "VLLM_KV_CACHE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)
    # Every id is checked against the pool.
    monkeypatch.setenv("REPAGE_DEBUG", "1")


def site_dir() -> Path | None:
    """The unpacked vLLM that this process imports; None for the installed one."""
    import vllm

    path = Path(vllm.__file__).parent.parent
    site = os.environ.get("REPAGE_TEST_VLLM_033")
    return path if site and path == Path(site) else None


@pytest.fixture
def on_path() -> Callable[[str], Any]:
    """Install a kernel path of the harness; returns the product's class of its backend."""
    from reference_kernels.harness import KERNEL_PATHS, HarnessSettings, install
    from repage.vllm import backends, flashinfer

    def use(path: str) -> Any:
        settings = HarnessSettings(path, vllm_033=site_dir())
        install(settings, settings.context())
        if KERNEL_PATHS[path].backend == "flash_attn":
            return backends.RepagedFlashAttentionBackend
        backend = backends.RepagedFlashInferBackend
        # The harness has put the stand-in of vLLM's Triton kernel back.
        flashinfer._install_page_list_kernel()
        return backend

    return use


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each op of repage is launched."""
    import repage

    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ("build_page_table", "build_kv_indices", "map_slots"):
        monkeypatch.setattr(repage, name, counted(name, getattr(repage, name)))
    build = repage.PageTableBuffer.build

    def counted_build(*args: Any, **kwargs: Any) -> Any:
        with_list = kwargs.get("kv_indptr") is not None
        counts["build_group_tables" if with_list else "build_page_table"] += 1
        return build(*args, **kwargs)

    monkeypatch.setattr(repage.PageTableBuffer, "build", counted_build)
    build_list = repage.PageTableBuffer.build_kv_indices
    monkeypatch.setattr(
        repage.PageTableBuffer, "build_kv_indices", counted("build_kv_indices", build_list)
    )
    return counts
