# SPDX-License-Identifier: Apache-2.0
"""Real engines on vLLM's real FlashInfer and FlashAttention backends, stock and re-paged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_kernels.engine_run import EngineRun, launch
from reference_kernels.harness import HarnessSettings
from repage.demo.compare import IDENTICAL, compare
from repage.demo.result import RunResult

pytestmark = pytest.mark.engine

REPAGED = "reference_kernels.paged_factory:repaged"
PRODUCT_FACTORY = "reference_kernels.paged_factory:product"
LIMITED = "reference_kernels.paged_factory:limited"
STOCK_LAYOUT = "LBHNC"
Runner = Callable[[EngineRun], RunResult]


class KernelRuns:
    """Runs engines once per session; what their kernels counted is next to the record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[EngineRun, tuple[RunResult, dict[str, Any]]] = {}

    def get(self, engine_run: EngineRun) -> RunResult:
        return self._get(engine_run)[0]

    def calls(self, engine_run: EngineRun) -> dict[str, int]:
        report = self._get(engine_run)[1]
        # Every one of these read its K and V through the provenance map.
        assert report["checked_tokens"] > 100_000
        return dict(report["calls"])

    def _get(self, engine_run: EngineRun) -> tuple[RunResult, dict[str, Any]]:
        if engine_run not in self._done:
            out = self._folder / f"run{len(self._done)}.json"
            report = out.with_suffix(".calls")
            harness = engine_run.harness and replace(engine_run.harness, report=report)
            result = launch(replace(engine_run, harness=harness), out)
            counted = json.loads(report.read_text()) if harness is not None else {}
            self._done[engine_run] = (result, counted)
        return self._done[engine_run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> KernelRuns:
    return KernelRuns(tmp_path_factory.mktemp("kernels"))


def on_kernels(
    setup: str, layout: str, path: str, page: int | None = None, **more: Any
) -> EngineRun:
    """A stock engine, or with ``page`` a re-paged one."""
    factory = None if page is None else REPAGED
    settings = HarnessSettings(path, factory, float32=setup.endswith("float32"), page_tokens=page)
    return EngineRun(setup, layout, replace(settings, **more))


def largest_difference(left: RunResult, right: RunResult) -> float:
    """Of the logprobs; token ids must be equal."""
    assert compare(left, right, exact=False) == IDENTICAL
    return max(
        abs(first - second)
        for one, other in zip(left.rounds, right.rounds, strict=True)
        for expected, found in zip(one, other, strict=True)
        for first, second in zip(expected.logprobs, found.logprobs, strict=True)
    )


STOCK = [
    ("gemma4-float32", "fi-native", {"fi_prefill p64", "fi_decode p64"}),
    ("gemma4-float32", "xqa", {"fi_prefill p64", "xqa_decode p64"}),
    ("gemma4-float32", "trtllm-gen", {"trtllm_context p128", "trtllm_decode p128"}),
    ("gemma4-float32", "fa2", {"fa2 p640"}),
    ("gemma4-float32", "fa3", {"fa3 p640"}),
    ("gemma4-hd256-float32", "fa4", {"fa4_hd256 p128"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "path", "kernels"), STOCK)
def test_stock_backends_agree_with_cpu_attention(
    runs: KernelRuns, setup: str, path: str, kernels: set[str]
) -> None:
    """The only comparison with other code: that the kernels compute what vLLM means."""
    stock = on_kernels(setup, STOCK_LAYOUT, path)
    assert kernels <= runs.calls(stock).keys()
    reference = runs.get(EngineRun(setup, STOCK_LAYOUT))
    assert largest_difference(reference, runs.get(stock)) < 5e-3


GEMMA = [
    ("gemma4-float32", "BLHNC", "fi-native", 64, "fi_decode p64"),
    ("gemma4-float32", "BLNHC", "fi-native", 16, "fi_decode p16"),
    ("gemma4-float32", "BLNHC", "xqa", 32, "xqa_decode p32"),
    ("gemma4-float32", "BLHNC", "trtllm-gen", 128, "trtllm_decode p128"),
    ("gemma4-float32", "BLHNC", "trtllm-gen", 64, "trtllm_context p64"),
    ("gemma4-hd256-float32", "BLHNC", "fa4", 128, "fa4_hd256 p128"),
    ("gemma4-hd256-float32", "BLNHC", "fa4", 128, "fa4_hd256 p128"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "layout", "path", "page", "kernel"), GEMMA)
def test_repaged_backends_agree_with_stock(
    runs: KernelRuns, setup: str, layout: str, path: str, page: int, kernel: str
) -> None:
    """Prefixes of other lengths are reused, so sums are added up in another order."""
    packed = on_kernels(setup, layout, path, page)
    assert kernel in runs.calls(packed)
    stock = runs.get(on_kernels(setup, STOCK_LAYOUT, path))
    assert largest_difference(stock, runs.get(packed)) < 1e-3


# vLLM's own page would be 128 with trtllm-gen, which the ungrouped drafter does not take.
DRAFTERS = [
    ("hybrid-dflash", "BLHNC", "fi-native", 64, None),
    ("hybrid-dflash", "BLNHC", "fi-native", 16, None),
    ("hybrid-dflash", "BLHNC", "trtllm-gen", 64, 64),
    ("hybrid-dflash", "BLNHC", "xqa", 32, None),
    ("hybrid-eagle3-v2", "BLHNC", "trtllm-gen", 64, 64),
    ("headline", "BLHNC", "fi-native", 64, None),
    ("headline", "BLHNC", "trtllm-gen", 32, 64),
    ("hybrid-hd256-dflash", "BLNHC", "fa4", 128, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "layout", "path", "page", "stock_page"), DRAFTERS)
def test_repaged_drafts_are_exact(
    runs: KernelRuns, setup: str, layout: str, path: str, page: int, stock_page: int | None
) -> None:
    stock = on_kernels(setup, STOCK_LAYOUT, path)
    if stock_page is not None:
        stock = on_kernels(setup, STOCK_LAYOUT, path, stock_page, factory=LIMITED)
    packed = on_kernels(setup, layout, path, page)
    reference, result = runs.get(stock), runs.get(packed)
    assert any(f"p{page}" in call for call in runs.calls(packed))
    assert reference.drafts
    assert compare(reference, result) == IDENTICAL
    assert result.num_groups < reference.num_groups


PRODUCT = [
    ("BLNHC", "fi-native", "fi_decode p64"),
    ("BLNHC", "xqa", "xqa_decode p64"),
    ("BLHNC", "trtllm-gen", "trtllm_decode p128"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "path", "kernel"), PRODUCT)
def test_product_chooses_the_largest_page(
    runs: KernelRuns, layout: str, path: str, kernel: str
) -> None:
    stock = runs.get(on_kernels("gemma4-float32", STOCK_LAYOUT, path))
    packed = on_kernels("gemma4-float32", layout, path, factory=PRODUCT_FACTORY)
    assert kernel in runs.calls(packed)
    assert largest_difference(stock, runs.get(packed)) < 1e-3


@pytest.mark.slow
def test_plugin_in_an_engine_core_of_its_own(runs: KernelRuns) -> None:
    here = on_kernels("gemma4-float32", "BLHNC", "trtllm-gen", 64)
    elsewhere = runs.get(replace(here, multiprocess=True))
    assert compare(runs.get(here), elsewhere) == IDENTICAL


FAULTS = {
    "wrong-step": "ProvenanceError",
    "half-unit": "ProvenanceError",
    "manager-slots": "ProvenanceError",
    "stale-table": "ProvenanceError",
    "wild-dead-columns": "StrictKernelError",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught_by_the_kernels(runs: KernelRuns, fault: str) -> None:
    broken = on_kernels("gemma4-float32", "BLHNC", "trtllm-gen", 64, fault=fault)
    with pytest.raises(RuntimeError, match=re.escape(FAULTS[fault])):
        runs.get(broken)


@pytest.mark.slow
def test_dead_columns_behind_the_slice_are_caught(runs: KernelRuns) -> None:
    """FlashAttention's impl slices the table to the live pages."""
    fault = {"fault": "wild-dead-columns"}
    with pytest.raises(RuntimeError, match="columns behind the slice"):
        runs.get(on_kernels("gemma4-hd256-float32", "BLHNC", "fa4", 128, **fault))


VLLM_033 = os.environ.get("REPAGE_TEST_VLLM_033")


@pytest.mark.slow
@pytest.mark.skipif(VLLM_033 is None, reason="REPAGE_TEST_VLLM_033 not set")
@pytest.mark.parametrize(
    ("setup", "layout", "path", "page"),
    [
        ("gemma4-float32", "BLHNC", "fi-native", 64),
        ("hybrid-eagle3-v2", "BLHNC", "fi-native", 64),
        ("gemma4-float32", "BLHNC", "trtllm-gen", 64),
        ("hybrid-dflash", "BLNHC", "xqa", 32),
        ("gemma4-hd256-float32", "BLHNC", "fa4", 128),
    ],
)
def test_backend_modules_of_033(
    runs: KernelRuns, setup: str, layout: str, path: str, page: int
) -> None:
    """0.33.0's module gives what 0.32.0's gives, to the last bit."""
    installed = on_kernels(setup, layout, path, page)
    newer = on_kernels(setup, layout, path, page, vllm_033=Path(str(VLLM_033)))
    assert compare(runs.get(installed), runs.get(newer)) == IDENTICAL
