"""Impls, and the lifetime of the views they read."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

from repage.errors import ArgumentError, RepagingRefusedError
from repage.vllm.factory import repage_backend
from repage.vllm.pages import kernel_pages
from repage.vllm.policy import PageContext, choose_page

CPU = torch.device("cpu")
NAME = "model.layers.0.attn"


@pytest.fixture
def bound(make_world, repaged):
    """One layer of a packed pool, its builder made, and a batch's metadata."""

    def make(layout: str = "BLHNC", **options):
        backend = repaged(32, **options)
        world = make_world(layout=layout, impl=backend.get_impl_cls())
        world.add_layers(NAME, "model.layers.1.attn")
        world.bind()
        builder = backend.get_builder_cls()(world.spec(), list(world.layers), world.config, CPU)
        common = world.batch([[3, 1]], [200])
        return SimpleNamespace(
            world=world, layer=world.layers[NAME], builder=builder, common=common, backend=backend
        )

    return make


def forward(layer, metadata):
    return layer.impl.forward(layer, None, None, None, layer.kv_cache, metadata, "output")


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_forward_reads_the_tokens_that_the_table_names(bound, layout):
    case = bound(layout)
    cache = case.layer.kv_cache
    cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) % 251)
    metadata = case.builder.build(0, case.common)
    assert forward(case.layer, metadata) == "output"
    view = case.layer.impl.reads[-1]
    tokens = view[metadata.block_table[0, :7].long()].transpose(1, 2).flatten(0, 1)[:200]
    expected = cache[[3, 1]].transpose(1, 2).flatten(0, 1)[:200]
    assert torch.equal(tokens, expected)
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_the_view_is_made_once_per_cache(bound):
    case = bound()
    metadata = case.builder.build(0, case.common)
    forward(case.layer, metadata)
    forward(case.layer, metadata)
    first, second = case.layer.impl.reads
    assert first is second


def test_writes_stay_with_the_manager_view_unless_the_format_needs_pages(bound):
    slots = torch.tensor([3 * 128 + 40, -1, 128])
    case = bound()
    case.layer.impl.do_kv_cache_update(case.layer, None, None, case.layer.kv_cache, slots)
    view, mapped = case.layer.impl.writes[-1]
    assert view is case.layer.kv_cache
    assert mapped is slots

    case = bound(writes=True)
    case.layer.impl.do_kv_cache_update(case.layer, None, None, case.layer.kv_cache, slots)
    view, mapped = case.layer.impl.writes[-1]
    plan = case.builder.group_table.plan()
    assert mapped.tolist() == [plan.page(3, 1) * 32 + 8, -1, plan.page(1, 0) * 32]
    assert view.shape[2] == 32


def test_a_write_before_the_first_build_uses_the_page_of_the_builder(bound):
    """V2's DFlash inserts context K and V before its drafter's first build."""
    case = bound(writes=True)
    slots = torch.tensor([5])
    case.layer.impl.do_kv_cache_update(case.layer, None, None, case.layer.kv_cache, slots)
    assert case.layer.impl.writes[-1][0].shape[2] == 32


def test_profiling_and_empty_caches_pass_through(bound):
    case = bound(writes=True)
    cache = case.layer.kv_cache
    forward(case.layer, None)
    assert case.layer.impl.reads[-1] is cache
    metadata = case.builder.build(0, case.common)
    case.layer.kv_cache = torch.tensor([])
    slots = torch.tensor([1])
    forward(case.layer, metadata)
    assert case.layer.impl.reads[-1] is case.layer.kv_cache
    case.layer.impl.do_kv_cache_update(case.layer, None, None, case.layer.kv_cache, slots)
    assert case.layer.impl.writes[-1][1] is slots


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_layer_compact_caches_pass_through(bound, layout):
    case = bound(layout, writes=True)
    metadata = case.builder.build(0, case.common)
    slots = torch.tensor([1])
    forward(case.layer, metadata)
    case.layer.impl.do_kv_cache_update(case.layer, None, None, case.layer.kv_cache, slots)
    assert case.layer.impl.reads[-1] is case.layer.kv_cache
    assert case.layer.impl.writes[-1][0] is case.layer.kv_cache
    assert case.layer.impl.writes[-1][1] is slots


def test_packed_blocks_that_no_builder_decided_on_are_refused(make_world, repaged):
    """Reading manager ids as page ids would be silent corruption."""
    impl = repaged(32, writes=True).get_impl_cls()
    world = make_world(impl=impl)
    world.add_layers(NAME, "model.layers.1.attn")
    world.bind()
    layer = world.layers[NAME]
    with pytest.raises(RepagingRefusedError, match="no re-paged metadata builder has decided"):
        forward(layer, SimpleNamespace())
    with pytest.raises(RepagingRefusedError, match="no re-paged metadata builder has decided"):
        layer.impl.do_kv_cache_update(layer, None, None, layer.kv_cache, torch.tensor([1]))


