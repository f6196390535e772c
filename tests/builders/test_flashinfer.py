# SPDX-License-Identifier: Apache-2.0
"""FlashInferMetadataBuilder, re-paged: what its kernels get, batch after batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from builders.world import LAYERS, MAX_NUM_SEQS, Batch, World, decode_table, page_list, world_of
from repage.errors import UnsupportedVllmError
from repage.vllm.compat import flashinfer_backend_module
from repage.vllm.impl import CHOICE_ATTRIBUTE
from repage.vllm.table import GroupTable

ONE_TABLE = {"build_page_table": 1}
ONE_LIST = {"build_kv_indices": 1}
BOTH = {"build_group_tables": 1}
TABLE_PATHS = [("xqa", 64), ("trtllm-gen", 128)]


# XQA and trtllm-gen: a table


@pytest.mark.parametrize(
    ("path", "page", "layout"),
    [("xqa", 64, "BLHNC"), ("xqa", 64, "BLNHC"), ("trtllm-gen", 128, "BLHNC")],
)
def test_tables_are_contiguous_and_exactly_as_wide(
    on_path: Any, launches: Counter[str], path: str, page: int, layout: str
) -> None:
    world, builder = world_of(on_path(path), layout=layout)
    batch = world.batch([[3, 1], [4]], [700, 5])
    metadata = world.build(builder, batch)
    table = decode_table(metadata)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert table.shape == (2, batch.table.shape[1] * (640 // page))
    assert torch.equal(table, world.pages(batch, page, LAYERS[0]))
    assert launches == ONE_TABLE
    assert getattr(metadata, CHOICE_ATTRIBUTE).page_tokens == page
    assert metadata.slot_mapping.shape == (2,)


@pytest.mark.parametrize(("path", "page"), TABLE_PATHS)
def test_a_captured_table_follows_the_batches(on_path: Any, path: str, page: int) -> None:
    """Full CUDA graphs keep the address and are replayed after other builds."""
    world, builder = world_of(on_path(path))
    dummy = world.batch([[0]] * MAX_NUM_SEQS, [1] * MAX_NUM_SEQS)
    captured = decode_table(world.build(builder, dummy, "build_for_cudagraph_capture"))
    address = captured.data_ptr()
    for rows, lengths in (
        ([[3, 1, 7, 2]] * 4, [2560] * 4),
        ([[4]], [5]),
        ([[5, 6], [8, 9], [10]], [1000, 641, 640]),
    ):
        batch = world.batch(rows, lengths)
        table = decode_table(world.build(builder, batch))
        assert table.data_ptr() == address
        expected = world.pages(batch, page, LAYERS[0])
        assert torch.equal(captured[: len(rows)], expected)
        # Rows that the graph reads beyond the batch hold the null page.
        assert not captured[len(rows) :].any()


@pytest.mark.parametrize(("path", "page"), TABLE_PATHS)
def test_drafting_uses_the_same_table(on_path: Any, path: str, page: int) -> None:
    world, builder = world_of(on_path(path), speculative_tokens=3)
    world.build(builder, world.batch([[9, 9, 9]], [1900]))
    batch = world.batch([[3, 1], [4]], [638, 5])
    table = decode_table(world.build(builder, batch, "build_for_drafting"))
    # The fourth token on is in the next block.
    assert torch.equal(table, world.pages(batch, page, LAYERS[0], lookahead=4))
    assert table[0, 640 // page] != 0


def test_prefill_and_decode_share_one_table_on_sm100(on_path: Any, launches: Counter[str]) -> None:
    world, builder = world_of(on_path("trtllm-gen"))
    batch = world.batch([[3, 1], [4, 5]], [700, 900], [1, 300])
    metadata = world.build(builder, batch)
    expected = world.pages(batch, 128, LAYERS[0])
    assert torch.equal(decode_table(metadata), expected[:1])
    assert torch.equal(metadata.prefill.block_tables, expected[1:])
    assert launches == ONE_TABLE


def test_xqa_decodes_with_the_table_and_prefills_with_the_list(
    on_path: Any, launches: Counter[str]
) -> None:
    """Both in one launch; a batch without prefill has no list."""
    world, builder = world_of(on_path("xqa"))
    address = None
    for rows, lengths, queries, expected_launches in (
        ([[3, 1], [4, 5]], [700, 900], [1, 300], BOTH),
        ([[8, 2, 6, 7], [9]], [2560, 64], [1, 1], ONE_TABLE),
        ([[10], [11, 2]], [640, 1280], [1, 2], BOTH),
    ):
        launches.clear()
        batch = world.batch(rows, lengths, queries)
        metadata = world.build(builder, batch)
        decodes = queries.count(1)
        table = decode_table(metadata)
        assert torch.equal(table, world.pages(batch, 64, LAYERS[0])[:decodes])
        assert address in (None, table.data_ptr())
        address = table.data_ptr()
        if expected_launches == BOTH:
            pages = page_list(world, batch, 64)
            assert builder.paged_kv_indices[: len(pages)].tolist() == pages
        assert launches == expected_launches


def test_a_list_of_fewer_rows_is_built_apart(on_path: Any, launches: Counter[str]) -> None:
    """Another vLLM may list the prefills alone."""
    world, builder = world_of(on_path("xqa"))
    batch = world.batch([[3, 1], [4, 5]], [700, 900])
    pages = builder.parent_table(builder.group_table, batch.table, batch.seq_lens)
    out = torch.zeros(11, dtype=torch.int32)
    indptr = torch.tensor([0, 11], dtype=torch.int32)
    flashinfer_backend_module()._copy_page_indices_kernel[(1,)](out, pages, pages.stride(0), indptr)
    builder.complete_table(pages)
    expected = world.pages(batch, 64, LAYERS[0])
    assert torch.equal(pages, expected)
    assert torch.equal(out, expected[0, :11])
    assert launches == {**ONE_TABLE, **ONE_LIST}


# Draft steps that are replayed without a build


def replay(world: World, builder: Any, batch: Batch, metadata: Any) -> Any:
    """The next batch's blocks and lengths arrive in place; then what the graph recorded runs."""
    batch.table.copy_(torch.tensor([[8, 2, 5, 0], [7, 11, 0, 0]], dtype=torch.int32))
    batch.seq_lens.copy_(torch.tensor([1400, 800], dtype=torch.int32))
    with world.current():
        builder.update_draft_decode_metadata(metadata)
    return metadata


