# SPDX-License-Identifier: Apache-2.0
"""The builders of the MLA backends and of TurboQuant, re-paged."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from builders.world import LAYERS, MAX_NUM_SEQS, World
from repage.errors import RepagingRefusedError
from repage.vllm import backends
from repage.vllm.impl import CHOICE_ATTRIBUTE

ONE_TABLE = {"build_page_table": 1}
MLA = [("RepagedFlashInferMLABackend", 64), ("RepagedFlashMLABackend", 64)]


def mla_spec(block: int = 640) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.fixture
def mla_world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of two MLA layers; FlashMLA's device queries answer for an H200."""

    def make(name: str, layout: str = "BLHNC", block: int = 640) -> tuple[World, Any]:
        backend = getattr(backends, name)
        flashmla = importlib.import_module("vllm.v1.attention.backends.mla.flashmla")
        monkeypatch.setattr(flashmla, "num_compute_units", lambda _index: 132)
        monkeypatch.setattr(
            flashmla, "get_mla_metadata", lambda *_args, **_kwargs: (torch.zeros(1), None)
        )
        world = World(backend, layout=layout, block_tokens=block, head_size=576, kv_heads=1)
        impl = backend.get_impl_cls()
        for layer in LAYERS:
            world.add_mla_layer(layer, impl.__new__(impl))
            world.layers[layer].impl.num_heads = world.query_heads
        world.bind(spec=mla_spec(block))
        return world, world.builder(spec=mla_spec(block))

    return make


@pytest.mark.parametrize(("name", "page"), MLA)
def test_mla_decode_and_prefill_get_one_table(
    mla_world: Any, launches: Counter[str], name: str, page: int
) -> None:
    world, builder = mla_world(name)
    batch = world.batch([[3, 1], [4, 5]], [700, 1200], [1, 900])
    metadata = world.build(builder, batch)
    expected = world.pages(batch, page, LAYERS[0])
    assert torch.equal(metadata.decode.block_table, expected[:1])
    assert torch.equal(metadata.prefill.block_table, expected[1:])
    assert metadata.decode.block_table.data_ptr() == builder.group_table._buffer.table.data_ptr()
    # FlashInfer's MLA kernels ask for rows of whole 128 tokens.
    assert expected.shape[1] * page % 128 == 0
    assert builder.page_size == page
    assert launches == ONE_TABLE
    assert getattr(metadata, CHOICE_ATTRIBUTE) is builder.group_table.choice


@pytest.mark.parametrize(("name", "page"), MLA)
def test_mla_tables_follow_the_batches(mla_world: Any, name: str, page: int) -> None:
    world, builder = mla_world(name)
    dummy = world.batch([[0]] * MAX_NUM_SEQS, [1] * MAX_NUM_SEQS)
    captured = world.build(builder, dummy, "build_for_cudagraph_capture").decode.block_table
    for rows, lengths in (([[3, 1, 7, 2]] * 4, [2560] * 4), ([[4]], [5])):
        batch = world.batch(rows, lengths)
        world.build(builder, batch)
        assert torch.equal(captured[: len(rows)], world.pages(batch, page, LAYERS[0]))
        assert not captured[len(rows) :].any()


