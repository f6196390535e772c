# SPDX-License-Identifier: Apache-2.0
"""A real engine on packed blocks, through kernel pages, against the stock layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.runs import EngineRuns
from repage.demo.compare import IDENTICAL, compare
from repage.demo.launch import STOCK, packed
from repage.demo.setups import PACKED_LAYOUT, SETUPS, STOCK_LAYOUT

pytestmark = pytest.mark.engine

PAGES = (32, 128, None)
"""Kernel pages in tokens; None: manager blocks stay whole."""


def marked(names: list[str]) -> list[object]:
    """Setup names as parameters; the slow ones carry their marker."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if SETUPS[name].slow else name for name in names
    ]


every_setup = pytest.mark.parametrize("setup", marked(list(SETUPS)))
every_page = pytest.mark.parametrize("page", PAGES)


@every_setup
def test_stock_groups_and_capacity(engines: EngineRuns, setup: str) -> None:
    result = engines.get(setup, STOCK)
    expected = SETUPS[setup].expected(STOCK_LAYOUT)
    assert (result.layout, result.num_groups, result.capacity) == (
        STOCK_LAYOUT,
        expected.groups,
        expected.capacity,
    )


@every_setup
@every_page
def test_packed_groups_and_capacity(engines: EngineRuns, setup: str, page: int | None) -> None:
    result = engines.get(setup, packed(page))
    expected = SETUPS[setup].expected(PACKED_LAYOUT)
    assert (result.layout, result.num_groups, result.capacity) == (
        PACKED_LAYOUT,
        expected.groups,
        expected.capacity,
    )


@every_setup
def test_the_runner_is_the_one_asked_for(engines: EngineRuns, setup: str) -> None:
    module = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}
    for variant in (STOCK, packed(32)):
        assert engines.get(setup, variant).runner.startswith(module[SETUPS[setup].runner])


@every_setup
@every_page
def test_kernels_get_small_pages_of_packed_blocks(
    engines: EngineRuns, setup: str, page: int | None
) -> None:
    groups = engines.get(setup, packed(page)).attention_groups()
    assert groups
    for group in groups:
        assert group.manager_block == SETUPS[setup].manager_block
        assert group.kernel_page == (page or group.manager_block)
        assert group.block_stride > group.page_bytes, "not a packed block"


@every_setup
@every_page
def test_kernel_rows_are_virtual_pages_of_manager_rows(
    engines: EngineRuns, setup: str, page: int | None
) -> None:
    for group in engines.get(setup, packed(page)).attention_groups():
        pages_per_block = group.manager_block // group.kernel_page
        # Head-major interior: pages of one head follow each other.
        token_and_head = group.page_bytes // (group.manager_block * group.num_kv_heads)
        unit = group.kernel_page * token_and_head
        block_step, rest = divmod(group.block_stride, unit)
        assert rest == 0
        if pages_per_block == 1:
            block_step = 1
        assert len(group.manager_row) > 1
        assert group.kernel_row == [
            block * block_step + index
            for block in group.manager_row
            for index in range(pages_per_block)
        ]


@every_setup
@every_page
def test_packed_equals_stock(engines: EngineRuns, setup: str, page: int | None) -> None:
    agreement = SETUPS[setup].agreement
    if agreement == "nothing":
        pytest.skip("the layouts batch differently; packed runs are compared with each other")
    verdict = compare(
        engines.get(setup, STOCK),
        engines.get(setup, packed(page)),
        exact=agreement == "everything",
    )
    assert verdict == IDENTICAL


@every_setup
@pytest.mark.parametrize("page", [page for page in PAGES if page is not None])
def test_the_page_size_changes_nothing(engines: EngineRuns, setup: str, page: int) -> None:
    verdict = compare(engines.get(setup, packed(None)), engines.get(setup, packed(page)))
    assert verdict == IDENTICAL


@every_setup
def test_the_runs_compute_something(engines: EngineRuns, setup: str) -> None:
    result = engines.get(setup, packed(32))
    for generations in result.rounds:
        assert [len(item.token_ids) for item in generations] == [
            SETUPS[setup].max_tokens for _ in SETUPS[setup].prompt_lengths
        ]
        # A broken forward pass repeats one token, or gives every prompt the same answer.
        assert all(len(set(item.token_ids)) > SETUPS[setup].max_tokens // 3 for item in generations)
        assert len({tuple(item.token_ids) for item in generations}) == len(generations)
    if SETUPS[setup].drafter is not None:
        assert len({tuple(row) for call in result.drafts for row in call}) > 1


@every_setup
@every_page
def test_later_rounds_reuse_blocks(engines: EngineRuns, setup: str, page: int | None) -> None:
    result = engines.get(setup, packed(page))
    earlier = {*result.attention_blocks[0], *result.state_blocks[0]}
    assert earlier & set(result.attention_blocks[1])


@pytest.mark.parametrize("page", PAGES)
def test_attention_reuses_blocks_of_recurrent_states(engines: EngineRuns, page: int | None) -> None:
    result = engines.get("hybrid-dflash", packed(page))
    assert set(result.state_blocks[0]) & set(result.attention_blocks[1])


@pytest.mark.parametrize("page", PAGES)
def test_prefixes_are_reused(engines: EngineRuns, page: int | None) -> None:
    first, second = engines.get("gemma4", packed(page)).rounds
    assert all(item.cached_tokens == 0 for item in first)
    assert any(item.cached_tokens >= SETUPS["gemma4"].manager_block for item in second)


@pytest.mark.parametrize("setup", ["gemma4-preempted", "hybrid-preempted"])
@pytest.mark.parametrize("variant", [STOCK, *map(packed, PAGES)], ids=lambda item: item.label())
def test_requests_are_preempted(engines: EngineRuns, setup: str, variant: object) -> None:
    assert engines.get(setup, variant).preemptions > 0  # type: ignore[arg-type]


def test_roomy_setups_are_not_preempted(engines: EngineRuns) -> None:
    assert engines.get("hybrid-dflash", packed(32)).preemptions == 0


def test_the_engine_core_in_its_own_process(engines: EngineRuns) -> None:
    """vLLM's default mode: the plugin loads in a spawned engine core, too."""
    in_process = engines.get("hybrid-dflash", packed(32))
    variant = replace(packed(32), multiprocess=True)
    apart = engines.get("hybrid-dflash", variant)
    assert apart.capacity == in_process.capacity
    assert f"Using {PACKED_LAYOUT} KV cache layout" in engines.log_of("hybrid-dflash", variant)
    # Draft tokens cannot be seen from outside the engine's process.
    assert compare(replace(in_process, drafts=[]), apart) == IDENTICAL
