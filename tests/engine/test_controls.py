# SPDX-License-Identifier: Apache-2.0
"""Faults made on purpose: what the comparisons must catch, and what stock vLLM refuses."""

from __future__ import annotations

import pytest

from engine.runs import EngineRuns
from repage.demo.compare import IDENTICAL, compare
from repage.demo.launch import STOCK, RunFailedError, Variant, packed
from repage.demo.setups import PACKED_LAYOUT

pytestmark = pytest.mark.engine

STOCK_PACKED = Variant(PACKED_LAYOUT, plugin=False)


@pytest.mark.parametrize("fault", ["wrong-step", "wrong-slots"])
def test_wrong_addresses_are_seen(engines: EngineRuns, fault: str) -> None:
    stock = engines.get("hybrid-dflash", STOCK)
    assert compare(stock, engines.get("hybrid-dflash", packed(32))) == IDENTICAL
    broken = engines.get("hybrid-dflash", packed(32), fault)
    assert compare(stock, broken) != IDENTICAL
    assert broken.drafts != stock.drafts


@pytest.mark.parametrize("page", [32, None])
def test_blocks_of_recurrent_states_must_be_zeroed(engines: EngineRuns, page: int | None) -> None:
    """Without the plugin's repair vLLM's V1 CPU runner reads old state bytes as keys and values."""
    stock = engines.get("hybrid-dflash", STOCK)
    assert compare(stock, engines.get("hybrid-dflash", packed(page))) == IDENTICAL
    broken = engines.get("hybrid-dflash", packed(page), "no-zeroing")
    assert set(broken.state_blocks[0]) & set(broken.attention_blocks[1])
    assert compare(stock, broken) != IDENTICAL


def test_stock_vllm_refuses_to_split_packed_blocks(engines: EngineRuns) -> None:
    with pytest.raises(RunFailedError):
        engines.get("hybrid-dflash", STOCK_PACKED, "fixed-pages")
    assert (
        "CPU_ATTN needs 32-token kernel blocks, which packed 640-token KV cache blocks cannot be "
        "split into"
    ) in engines.log_of("hybrid-dflash", STOCK_PACKED, "fixed-pages")


def test_stock_cpu_attention_refuses_the_packed_layout(engines: EngineRuns) -> None:
    with pytest.raises(RunFailedError, match=PACKED_LAYOUT):
        engines.get("hybrid-dflash", STOCK_PACKED)