def test_draft_steps_refresh_the_table(on_path: Any, launches: Counter[str]) -> None:
    world, builder = world_of(on_path("trtllm-gen"), speculative_tokens=2)
    assert builder.supports_draft_decode_metadata_update
    batch = world.batch([[3, 1], [4]], [700, 5])
    metadata = world.build(builder, batch)
    address = decode_table(metadata).data_ptr()
    launches.clear()
    replay(world, builder, batch, metadata)
    table = decode_table(metadata)
    assert torch.equal(table, world.pages(batch, 128, LAYERS[0], lookahead=3))
    assert table.data_ptr() == address
    assert launches == ONE_TABLE


def test_without_the_refresh_the_table_is_stale(
    on_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would see."""
    monkeypatch.setattr(GroupTable, "refresh", lambda _self: None)
    world, builder = world_of(on_path("trtllm-gen"), speculative_tokens=2)
    batch = world.batch([[3, 1], [4]], [700, 5])
    metadata = world.build(builder, batch)
    replay(world, builder, batch, metadata)
    assert not torch.equal(decode_table(metadata), world.pages(batch, 128, LAYERS[0], lookahead=3))


def test_micro_batches_do_not_share_a_table(on_path: Any) -> None:
    """vLLM makes one builder per micro-batch and runs them at the same time."""
    world, first = world_of(on_path("trtllm-gen"))
    second = world.builder()
    one, other = world.batch([[3, 1]], [700]), world.batch([[4, 2]], [900])
    left = decode_table(world.build(first, one))
    right = decode_table(world.build(second, other))
    assert left.data_ptr() != right.data_ptr()
    assert torch.equal(left, world.pages(one, 128, LAYERS[0]))
    assert torch.equal(right, world.pages(other, 128, LAYERS[0]))


# Native kernels: a list


def test_page_lists_come_straight_from_the_manager_table(
    on_path: Any, launches: Counter[str]
) -> None:
    world, builder = world_of(on_path("fi-native"))
    for rows, lengths, queries in (
        ([[3, 1], [4]], [700, 5], [1, 1]),
        ([[8, 2, 5], [7]], [1281, 640], [1, 400]),
        ([[10, 9]], [641], [1]),
    ):
        launches.clear()
        batch = world.batch(rows, lengths, queries)
        metadata = world.build(builder, batch)
        pages = page_list(world, batch, 64)
        assert builder.paged_kv_indptr.np[len(rows)] == len(pages)
        assert builder.paged_kv_indices[: len(pages)].tolist() == pages
        last = [(length - 1) % 64 + 1 for length in lengths]
        assert builder.paged_kv_last_page_len.np[: len(rows)].tolist() == last
        # One launch; no table with two dimensions.
        assert launches == ONE_LIST
        assert getattr(metadata, CHOICE_ATTRIBUTE).page_tokens == 64


def test_a_copied_table_is_an_error(on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another vLLM may copy or slice it; the entries of a table that only lists need are empty."""
    backend = on_path("fi-native")
    world, builder = world_of(backend)
    monkeypatch.setattr(
        type(builder), "parent_table", lambda _self, table, blocks, _lengths: table.unfilled(blocks)
    )
    with pytest.raises(UnsupportedVllmError, match="another table than the one that repage made"):
        world.build(builder, world.batch([[3, 1]], [700]))


def test_head_dims_that_xqa_lacks_get_lists_on_sm90(on_path: Any, launches: Counter[str]) -> None:
    world, builder = world_of(on_path("xqa"), head_size=512)
    assert builder.flashinfer_trtllm_api_decode_kernel is None
    batch = world.batch([[3, 1], [4]], [700, 5])
    world.build(builder, batch)
    pages = page_list(world, batch, 64)
    assert builder.paged_kv_indices[: len(pages)].tolist() == pages
    assert launches == ONE_LIST


def test_non_causal_drafts_on_sm100_get_lists_of_small_pages(on_path: Any) -> None:
    """DFlash: trtllm-gen has no such kernel, so the group reads with native ones."""
    world = World(on_path("trtllm-gen"), speculative_tokens=4)
    world.config.speculative_config.method = "dflash"
    name = "model.layers.48.self_attn.attn"
    world.add_layer(name)
    world.bind()
    builder = world.builder()
    batch = world.batch([[3, 1], [4]], [700, 50], [5, 5], causal=False)
    world.build(builder, batch)
    assert builder.group_table.choice.page_tokens == 64
    table = world.pages(batch, 64, name, lookahead=5)
    pages = [*table[0, :11].tolist(), *table[1, :1].tolist()]
    assert builder.paged_kv_indices[: len(pages)].tolist() == pages


# Where nothing is re-paged


@pytest.mark.parametrize(
    ("path", "layout", "block"),
    [
        ("fi-native", "LBHNC", 64),
        ("xqa", "LBNHC", 64),
        ("trtllm-gen", "LBHNC", 128),
        ("fi-native", "BLHNC", 64),
        ("xqa", "BLNHC", 32),
        ("trtllm-gen", "BLHNC", 128),
    ],
)
def test_layer_compact_layouts_and_whole_blocks_are_vllms_own(
    on_path: Any, launches: Counter[str], path: str, layout: str, block: int
) -> None:
    backend = on_path(path)
    world, builder = world_of(backend, layout=layout, block_tokens=block)
    batch = world.batch([[3, 1], [4, 5]], [block + 5, 7], [1, 2])
    metadata = world.build(builder, batch)
    assert launches == {}
    assert builder.group_table is None
    assert builder.page_size == block
    assert not hasattr(metadata, CHOICE_ATTRIBUTE)
    assert type(metadata).__module__ == "vllm.v1.attention.backends.flashinfer"
    if path != "fi-native":
        assert decode_table(metadata).data_ptr() == batch.table.data_ptr()
    if path != "trtllm-gen":
        assert builder.paged_kv_indices[:3].tolist() == [3, 1, 4]
    drafted = world.build(builder, batch, "build_for_drafting")
    with world.current():
        builder.update_draft_decode_metadata(drafted)
    assert launches == {}
    for layer in world.layers.values():
        assert layer.impl.repage_choice is None
