"""Metadata builders: the layers that they serve, what they leave alone, and vLLM's wrappers."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVQuantMode,
)

from repage.errors import GeometryError, NoValidPageError, RepagingRefusedError
from repage.vllm.builder import RepagedBuilder
from repage.vllm.factory import repage_backend
from repage.vllm.impl import CHOICE_ATTRIBUTE, RepagedImpl

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
CPU = torch.device("cpu")


# Layers and their caches


def test_layers_that_are_added_later_are_checked_and_told(make_world, repaged):
    """vLLM's drafters create the builder with one layer and append the others."""
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    world.add_layers(*LAYERS)
    world.bind()
    names = [LAYERS[0]]
    builder = backend.get_builder_cls()(world.spec(), names, world.config, CPU)
    builder.build(0, world.batch([[1]], [5]))
    names.append(LAYERS[1])
    builder.build(0, world.batch([[1]], [5]))
    assert world.layers[LAYERS[1]].impl.repage_choice is builder.group_table.choice


def test_layers_that_need_different_tables_are_an_error(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    world.add_layers(*LAYERS)
    world.bind([LAYERS[0]])
    world.bind([LAYERS[1]], gap=4 * 128 * 64 * 2)
    builder = backend.get_builder_cls()(world.spec(), list(LAYERS), world.config, CPU)
    with pytest.raises(GeometryError, match=rf"{LAYERS[1]}: one page table cannot serve"):
        builder.build(0, world.batch([[1]], [5]))


def test_a_cache_with_other_blocks_than_the_spec_is_an_error(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    world.add_layers(*LAYERS)
    world.bind(spec=world.spec(block_size=64))
    builder = backend.get_builder_cls()(world.spec(), list(LAYERS), world.config, CPU)
    with pytest.raises(GeometryError, match=r"blocks of 64 tokens.*made for 128"):
        builder.build(0, world.batch([[1]], [5]))


def test_a_layer_without_a_cache_is_an_error(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    builder = backend.get_builder_cls()(world.spec(), names, world.config, CPU)
    with pytest.raises(GeometryError, match="no KV cache bound"):
        builder.build(0, world.batch([[1]], [5]))


def test_caches_bound_anew_are_planned_anew(make_builder):
    """Profiling binds small caches first."""
    world, builder, _ = make_builder()
    builder.build(0, world.batch([[1]], [5]))
    world.bind(gap=128 * 64 * 2)
    common = world.batch([[1, 8]], [250])
    table = builder.build(0, common).block_table
    assert torch.equal(table, world.expected_table(common, 32, LAYERS[0], lookahead=1))


def test_pages_that_overlap_are_taken_only_where_the_kernel_may(make_world, repaged):
    # A gap of three tokens: the block stride is no multiple of a page.
    gap = 3 * 2 * 64 * 2
    for overlap in (True, False):
        backend = repaged(32, overlap=overlap)
        world = make_world(impl=backend.get_impl_cls())
        names = world.add_layers(*LAYERS)
        world.bind(gap=gap)
        builder = backend.get_builder_cls()(world.spec(), names, world.config, CPU)
        common = world.batch([[1, 8]], [250])
        if overlap:
            table = builder.build(0, common).block_table
            assert builder.group_table.plan().page_step > 1
            assert torch.equal(table, world.expected_table(common, 32, LAYERS[0], lookahead=1))
        else:
            with pytest.raises(NoValidPageError, match="not a multiple of the page unit"):
                builder.build(0, common)


def test_without_overlap_the_page_is_one_that_the_stride_was_aligned_for(make_world, repaged):
    """vLLM's planner may make a block larger after its stride was aligned to a smaller page."""
    backend = repaged(32, 64, overlap=False)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    spec = world.spec(block_stride_alignment=32 * 64 * 2 * 2)
    builder = backend.get_builder_cls()(spec, names, world.config, CPU)
    assert builder.group_table.choice.page_tokens == 32
    spec = world.spec(block_stride_alignment=64 * 64 * 2 * 2)
    builder = backend.get_builder_cls()(spec, names, world.config, CPU)
    assert builder.group_table.choice.page_tokens == 64


# Where nothing is re-paged


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_on_layer_compact_layouts_the_same_objects_go_through(make_builder, layout):
    world, builder, _ = make_builder(layout)
    spec = world.spec()
    common = world.batch([[3, 1]], [200])
    metadata = builder.build(0, common)
    assert metadata.common is common
    assert metadata.block_table is common.block_table_tensor
    assert not hasattr(metadata, CHOICE_ATTRIBUTE)
    table = torch.ones(1, 4, dtype=torch.int32)
    updated = builder.update_block_table(metadata, table, common.slot_mapping)
    assert updated.block_table is table
    builder.update_draft_decode_metadata(metadata)
    assert builder.group_table is None
    assert builder.parent_spec == spec
    assert world.layers[LAYERS[0]].impl.repage_choice is None


def test_a_block_that_is_a_page_goes_through(make_builder):
    world, builder, _ = make_builder(sizes=(32, 128))
    common = world.batch([[3, 1]], [200])
    assert builder.build(0, common).common is common


def test_encoder_only_attention_goes_through(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    spec = world.spec(EncoderOnlyAttentionSpec)
    builder = backend.get_builder_cls()(spec, names, world.config, CPU)
    assert builder.parent_spec is spec
    assert builder.group_table is None


# Refusals, before memory is allocated


def test_a_model_that_reads_caches_itself_is_refused(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    world.config.model_config.architectures = ["FlintForCausalLM"]
    with pytest.raises(RepagingRefusedError, match=r"FlintForCausalLM.*layer-compact"):
        backend.get_builder_cls()(world.spec(), names, world.config, CPU)


def test_nvfp4_is_refused(make_world, repaged):
    backend = repaged(32)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    spec = world.spec(kv_quant_mode=KVQuantMode.NVFP4, dtype=torch.uint8)
    with pytest.raises(RepagingRefusedError, match="NVFP4"):
        backend.get_builder_cls()(spec, names, world.config, CPU)


def test_a_layer_whose_impl_is_not_repaged_is_refused(make_world, repaged, recording):
    world = make_world(impl=recording.Impl)
    names = world.add_layers(*LAYERS)
    with pytest.raises(RepagingRefusedError, match="RecordingImpl reads manager blocks"):
        repaged(32).get_builder_cls()(world.spec(), names, world.config, CPU)


# vLLM's wrappers


def test_fast_prefill_metadata_is_read_with_the_pushed_choice(make_builder):
    """The wrapper copies dataclass fields only, so the choice on the metadata is lost."""
    world, _, backend = make_builder()
    wrapped = create_fast_prefill_custom_backend("FastPrefill", backend)
    builder = wrapped.get_builder_cls()(world.spec(), list(LAYERS), world.config, CPU)
    metadata = builder.build(0, world.batch([[3, 1]], [200]))
    assert not hasattr(metadata, CHOICE_ATTRIBUTE)
    layer = world.layers[LAYERS[0]]
    layer.impl.forward(layer, None, None, None, layer.kv_cache, metadata, None)
    assert layer.impl.reads[-1].shape[2] == 32


def test_chunked_local_attention_cuts_the_manager_table(make_world, repaged):
    backend = create_chunked_local_attention_backend(repaged(32), 256)
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    world.bind()
    spec = world.spec(ChunkedLocalAttentionSpec, attention_chunk_size=256)
    builder = backend.get_builder_cls()(spec, names, world.config, CPU)
    common = world.batch([[3, 5, 6, 1]], [400])
    common.query_start_loc = common.query_start_loc_cpu = torch.tensor([0, 400], dtype=torch.int32)
    common.seq_lens_cpu_upper_bound = common.seq_lens
    common.num_actual_tokens = common.max_query_len = 400
    metadata = builder.build(0, common)
    # Two chunks of two 128-token manager blocks each; pages would give eight columns of blocks.
    chunks = world.batch([[3, 5], [6, 1]], [256, 144], width=2)
    expected = world.expected_table(chunks, 32, LAYERS[0], lookahead=1)
    assert metadata.seq_lens.tolist() == [256, 144]
    assert torch.equal(metadata.block_table, expected)
    assert builder.group_table._buffer is None
    moved = torch.tensor([[4, 2, 7, 8]], dtype=torch.int32)
    updated = builder.update_block_table(metadata, moved, common.slot_mapping)
    chunks = world.batch([[4, 2], [7, 8]], [256, 144], width=2)
    assert torch.equal(updated.block_table, world.expected_table(chunks, 32, LAYERS[0], 1))


def test_a_family_may_bring_its_own_mixins(make_world, recording):
    class CountingBuilder(RepagedBuilder):
        tables = 0

        def parent_table(self, table, block_table, seq_lens):
            self.tables += 1
            return super().parent_table(table, block_table, seq_lens)

    class OwnImpl(RepagedImpl):
        pass

    backend = repage_backend(
        recording.Backend,
        recording.FixedPages(32),
        module=__name__,
        builder_mixin=CountingBuilder,
        impl_mixin=OwnImpl,
    )
    world = make_world(impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    world.bind()
    builder = backend.get_builder_cls()(world.spec(), names, world.config, CPU)
    common = world.batch([[3, 1]], [200])
    table = builder.build(0, common).block_table
    assert torch.equal(table, world.expected_table(common, 32, LAYERS[0], lookahead=1))
    assert builder.tables == 1
    assert issubclass(backend.get_impl_cls(), OwnImpl)


def test_the_family_hears_of_each_builder(make_builder):
    _, builder, _ = make_builder()
    assert builder.repage_policy.builders_created == 1
