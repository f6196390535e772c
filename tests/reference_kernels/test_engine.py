# SPDX-License-Identifier: Apache-2.0
"""Real engines on vLLM's real FlashInfer and FlashAttention backends, stock and re-paged.

Re-paged are the classes that repage registers, with the pages that they choose. On the CPU the
reference kernels read what a page list or table names, so results differ from stock ones only
where prefixes of other lengths are reused.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_kernels.engine_run import EngineRun, launch
from reference_kernels.harness import HarnessSettings
from repage.demo.compare import IDENTICAL, compare
from repage.demo.result import RunResult

pytestmark = pytest.mark.engine

PRODUCT = "reference_kernels.paged_factory:product"
OTHER_PAGE = "reference_kernels.paged_factory:repaged"
LIMITED = "reference_kernels.paged_factory:limited"
STOCK_LAYOUT = "LBHNC"


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


def on_kernels(setup: str, layout: str, path: str, **settings: Any) -> EngineRun:
    """An engine on a kernel path; without a factory on vLLM's own backend."""
    harness = HarnessSettings(path, float32=setup.endswith("float32"), **settings)
    return EngineRun(setup, layout, harness)


def stock(setup: str, path: str, **settings: Any) -> EngineRun:
    return on_kernels(setup, STOCK_LAYOUT, path, **settings)


def product(setup: str, layout: str, path: str, **settings: Any) -> EngineRun:
    return on_kernels(setup, layout, path, factory=PRODUCT, **settings)


def largest_difference(left: RunResult, right: RunResult) -> float:
    """Of the logprobs; token ids must be equal."""
    assert compare(left, right, exact=False) == IDENTICAL
    return max(
        abs(first - second)
        for one, other in zip(left.rounds, right.rounds, strict=True)
        for expected, found in zip(one, other, strict=True)
        for first, second in zip(expected.logprobs, found.logprobs, strict=True)
    )


GEMMA = "gemma4-float32"
GEMMA_HD256 = "gemma4-hd256-float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "path", "kernels"),
    [
        (GEMMA, "fi-native", {"fi_prefill p64", "fi_decode p64"}),
        (GEMMA, "xqa", {"fi_prefill p64", "xqa_decode p64"}),
        (GEMMA, "trtllm-gen", {"trtllm_context p128", "trtllm_decode p128"}),
        (GEMMA_HD256, "fa4", {"fa4_hd256 p128"}),
    ],
)
def test_stock_backends_agree_with_cpu_attention(
    runs: KernelRuns, setup: str, path: str, kernels: set[str]
) -> None:
    """The only comparison with other code: that the kernels compute what vLLM means."""
    assert kernels <= runs.calls(stock(setup, path)).keys()
    reference = runs.get(EngineRun(setup, STOCK_LAYOUT))
    assert largest_difference(reference, runs.get(stock(setup, path))) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "layout", "path", "kernels"),
    [
        (GEMMA, "BLHNC", "fi-native", {"fi_prefill p64", "fi_decode p64"}),
        (GEMMA, "BLNHC", "xqa", {"fi_prefill p64", "xqa_decode p64"}),
        (GEMMA, "BLHNC", "trtllm-gen", {"trtllm_context p128", "trtllm_decode p128"}),
        (GEMMA_HD256, "BLHNC", "fa4", {"fa4_hd256 p128"}),
    ],
)
def test_repaged_backends_agree_with_stock(
    runs: KernelRuns, setup: str, layout: str, path: str, kernels: set[str]
) -> None:
    packed = product(setup, layout, path)
    called = runs.calls(packed).keys()
    assert kernels <= called
    # No kernel saw another page.
    assert {name.rpartition(" ")[2] for name in called if not name.startswith("write")} == {
        name.rpartition(" ")[2] for name in kernels
    }
    assert largest_difference(runs.get(stock(setup, path)), runs.get(packed)) < 1e-3
    reference = runs.get(EngineRun(setup, STOCK_LAYOUT))
    assert largest_difference(reference, runs.get(packed)) < 5e-3


