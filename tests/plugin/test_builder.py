"""Metadata builders: page tables against plain arithmetic, in the orders of vLLM's calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.utils import AttentionGroup

from repage.errors import GeometryError
from repage.vllm.impl import CHOICE_ATTRIBUTE

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_parent_reads_page_ids(make_builder, layout, drafts):
    world, builder, _ = make_builder(layout, num_speculative_tokens=drafts)
    common = world.batch([[3, 1, 8], [5], [7, 2]], [300, 1, 254])
    metadata = builder.build(0, common)
    expected = world.expected_table(common, 32, LAYERS[0], lookahead=drafts + 1)
    torch.testing.assert_close(metadata.block_table, expected, rtol=0, atol=0)
    assert metadata.block_table.is_contiguous()
    assert metadata.block_table.dtype == torch.int32


def test_lookahead_reaches_into_the_next_block(make_builder):
    world, builder, _ = make_builder(num_speculative_tokens=3)
    table = builder.build(0, world.batch([[3, 1]], [125])).block_table
    assert table[0, 4:8].tolist() != [0, 0, 0, 0]  # 125 + 4 tokens: one in the second block
    table = builder.build(0, world.batch([[3, 1]], [124])).block_table
    assert table[0, 4:8].tolist() == [0, 0, 0, 0]


def test_the_parent_is_made_with_pages_and_the_manager_spec_stays(make_builder):
    world, builder, _ = make_builder()
    assert builder.parent_spec.block_size == 32
    assert builder.kv_cache_spec == world.spec()
    assert builder.kv_cache_spec.block_size == 128


def test_a_block_table_width_is_turned_into_pages(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    made = backend.get_builder_cls()(world.spec(), names, world.config, CPU, block_table_width=5)
    assert made.block_table_width == 20


def test_everything_else_in_the_common_metadata_passes_through(make_builder):
    world, builder, _ = make_builder()
    common = world.batch([[1]], [5])
    before = common.block_table_tensor.clone()
    metadata = builder.build(0, common)
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "max_seq_len", "num_reqs"):
        assert getattr(metadata.common, name) is getattr(common, name)
    assert torch.equal(common.block_table_tensor, before)


def test_every_call_form_of_build(make_builder):
    world, builder, _ = make_builder()
    common = world.batch([[1, 2]], [200])
    expected = world.expected_table(common, 32, LAYERS[0], lookahead=1)
    for metadata in (
        builder.build(0, common),
        builder.build(0, common, True),
        builder.build(common_prefix_len=0, common_attn_metadata=common, fast_build=True),
        builder.build(0, common, extra="kept"),
        builder.build_for_drafting(common, draft_index=1),
        builder.build_for_cudagraph_capture(common),
    ):
        assert torch.equal(metadata.block_table, expected)
    builder.build(0, common, extra="kept")
    assert builder.extra == "kept"


def test_the_table_stays_at_one_address_and_forgets_the_batch_before(make_builder):
    world, builder, _ = make_builder()
    first = world.batch([[3, 1, 8, 5], [5, 6, 7, 8], [2, 2, 2, 2]], [512, 512, 512])
    pointer = builder.build(0, first).block_table.data_ptr()
    second = world.batch([[4], [6, 1]], [7, 129])
    metadata = builder.build(0, second)
    assert metadata.block_table.data_ptr() == pointer
    expected = world.expected_table(second, 32, LAYERS[0], lookahead=1)
    assert torch.equal(metadata.block_table, expected)
    rows_after = builder.group_table._buffer.table[2:]
    assert not rows_after.any()


def test_micro_batches_do_not_share_memory(make_builder):
    world, builder, backend = make_builder()
    other = backend.get_builder_cls()(world.spec(), list(LAYERS), world.config, CPU)
    first, second = world.batch([[1, 2]], [256]), world.batch([[3, 4]], [256])
    table = builder.build(0, first).block_table
    other.build(0, second)
    assert torch.equal(table, world.expected_table(first, 32, LAYERS[0], lookahead=1))


def test_another_width_gets_memory_of_its_own(make_builder):
    world, builder, _ = make_builder()
    usual = world.batch([[1, 2, 3, 4]], [500])
    table = builder.build(0, usual).block_table
    narrow = world.batch([[5, 6]], [200], width=2)
    odd = builder.build(0, narrow).block_table
    assert torch.equal(odd, world.expected_table(narrow, 32, LAYERS[0], lookahead=1))
    assert torch.equal(table, world.expected_table(usual, 32, LAYERS[0], lookahead=1))
    again = builder.build(0, usual).block_table
    assert again.data_ptr() == table.data_ptr()


def test_more_rows_than_max_num_seqs_get_memory_of_their_own(make_builder):
    world, builder, _ = make_builder(max_num_seqs=2)
    builder.build(0, world.batch([[1]], [5]))
    common = world.batch([[1], [2], [3]], [5, 6, 7])
    table = builder.build(0, common).block_table
    assert torch.equal(table, world.expected_table(common, 32, LAYERS[0], lookahead=1))


def test_lengths_that_do_not_fit_the_rows_are_not_used(make_builder):
    """DCP and PCP hand lengths of other shapes; then every column is live."""
    world, builder, _ = make_builder()
    common = world.batch([[1, 2, 3, 4]], [1])
    common.seq_lens = torch.tensor([1, 1], dtype=torch.int32)
    table = builder.build(0, common).block_table
    common.seq_lens = torch.tensor([512], dtype=torch.int32)
    assert torch.equal(table, world.expected_table(common, 32, LAYERS[0], lookahead=1))


def test_update_block_table_goes_through_the_groups_own_buffer(make_builder):
    """vLLM hands one group's metadata to another group's builder with that group's table."""
    world, builder, backend = make_builder()
    other = backend.get_builder_cls()(world.spec(), list(LAYERS), world.config, CPU)
    common = world.batch([[1, 2]], [250])
    metadata = builder.build(0, common)
    kept = metadata.block_table.clone()
    theirs = world.batch([[7, 3]], [250])
    slots = torch.ones(1, dtype=torch.int64)
    updated = other.update_block_table(metadata, theirs.block_table_tensor, slots)
    assert torch.equal(updated.block_table, world.expected_table(theirs, 32, LAYERS[0], 1))
    assert torch.equal(metadata.block_table, kept)
    assert updated.slot_mapping is slots
    assert getattr(updated, CHOICE_ATTRIBUTE) is other.group_table.choice
    again = other.build(0, theirs)
    assert again.block_table.data_ptr() == updated.block_table.data_ptr()


