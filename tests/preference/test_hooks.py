# SPDX-License-Identifier: Apache-2.0
"""The hooks on executors of several ranks: real specs, real planner, fake workers."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.executor.abstract import Executor

from repage.errors import SettingError, UnsupportedLayoutError
from repage.planner.dump import plan_dump
from repage.vllm import compat, layouts
from repage.vllm.preference import hooks, install, planner_compat
from repage.vllm.preference.settings import LayoutMode, PreferenceSettings
from support.fake_ranks import (
    DRAFTER,
    STATE,
    TARGET,
    Ranks,
    Splitting,
    Whole,
    Worker,
    headline,
)
from support.specs import BLOCK, attention, layers

ALL = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    for name in ("REPAGE_LAYOUT", "REPAGE_DUMP", "REPAGE_STRICT", "VLLM_KV_CACHE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)
    install()
    yield
    hooks.remove_hooks()
    layouts.set_packed_mode(None)


@pytest.fixture
def records():
    """Lines of the logger ``repage``."""
    found: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Collect()
    logger = logging.getLogger("repage")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def run(executor: Ranks) -> tuple[Any, list[list[str]]]:
    """The calls of the engine core."""
    specs = executor.get_kv_cache_specs()
    return specs, executor.get_supported_kv_cache_layouts()


def test_this_is_the_expected_vllm():
    expected = os.environ.get("REPAGE_EXPECT_VLLM", "0.32")
    assert compat.vllm_version().startswith(expected)


def test_packed_where_it_pays_with_the_specs_of_a_packed_run(records):
    worker = Worker(headline(), Whole, ["LBHNC", "BLHNC"])
    specs, lists = run(Ranks(worker))
    assert lists == [["BLHNC", "LBHNC"]]
    assert specs[0]["window.0"].block_size == BLOCK
    assert worker.modes == [None, "BLHNC"]
    assert layouts.packed_layout().name == "BLHNC"
    lines = [
        r for r in records if r.levelno == logging.INFO and "packed KV cache" in r.getMessage()
    ]
    assert len(lines) == 1
    assert "5 groups instead of 46" in lines[0].getMessage()
    tables = [r for r in records if r.levelno == logging.DEBUG]
    assert "15,728,640" in tables[0].getMessage()


def test_stock_where_pages_are_of_one_size():
    worker = Worker(layers(state=(STATE, 30), full=(TARGET, 10)), Whole, ["LBHNC", "BLHNC"])
    specs, lists = run(Ranks(worker))
    assert lists == [["LBHNC", "BLHNC"]]
    assert specs[0] == worker.layers
    assert layouts.packed_layout() is None


def test_stock_specs_come_back_where_packing_does_not_pay():
    """Gemma-like: the window layers keep the small blocks of a layer-compact run."""
    kinds = layers(
        full=(attention(4, 512, block=64), 5), window=(attention(16, 256, 1024, block=64), 25)
    )
    worker = Worker(kinds, Whole, ["LBHNC", "BLHNC"])
    specs, lists = run(Ranks(worker, length=65_536))
    assert lists == [["LBHNC", "BLHNC"]]
    assert specs[0]["window.0"].block_size == 64
    assert layouts.packed_layout() is None


def test_a_backend_that_must_split_is_named(records):
    worker = Worker(headline(), Splitting, ["LBHNC", "BLHNC"])
    _, lists = run(Ranks(worker))
    assert lists == [["LBHNC", "BLHNC"]]
    assert any("FIXED" in r.getMessage() and "stock KV cache" in r.getMessage() for r in records)


def test_one_rank_that_cannot_keeps_all_stock():
    ranks = [
        Worker(headline(), Whole, ["LBHNC", "BLHNC"]),
        Worker(headline(), Splitting, ["LBHNC", "BLHNC"]),
    ]
    _, lists = run(Ranks(*ranks))
    assert lists == [["LBHNC", "BLHNC"]] * 2


def test_pipeline_of_a_state_stage_and_an_attention_stage():
    """Their lists differ: the intersection, in rank 0's order, packed first."""
    first = Worker(layers(state=(STATE, 30)), Whole, ALL)
    second = Worker(layers(full=(TARGET, 10), draft=(DRAFTER, 1)), Whole, ["LBHNC", "BLHNC"])
    specs, lists = run(Ranks(first, second))
    assert lists == [["BLHNC", "LBHNC"]] * 2
    assert [set(rank) for rank in specs] == [set(first.layers), set(second.layers)]


def test_intersection_keeps_the_order_of_rank_0():
    uniform = layers(full=(TARGET, 10))
    ranks = [
        Worker(uniform, Whole, ["LBHNC", "LBNHC", "BLHNC"]),
        Worker(uniform, Whole, ["BLHNC", "LBNHC", "LBHNC"]),
    ]
    assert run(Ranks(*ranks))[1] == [["LBHNC", "LBNHC", "BLHNC"]] * 2


def test_disjoint_lists_name_ranks_and_backends():
    ranks = [
        Worker(headline(), Whole, ["LBNHC"]),
        Worker(headline(), Splitting, ["LBHNC", "BLHNC"]),
    ]
    with pytest.raises(UnsupportedLayoutError, match=r"rank 0 \(WHOLE\).*rank 1 \(FIXED\)"):
        run(Ranks(*ranks))