@pytest.mark.slow
def test_pages_and_interiors_give_the_same_bits(runs: KernelRuns) -> None:
    """16-token pages, which the product takes only for blocks that larger ones do not divide."""
    small = on_kernels(GEMMA, "BLNHC", "fi-native", factory=OTHER_PAGE, page_tokens=16)
    assert "fi_decode p16" in runs.calls(small)
    assert compare(runs.get(product(GEMMA, "BLHNC", "fi-native")), runs.get(small)) == IDENTICAL


# A grouped target with an ungrouped drafter: vLLM takes 128-token pages for both on SM100 and then
# dies (`reference_kernels.paged_factory.limited`), so its pages are held at 64.
LIMIT = {"factory": LIMITED, "page_tokens": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "layout", "path", "reference", "kernels"),
    [
        # fa2 verifies drafts, and drafts a block at once, with the prefill kernel.
        ("hybrid-dflash", "BLNHC", "fi-native", {}, {"fi_prefill p64"}),
        ("hybrid-dflash", "BLHNC", "trtllm-gen", LIMIT, {"trtllm_decode p128", "fi_prefill p64"}),
        (
            "hybrid-eagle3-v2",
            "BLHNC",
            "trtllm-gen",
            LIMIT,
            {"trtllm_decode p128", "trtllm_decode p64"},
        ),
        ("headline", "BLHNC", "fi-native", {}, {"fi_prefill p64"}),
        ("hybrid-hd256-dflash", "BLNHC", "fa4", {}, {"fa4_hd256 p128"}),
    ],
)
def test_repaged_drafts_are_exact(
    runs: KernelRuns,
    setup: str,
    layout: str,
    path: str,
    reference: dict[str, Any],
    kernels: set[str],
) -> None:
    """Target and drafter tokens, logprobs and drafts, with both runners."""
    packed = product(setup, layout, path)
    assert kernels <= runs.calls(packed).keys()
    expected, result = runs.get(stock(setup, path, **reference)), runs.get(packed)
    assert expected.drafts
    assert compare(expected, result) == IDENTICAL
    assert result.num_groups < expected.num_groups


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
    with pytest.raises(RuntimeError, match=re.escape(FAULTS[fault])):
        runs.get(product(GEMMA, "BLHNC", "trtllm-gen", fault=fault))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong-step", "half-unit", "stale-table"])
def test_faults_are_caught_in_page_lists(runs: KernelRuns, fault: str) -> None:
    """Lists have no dead columns, and writes do not go by them."""
    with pytest.raises(RuntimeError, match=re.escape(FAULTS[fault])):
        runs.get(product(GEMMA, "BLHNC", "fi-native", fault=fault))


@pytest.mark.slow
def test_dead_columns_behind_the_slice_are_caught(runs: KernelRuns) -> None:
    """FlashAttention's impl slices the table to the live pages."""
    with pytest.raises(RuntimeError, match="columns behind the slice"):
        runs.get(product(GEMMA_HD256, "BLHNC", "fa4", fault="wild-dead-columns"))


VLLM_033 = os.environ.get("REPAGE_TEST_VLLM_033")


@pytest.mark.slow
@pytest.mark.skipif(VLLM_033 is None, reason="REPAGE_TEST_VLLM_033 not set")
@pytest.mark.parametrize(
    ("setup", "layout", "path"),
    [
        (GEMMA, "BLHNC", "fi-native"),
        ("hybrid-eagle3-v2", "BLHNC", "trtllm-gen"),
        (GEMMA_HD256, "BLHNC", "fa4"),
    ],
)
def test_backend_modules_of_033(runs: KernelRuns, setup: str, layout: str, path: str) -> None:
    """0.33.0's module, re-paged, gives what 0.32.0's gives, to the last bit."""
    newer = product(setup, layout, path, vllm_033=Path(str(VLLM_033)))
    assert compare(runs.get(product(setup, layout, path)), runs.get(newer)) == IDENTICAL