def test_a_draft_update_follows_a_batch_that_came_without_build(make_builder):
    """A draft graph records the update and reads tables and lengths by address when it replays."""
    world, builder, _ = make_builder()
    common = world.batch([[1, 2], [3]], [200, 50])
    metadata = builder.build(0, common)
    pointer = metadata.block_table.data_ptr()
    common.block_table_tensor.copy_(torch.tensor([[6, 7, 5, 0], [8, 0, 0, 0]], dtype=torch.int32))
    common.seq_lens.copy_(torch.tensor([300, 10], dtype=torch.int32))
    builder.update_draft_decode_metadata(metadata)
    expected = world.expected_table(common, 32, LAYERS[0], lookahead=1)
    assert metadata.block_table.data_ptr() == pointer
    assert torch.equal(metadata.block_table, expected)
    # The parent, whose method may return early, ran after the refresh.
    assert torch.equal(builder.tables_at_draft_update[-1], expected)


def test_a_draft_update_of_an_unusual_width_writes_in_place(make_builder):
    world, builder, _ = make_builder()
    builder.build(0, world.batch([[1, 2, 3, 4]], [500]))
    common = world.batch([[5, 6]], [200], width=2)
    metadata = builder.build(0, common)
    common.block_table_tensor.copy_(torch.tensor([[2, 8]], dtype=torch.int32))
    builder.update_draft_decode_metadata(metadata)
    assert torch.equal(metadata.block_table, world.expected_table(common, 32, LAYERS[0], 1))


def test_a_draft_update_before_any_build_is_an_error(make_builder):
    _, builder, _ = make_builder()
    with pytest.raises(GeometryError, match="before any metadata"):
        builder.update_draft_decode_metadata(SimpleNamespace())


def test_vllms_attention_group_hands_manager_tables_to_the_builder(make_builder):
    """The group's own kernel-block mapping must stay out of it, or ids are mapped twice."""
    world, _, backend = make_builder()
    group = AttentionGroup(backend, list(LAYERS), world.spec(), 0)
    world.config.model_config.max_model_len = 512
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
        group.create_metadata_builders(world.config, CPU, 128, num_metadata_builders=2)
    assert group.kernel_block_size is None
    common = world.batch([[1, 2]], [250])
    expected = world.expected_table(common, 32, LAYERS[0], lookahead=1)
    for metadata in (
        group.build_metadata(common, 1),
        group.build_metadata_for_cudagraph_capture(common, 1),
        group.build_metadata_for_drafting(common, 0),
    ):
        assert torch.equal(metadata.block_table, expected)