def test_mla_reads_in_kernel_pages(mla_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode and the context part of prefill get the pages that the table names."""
    world, builder = mla_world("RepagedFlashMLABackend")
    read: list[torch.Tensor] = []
    parent = backends.FAMILIES["RepagedFlashMLABackend"].class_path.rpartition(".")[0]
    stock = importlib.import_module(parent).FlashMLAImpl
    monkeypatch.setattr(stock, "forward_mqa", lambda _self, _q, cache, *_args: read.append(cache))
    monkeypatch.setattr(
        stock, "forward_mha", lambda _self, _q, _kv, _pe, cache, *_args: read.append(cache)
    )
    batch = world.batch([[3, 1]], [700])
    metadata = world.build(builder, batch)
    layer = world.layers[LAYERS[1]]
    cache = layer.kv_cache
    slot = 3 * 640 + 130
    cache[3, 130] = 7.0
    layer.impl._view_layouts = {}
    layer.impl.forward_mqa(None, cache, metadata, layer)
    layer.impl.forward_mha(None, None, None, cache, metadata)
    page = int(metadata.decode.block_table[0, 130 // 64])
    for pages in read:
        assert pages.shape[1:] == (64, 576)
        assert (pages[page, 130 % 64] == 7.0).all()
        assert int(pages.ne(0).any(-1).sum()) == 1
    assert len(read) == 2
    assert slot // 640 == 3


@pytest.mark.parametrize(("layout", "block"), [("LBHNC", 64), ("BLHNC", 64), ("BLHNC", 192)])
def test_mla_elsewhere_is_vllms_own(
    mla_world: Any, launches: Counter[str], layout: str, block: int
) -> None:
    """192-token blocks would make rows that are no multiple of 128 tokens."""
    world, builder = mla_world("RepagedFlashInferMLABackend", layout, block)
    assert builder.group_table is None
    batch = world.batch([[3, 1]], [block + 5])
    metadata = world.build(builder, batch)
    assert metadata.decode.block_table.data_ptr() == batch.table.data_ptr()
    assert launches == {}


def test_mla_layers_of_a_models_own_class_are_refused(mla_world: Any) -> None:
    """``models/kimi_k3/nvidia/mla.py``: the layer gathers context from its cache itself."""
    world, _ = mla_world("RepagedFlashMLABackend")

    class MultiHeadLatentAttention(torch.nn.Module):
        pass

    layer = MultiHeadLatentAttention()
    layer.__dict__.update(
        {key: value for key, value in vars(world.layers[LAYERS[0]]).items() if key[0] != "_"}
    )
    world.layers[LAYERS[0]] = layer
    with pytest.raises(RepagingRefusedError, match="MultiHeadLatentAttention"):
        world.builder(spec=mla_spec())


# TurboQuant


@pytest.fixture
def turboquant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of TurboQuant layers; its workspace on the device is left out."""

    def make(layout: str, block: int = 640) -> tuple[World, Any, Any]:
        module = importlib.import_module("vllm.v1.attention.backends.turboquant_attn")
        monkeypatch.setattr(
            module.TurboQuantMetadataBuilder, "_reserve_workspace", lambda _self: None
        )
        world = World(
            backends.RepagedTurboQuantAttentionBackend,
            layout=layout,
            block_tokens=block,
            cache_dtype="turboquant_4bit_nc",
        )
        spec = world.spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC)
        with world.current():
            spec = world.backend.customize_spec(spec)
        for name in LAYERS:
            world.add_layer(name)
        world.bind(spec=spec)
        return world, world.builder(spec=spec), spec

    return make


def test_turboquant_on_packed_token_major_blocks(turboquant: Any, launches: Counter[str]) -> None:
    world, builder, spec = turboquant("BLNHC")
    assert spec.get_block_stride_alignment() == 128 * 2 * spec.state_content_size_bytes
    batch = world.batch([[3, 1], [4]], [700, 5])
    metadata = world.build(builder, batch)
    assert torch.equal(metadata.block_table, world.pages(batch, 128, LAYERS[0]))
    assert builder.group_table.choice.page_tokens == 128
    assert launches == ONE_TABLE
    # Capture overwrites the lengths, not the table.
    captured = world.build(builder, batch, "build_for_cudagraph_capture")
    assert captured.block_table.data_ptr() == metadata.block_table.data_ptr()


def test_turboquant_on_its_own_layout(turboquant: Any, launches: Counter[str]) -> None:
    world, builder, _ = turboquant("LBNHC", 64)
    batch = world.batch([[3, 1], [4]], [70, 5])
    metadata = world.build(builder, batch)
    assert metadata.block_table.data_ptr() == batch.table.data_ptr()
    assert launches == {}
