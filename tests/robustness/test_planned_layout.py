# SPDX-License-Identifier: Apache-2.0
"""What one engine leaves behind for the next one in the same process.

The planned layout (`repage.vllm.set_packed_mode`) belongs to the process, because vLLM collects
specs where no config is set; so every engine has to begin by saying its own. Real specs and real
planner, workers in this process. `test_vllm_033.py` runs this file once more with vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def ranks(clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Engines of one rank with mixed pages; each collects specs as it is planned by then."""
    del clean
    from repage.vllm.preference import install
    from support import fake_ranks as fakes

    monkeypatch.setenv("REPAGE_LAYOUT", "auto")
    install()

    def make(specs: Any = None) -> Any:
        worker = fakes.Worker(specs or fakes.headline(), fakes.Whole, ["LBHNC", "BLHNC"])
        return SimpleNamespace(worker=worker, executor=fakes.Ranks(worker), block=fakes.BLOCK)

    return make


def start(engine: Any) -> tuple[str, int]:
    """Return the layout that comes first and the block of the sliding-window layers."""
    (specs,) = engine.executor.get_kv_cache_specs()
    (layouts,) = engine.executor.get_supported_kv_cache_layouts()
    return layouts[0], specs["window.0"].block_size


def test_a_packed_engine_and_then_a_stock_one_on_request(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(ranks()) == ("BLHNC", 640)
    monkeypatch.setenv("REPAGE_LAYOUT", "stock")
    assert start(ranks()) == ("LBHNC", 64)
    monkeypatch.setenv("REPAGE_LAYOUT", "auto")
    assert start(ranks()) == ("BLHNC", 640)


def test_a_packed_engine_and_then_one_whose_connector_asks_for_another_layout(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repage.vllm.preference import planner_compat

    assert start(ranks()) == ("BLHNC", 640)
    monkeypatch.setattr(planner_compat, "connector_layout", lambda _config: "LBHNC")
    assert start(ranks()) == ("LBHNC", 64)


def test_a_packed_engine_and_then_one_on_a_vllm_that_decides_itself(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repage.vllm.preference import planner_compat

    assert start(ranks()) == ("BLHNC", 640)
    monkeypatch.setattr(planner_compat, "has_own_preference", lambda: True)
    assert start(ranks()) == ("LBHNC", 64)


def test_an_engine_that_failed_to_start_leaves_nothing(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repage.errors import UnsupportedLayoutError
    from support import fake_ranks as fakes

    engine = ranks()
    engine.worker.supported = ["BLHNC"]
    engine.worker.vllm_config.compilation_config.static_forward_context.update(
        {
            name: SimpleNamespace(get_attn_backend=lambda: fakes.Splitting)
            for name in ("full.0", "window.0")
        }
    )
    with pytest.raises(UnsupportedLayoutError):
        start(engine)
    monkeypatch.setenv("REPAGE_LAYOUT", "stock")
    assert start(ranks()) == ("LBHNC", 64)


def test_the_cpu_page_is_read_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from repage.vllm import compat
    from repage.vllm.cpu_attn import CPUAttentionPolicy
    from repage.vllm.policy import PageContext, choose_page
    from support.recording import World

    context = PageContext(World().spec(), compat.layout_by_name("BLHNC"))
    found = []
    for page in ("32", "64", "", "32"):
        monkeypatch.setenv("REPAGE_CPU_PAGE", page)
        choice = choose_page(CPUAttentionPolicy(), context)
        found.append(None if choice is None else choice.page_tokens)
    assert found == [32, 64, None, 32]
