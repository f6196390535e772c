# SPDX-License-Identifier: Apache-2.0
"""FlashInferMetadataBuilder, re-paged: the layers and caches that it serves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec

from builders.world import LAYERS, World, decode_table, page_list
from repage.errors import RepagingRefusedError
from repage.vllm.pages import kernel_pages

PATHS = [("fi-native", 64), ("xqa", 64), ("trtllm-gen", 128)]


def pages_of(world: World, builder: Any, batch: Any, page: int) -> None:
    """The builder's list or table holds the pages of the batch."""
    metadata = world.build(builder, batch)
    if hasattr(metadata.decode, "block_tables"):
        expected = world.pages(batch, page, next(iter(world.layers)))
        assert torch.equal(decode_table(metadata), expected)
    else:
        pages = page_list(world, batch, page)
        assert builder.paged_kv_indices[: len(pages)].tolist() == pages


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_caches_bound_anew_are_planned_anew(on_path: Any, path: str, page: int) -> None:
    """Profiling binds a small pool of another block stride before the real one."""
    world = World(on_path(path), num_blocks=2)
    for name in LAYERS:
        world.add_layer(name)
    world.bind()
    builder = world.builder()
    pages_of(world, builder, world.batch([[1]], [5]), page)
    before = builder.group_table.plan()
    world.num_blocks = 20
    # Another group's layers make the packed block larger.
    world.bind(gap=640 * 2 * 512 * 3)
    pages_of(world, builder, world.batch([[19, 1, 7], [12]], [1500, 640]), page)
    after = builder.group_table.plan()
    assert after.block_step > before.block_step
    assert after.num_virtual_pages > before.num_virtual_pages


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_drafter_layers_that_come_later(on_path: Any, path: str, page: int) -> None:
    world = World(on_path(path))
    for name in LAYERS:
        world.add_layer(name)
    world.bind()
    names = [LAYERS[0]]
    builder = world.builder(names)
    pages_of(world, builder, world.batch([[3, 1]], [700]), page)
    names.append(LAYERS[1])
    pages_of(world, builder, world.batch([[2, 5]], [800]), page)
    assert world.layers[LAYERS[1]].impl.repage_choice is builder.group_table.choice


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_freed_window_blocks_are_the_null_block(on_path: Any, path: str, page: int) -> None:
    """vLLM puts block 0 for blocks in front of the window: valid ids, of the null block."""
    world = World(on_path(path))
    for name in LAYERS:
        world.add_layer(name, sliding_window=128)
    spec = SlidingWindowSpec(
        block_size=640, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, sliding_window=128
    )
    world.bind(spec=spec)
    builder = world.builder(spec=spec)
    batch = world.batch([[0, 0, 7], [0, 4]], [1300, 900])
    pages_of(world, builder, batch, page)
    expected = world.pages(batch, page, LAYERS[0])
    count = 640 // page
    assert expected[0, : 2 * count].tolist() == [*range(count), *range(count)]


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_layers_that_share_a_cache(on_path: Any, path: str, page: int) -> None:
    world = World(on_path(path))
    world.add_layer(LAYERS[0])
    world.add_layer(LAYERS[1], kv_sharing_target_layer_name=LAYERS[0])
    world.bind([LAYERS[0]])
    world.layers[LAYERS[1]].kv_cache = world.layers[LAYERS[0]].kv_cache
    builder = world.builder()
    pages_of(world, builder, world.batch([[3, 1]], [700]), page)
    assert world.layers[LAYERS[1]].impl.repage_choice is builder.group_table.choice


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_fp8_caches(on_path: Any, path: str, page: int) -> None:
    world = World(on_path(path), cache_dtype="fp8")
    for name in LAYERS:
        world.add_layer(name)
    spec = world.spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    world.bind(spec=spec)
    builder = world.builder(spec=spec)
    assert builder.kv_cache_dtype == torch.float8_e4m3fn
    pages_of(world, builder, world.batch([[3, 1], [4]], [700, 5]), page)
    plan = builder.group_table.plan()
    assert plan.geometry.element_size == 1
    assert plan.page_unit == page * 256


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_one_kv_head_has_canonical_strides(on_path: Any, path: str, page: int) -> None:
    """A stride of 1 for a dimension of size 1 is no multiple of 16 bytes."""
    world = World(on_path(path), kv_heads=1)
    for name in LAYERS:
        world.add_layer(name)
    world.bind()
    builder = world.builder()
    pages_of(world, builder, world.batch([[3, 1], [4]], [700, 5]), page)
    choice = builder.group_table.choice
    for layer in world.layers.values():
        view = kernel_pages(layer.kv_cache, choice).view
        assert view.shape[1:] == (1, page, 256)
        assert all(stride * 2 % 16 == 0 for stride in view.stride()[:-1])