def test_the_metadatas_choice_outranks_the_pushed_one(bound, repaged):
    """One layer may be read by groups with pages of their own."""
    case = bound()
    metadata = case.builder.build(0, case.common)
    other = choose_page(repaged(16).repage_policy, PageContext(case.world.spec(), None, None, ()))
    case.layer.impl.repage_choice = other
    forward(case.layer, metadata)
    assert case.layer.impl.reads[-1].shape[2] == 32
    forward(case.layer, SimpleNamespace())
    assert case.layer.impl.reads[-1].shape[2] == 16


def test_cross_attention_writes_manager_slots_as_pages(make_world, repaged):
    """The wrapper's forward writes with slots that it computed from the manager block size."""
    backend = create_cross_attention_backend(repaged(32, writes=True))
    world = make_world(impl=backend.get_impl_cls())
    world.add_layers(NAME, "model.layers.1.attn")
    world.bind()
    builder = backend.get_builder_cls()(world.spec(), list(world.layers), world.config, CPU)
    common = world.batch([[3, 1]], [1])
    common.encoder_seq_lens = torch.tensor([200], dtype=torch.int32)
    common.encoder_seq_lens_cpu = common.encoder_seq_lens.numpy()
    common.seq_lens_cpu_upper_bound = common.seq_lens
    metadata = builder.build(0, common)
    assert metadata.slot_mapping[[0, 127, 128, 199]].tolist() == [384, 511, 128, 199]
    layer = world.layers[NAME]
    one = torch.zeros(1)
    layer.impl.forward(layer, one, one, one, layer.kv_cache, metadata, one)
    plan = builder.group_table.plan()
    _, mapped = layer.impl.writes[-1]
    assert mapped[[0, 127, 128]].tolist() == [
        plan.page(3, 0) * 32,
        plan.page(3, 3) * 32 + 31,
        plan.page(1, 0) * 32,
    ]
    assert layer.impl.reads[-1].shape[2] == 32
    expected = [plan.page(3, page) for page in range(4)] + [plan.page(1, page) for page in range(4)]
    assert metadata.block_table[0, :8].tolist() == expected


def test_a_policy_that_writes_pages_needs_a_separate_write(recording):
    class WritesInForward(recording.Backend):
        forward_includes_kv_cache_update = True

    with pytest.raises(ArgumentError, match=r"WritesInForward writes the cache in forward\(\)"):
        repage_backend(WritesInForward, recording.FixedPages(32, writes=True), module=__name__)


# Lifetime: a rebound cache must go when vLLM drops it, without a garbage collection.


def test_nothing_keeps_a_dropped_cache_alive(bound):
    case = bound(writes=True)
    metadata = case.builder.build(0, case.common)
    forward(case.layer, metadata)
    case.layer.impl.do_kv_cache_update(
        case.layer, None, None, case.layer.kv_cache, torch.tensor([1])
    )
    case.layer.impl.reads.clear()
    case.layer.impl.writes.clear()
    caches = [weakref.ref(layer.kv_cache) for layer in case.world.layers.values()]
    views = [
        weakref.ref(kernel_pages(layer.kv_cache, case.builder.group_table.choice).view)
        for layer in case.world.layers.values()
    ]
    gc.disable()
    try:
        for layer in case.world.layers.values():
            layer.kv_cache = torch.tensor([])
        assert [ref() for ref in caches] == [None, None]
        assert [ref() for ref in views] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_cache_that_owns_its_memory_goes_with_its_view(mode, repaged, make_world):
    """A view made the plain way would hold the tensor on which it is kept: a cycle through C++."""
    choice = choose_page(
        repaged(32).repage_policy, PageContext(make_world().spec(), None, None, ())
    )
    gc.disable()
    try:
        with mode():
            cache = torch.zeros(4, 2, 128, 128)
            pages = kernel_pages(cache, choice)
            assert pages.view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
            view, kept = weakref.ref(pages.view), weakref.ref(cache)
            storage = weakref.ref(cache.untyped_storage())
            del pages, cache
        assert view() is None
        assert kept() is None
        assert storage() is None
    finally:
        gc.enable()


def test_a_cache_bound_anew_is_viewed_anew(bound):
    case = bound()
    forward(case.layer, case.builder.build(0, case.common))
    old = case.layer.impl.reads[-1].data_ptr()
    case.world.bind(gap=128 * 64 * 2)
    forward(case.layer, case.builder.build(0, case.common))
    new = case.layer.impl.reads[-1]
    assert new.data_ptr() != old
    assert new.untyped_storage().data_ptr() == case.layer.kv_cache.untyped_storage().data_ptr()
