# SPDX-License-Identifier: Apache-2.0
"""FlashAttentionMetadataBuilder on SM100: re-paged where the hd256 kernel fixes the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders.world import LAYERS, MAX_NUM_SEQS, World, world_of
from repage.vllm.impl import CHOICE_ATTRIBUTE

ONE_TABLE = {"build_page_table": 1}


@pytest.fixture
def hd256(on_path: Callable[[str], Any]) -> Any:
    """A function that makes a world of head dim 256 and its builder."""
    return lambda **options: world_of(on_path("fa4"), head_size=256, **options)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_tables_are_contiguous_and_exactly_as_wide(
    hd256: Any, launches: Counter[str], layout: str
) -> None:
    world, builder = hd256(layout=layout)
    batch = world.batch([[3, 1], [4]], [700, 5], [300, 1])
    metadata = world.build(builder, batch)
    assert metadata.block_table.is_contiguous()
    assert metadata.block_table.shape == (2, 4 * 5)
    assert torch.equal(metadata.block_table, world.pages(batch, 128, LAYERS[0]))
    assert builder.block_size == 128
    assert builder.fa4_hd256
    assert launches == ONE_TABLE


def test_a_captured_table_follows_the_batches(hd256: Any) -> None:
    world, builder = hd256()
    dummy = world.batch([[0]] * MAX_NUM_SEQS, [1] * MAX_NUM_SEQS)
    captured = world.build(builder, dummy, "build_for_cudagraph_capture").block_table
    for rows, lengths in (([[3, 1, 7, 2]] * 4, [2560] * 4), ([[4]], [5])):
        batch = world.batch(rows, lengths)
        table = world.build(builder, batch).block_table
        assert table.data_ptr() == captured.data_ptr()
        assert torch.equal(captured[: len(rows)], world.pages(batch, 128, LAYERS[0]))
        assert not captured[len(rows) :].any()


def test_update_block_table_goes_through_the_groups_own_table(
    hd256: Any, launches: Counter[str]
) -> None:
    """vLLM reuses metadata between groups of equal specs, each with its own blocks."""
    world, first = hd256()
    second = world.builder()
    batch, other = world.batch([[3, 1], [4]], [700, 5]), world.batch([[7, 2], [5]], [700, 5])
    metadata = world.build(first, batch)
    launches.clear()
    slots = torch.ones(2, dtype=torch.int64)
    updated = second.update_block_table(metadata, other.table, slots)
    assert updated.slot_mapping is slots
    assert torch.equal(updated.block_table, world.pages(other, 128, LAYERS[0]))
    assert torch.equal(metadata.block_table, world.pages(batch, 128, LAYERS[0]))
    assert updated.block_table.data_ptr() != metadata.block_table.data_ptr()
    assert getattr(updated, CHOICE_ATTRIBUTE) is second.group_table.choice
    assert launches == ONE_TABLE


def test_draft_steps_refresh_the_table_before_the_early_return(hd256: Any) -> None:
    """FA4 has no scheduler metadata, so vLLM's own method returns at once."""
    world, builder = hd256(speculative_tokens=2)
    assert builder.supports_draft_decode_metadata_update
    batch = world.batch([[3, 1], [4]], [700, 5])
    metadata = world.build(builder, batch, "build_for_drafting")
    assert metadata.scheduler_metadata is None
    batch.table.copy_(torch.tensor([[8, 2, 5, 0], [7, 11, 0, 0]], dtype=torch.int32))
    batch.seq_lens.copy_(torch.tensor([1400, 800], dtype=torch.int32))
    stale = metadata.block_table.clone()
    with world.current():
        builder.update_draft_decode_metadata(metadata)
    expected = world.pages(batch, 128, LAYERS[0], lookahead=3)
    assert torch.equal(metadata.block_table, expected)
    assert not torch.equal(stale, expected)


@pytest.mark.parametrize(
    ("head_size", "layout", "block"),
    [(128, "BLHNC", 640), (128, "BLNHC", 544), (256, "LBHNC", 128), (256, "BLHNC", 128)],
)
def test_elsewhere_vllms_own_tables_are_used(
    on_path: Any, launches: Counter[str], head_size: int, layout: str, block: int
) -> None:
    world, builder = world_of(
        on_path("fa4"), head_size=head_size, layout=layout, block_tokens=block
    )
    assert builder.group_table is None
    batch = world.batch([[3, 1], [4]], [block + 1, 5])
    metadata = world.build(builder, batch)
    assert metadata.block_table.data_ptr() == batch.table.data_ptr()
    assert metadata.block_table.shape == batch.table.shape
    updated = builder.update_block_table(metadata, batch.table, batch.table)
    assert updated.block_table is batch.table
    assert not hasattr(metadata, CHOICE_ATTRIBUTE)
    assert builder.block_size == block
    assert launches == {}


def test_pages_that_the_drafters_block_stride_cuts_are_an_error(on_path: Any) -> None:
    """The kernel reads by tensor map, where overlapping pages are not proven."""
    from repage.errors import NoValidPageError

    world = World(on_path("fa4"), head_size=256)
    for name in LAYERS:
        world.add_layer(name)
    world.bind(gap=4096)
    builder = world.builder()
    with pytest.raises(NoValidPageError, match="not a multiple of the page unit"):
        world.build(builder, world.batch([[3]], [5]))