@pytest.mark.parametrize(("path", "page"), PATHS)
def test_decode_context_parallelism(
    on_path: Any, monkeypatch: pytest.MonkeyPatch, path: str, page: int
) -> None:
    """A column is one block of this rank; lengths are global, local ones come apart."""
    backend = on_path(path)
    module = sys.modules["vllm.v1.attention.backends.flashinfer"]
    monkeypatch.setattr(module, "get_dcp_world_size_and_rank", lambda _sharded: (2, 0))
    world = World(backend)
    for name in LAYERS:
        world.add_layer(name)
    world.bind()
    builder = world.builder()
    # 1400 tokens are 700 on each rank: two local blocks, not three.
    local = torch.tensor([700, 3], dtype=torch.int32)
    batch = world.batch([[3, 1], [4]], [1400, 6], dcp_local_seq_lens=local)
    metadata = world.build(builder, batch)
    expected = world.pages(batch, page, LAYERS[0])
    if path == "trtllm-gen":
        # Global lengths keep more columns alive than are read, never fewer.
        assert torch.equal(decode_table(metadata), expected)
        live = -(-700 // page)
        assert (decode_table(metadata)[0, :live] == expected[0, :live]).all()
    else:
        # XQA gives no log-sum-exp, so vLLM decodes natively under DCP.
        pages = [*expected[0, : -(-700 // page)].tolist(), int(expected[1, 0])]
        assert builder.paged_kv_indices[: len(pages)].tolist() == pages
        assert builder.paged_kv_indptr.np[2] == len(pages)


def test_groups_of_different_head_counts_take_small_pages(on_path: Any) -> None:
    """A target and a drafter in one KV group: vLLM refuses that group unless the heads agree."""
    world = World(on_path("trtllm-gen"))
    world.add_layer(LAYERS[0], query_heads=8)
    world.add_layer(LAYERS[1], query_heads=4)
    world.bind()
    with pytest.raises(AssertionError, match="must share num_heads"):
        world.builder()
    # One builder each, on the same packed blocks, as vLLM makes them per attention group.
    first, second = world.builder([LAYERS[0]]), world.builder([LAYERS[1]])
    batch = world.batch([[3, 1]], [700])
    for name, builder in ((LAYERS[0], first), (LAYERS[1], second)):
        table = decode_table(world.build(builder, batch))
        assert torch.equal(table, world.pages(batch, 128, name))


def test_ungrouped_layers_next_to_grouped_ones(on_path: Any) -> None:
    """By the model's heads vLLM would take 128-token pages for both, and then assert."""
    world = World(on_path("trtllm-gen"))
    world.add_layer(LAYERS[0])
    world.add_layer(LAYERS[1], query_heads=2)
    world.bind()
    grouped, ungrouped = world.builder([LAYERS[0]]), world.builder([LAYERS[1]])
    assert grouped.page_size == 128
    assert ungrouped.page_size == 64
    batch = world.batch([[3, 1]], [700])
    table = decode_table(world.build(ungrouped, batch))
    assert torch.equal(table, world.pages(batch, 64, LAYERS[1]))


def test_a_layer_class_of_the_models_own_is_refused(on_path: Any) -> None:
    """Kimi K3's attention layer gathers from its cache with the backend's table itself."""
    world = World(on_path("fi-native"))
    for name in LAYERS:
        world.add_layer(name)
    own = torch.nn.Module()
    own.impl, own.num_heads = world.layers[LAYERS[1]].impl, world.query_heads
    own.kv_cache = torch.tensor([])
    world.layers[LAYERS[1]] = own
    with pytest.raises(RepagingRefusedError, match=rf"Module \({LAYERS[1]}\) reads its KV cache"):
        world.builder()


@pytest.mark.parametrize("path", ["fi-native", "trtllm-gen"])
def test_nvfp4_is_refused_before_memory_is_allocated(on_path: Any, path: str) -> None:
    world = World(on_path(path), cache_dtype="nvfp4")
    world.layers = {}
    world.config.compilation_config.static_forward_context = world.layers
    spec = world.spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)
    with world.current(), pytest.raises(RepagingRefusedError, match="NVFP4"):
        world.backend.customize_spec(spec)
    with pytest.raises(RepagingRefusedError, match="NVFP4"):
        world.builder([], spec)