def test_the_users_layout_outranks_the_preference(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    worker = Worker(headline(), Whole, ["LBHNC", "BLHNC"])
    _, lists = run(Ranks(worker))
    assert lists == [["LBHNC", "BLHNC"]]
    assert worker.modes == [None]


def test_a_connectors_layout_outranks_the_preference(monkeypatch):
    monkeypatch.setattr(planner_compat, "connector_layout", lambda _config: "LBHNC")
    _, lists = run(Ranks(Worker(headline(), Whole, ["LBHNC", "BLHNC"])))
    assert lists == [["LBHNC", "BLHNC"]]


def test_a_connector_that_asks_for_packed_blocks_gets_packed_specs(monkeypatch):
    monkeypatch.setattr(planner_compat, "connector_layout", lambda _config: "BLHNC")
    specs, _ = run(Ranks(Worker(headline(), Whole, ["LBHNC", "BLHNC"])))
    assert specs[0]["window.0"].block_size == BLOCK


def test_a_vllm_with_its_own_preference_is_left_alone(monkeypatch):
    monkeypatch.setattr(planner_compat, "has_own_preference", lambda: True)
    worker = Worker(headline(), Whole, ["LBHNC", "BLHNC"])
    assert run(Ranks(worker))[1] == [["LBHNC", "BLHNC"]]
    assert worker.modes == [None]


class TestModes:
    def test_stock(self, monkeypatch):
        monkeypatch.setenv("REPAGE_LAYOUT", "stock")
        assert run(Ranks(Worker(headline(), Whole, ["LBHNC", "BLHNC"])))[1] == [["LBHNC", "BLHNC"]]

    def test_packed_although_it_does_not_pay(self, monkeypatch):
        monkeypatch.setenv("REPAGE_LAYOUT", "packed")
        worker = Worker(layers(full=(TARGET, 10)), Whole, ["LBHNC", "BLHNC"])
        assert run(Ranks(worker))[1] == [["BLHNC", "LBHNC"]]

    def test_packed_where_it_cannot_be_is_an_error(self, monkeypatch):
        monkeypatch.setenv("REPAGE_LAYOUT", "packed")
        with pytest.raises(UnsupportedLayoutError, match=r"REPAGE_LAYOUT=packed.*FIXED"):
            run(Ranks(Worker(headline(), Splitting, ["LBHNC", "BLHNC"])))

    def test_only_packed_layouts_left_and_a_backend_that_cannot(self):
        with pytest.raises(UnsupportedLayoutError, match=r"block-outermost layouts only.*FIXED"):
            run(Ranks(Worker(headline(), Splitting, ["BLHNC"])))

    def test_unknown_values(self):
        with pytest.raises(SettingError, match="auto, packed, stock"):
            PreferenceSettings.from_env({"REPAGE_LAYOUT": "best"})
        assert PreferenceSettings.from_env({}).mode is LayoutMode.AUTO


def test_a_decision_that_fails_leaves_the_run_stock(monkeypatch, records):
    def fail(*_: Any) -> None:
        raise RuntimeError("planner changed")

    monkeypatch.setattr(hooks, "choose", fail)
    worker = Worker(headline(), Whole, ["LBHNC", "BLHNC"])
    assert run(Ranks(worker))[1] == [["LBHNC", "BLHNC"]]
    assert any("planner changed" in record.getMessage() for record in records)
    monkeypatch.setenv("REPAGE_STRICT", "1")
    with pytest.raises(RuntimeError, match="planner changed"):
        run(Ranks(worker))


def test_a_refused_cache_format_keeps_the_run_stock(records):
    class Refusing(Worker):
        def get_kv_cache_spec(self) -> dict[str, Any]:
            if layouts.packed_layout() is not None:
                raise ValueError("NVFP4 is not split")
            return super().get_kv_cache_spec()

    assert run(Ranks(Refusing(headline(), Whole, ["LBHNC", "BLHNC"])))[1] == [["LBHNC", "BLHNC"]]
    assert any("NVFP4 is not split" in record.getMessage() for record in records)


def test_a_grouping_that_vllm_rejects_keeps_the_run_stock(monkeypatch, records):
    validate = planner_compat.validate_layout

    def reject(layout: str, groups: Any) -> None:
        if layout == "BLHNC":
            raise ValueError("no such packing")
        validate(layout, groups)

    monkeypatch.setattr(planner_compat, "validate_layout", reject)
    assert run(Ranks(Worker(headline(), Whole, ["LBHNC", "BLHNC"])))[1] == [["LBHNC", "BLHNC"]]
    assert any("no such packing" in record.getMessage() for record in records)


def test_installing_twice_wraps_once():
    before = Executor.get_kv_cache_specs
    install()
    assert Executor.get_kv_cache_specs is before


def test_a_dump_explains_the_decision_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("REPAGE_DUMP", str(tmp_path / "dumps"))
    run(Ranks(Worker(headline(), Whole, ["LBHNC", "BLHNC"])))
    (path,) = (tmp_path / "dumps").iterdir()
    assert json.loads(path.read_text())["decision"]["verdict"] == "packed"
    result = plan_dump(path, min_group_layers=(3,))
    assert [plan.num_groups for plan in result.plans] == [46, 5]
    assert result.decision.verdict == "packed"
    assert result.what_if[0][1].num_groups == 17
    assert result.manager_block == BLOCK
