# SPDX-License-Identifier: Apache-2.0
"""What re-paging leaves alone: zeroing, connectors, allocation, slots. vLLM's own code throughout.

A re-paged layer stays bound to vLLM's view in manager blocks. Everything that goes by that view or
by manager block ids (KV connectors, offloading, block copies, zeroing, prefix caching) therefore
works as it does without the plugin. `test_vllm_033.py` runs this file with vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import repage
from cases.packed_layers import QWEN_STRIDE, QWEN_TARGET, Layer
from repage.errors import GeometryError

pytestmark = pytest.mark.usefixtures("vllm")

CPU = torch.device("cpu")


def zeroing_segments(
    caches: dict[str, torch.Tensor], num_blocks: int, tokens: int
) -> list[tuple[int, int, int]]:
    """Return (address, block stride, span) in bytes, as vLLM's KVBlockZeroer computes them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer

    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    group = AttentionGroup(object, list(caches), spec, 0)  # type: ignore[arg-type]
    context = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    meta = KVBlockZeroer(CPU, [group], [tokens], context, num_blocks)._meta
    assert meta is not None
    addresses, strides, spans = (values.tolist() for values in meta[:3])
    return [
        (address, stride * 4, span * 4)
        for address, stride, span in zip(addresses, strides, spans, strict=True)
    ]


@dataclass
class Engine:
    """A packed pool of two layers, their re-paged backend, and a batch."""

    world: Any
    backend: Any
    names: list[str]

    @property
    def caches(self) -> dict[str, torch.Tensor]:
        return {name: self.world.layers[name].kv_cache for name in self.names}

    def step(self) -> Any:
        """Build metadata, read and write, as a forward pass does."""
        builder = self.backend.get_builder_cls()(
            self.world.spec(), self.names, self.world.config, CPU
        )
        common = self.world.batch([[3, 1], [2]], [200, 60])
        metadata = builder.build(0, common)
        for name in self.names:
            layer = self.world.layers[name]
            layer.impl.forward(layer, None, None, None, layer.kv_cache, metadata, None)
            layer.impl.do_kv_cache_update(layer, None, None, layer.kv_cache, common.slot_mapping)
        return SimpleNamespace(builder=builder, common=common, metadata=metadata)


@pytest.fixture
def engine() -> Engine:
    from repage.vllm.factory import repage_backend
    from support.recording import LAYERS, FixedPages, RecordingBackend, World

    backend = repage_backend(RecordingBackend, FixedPages(32), module=__name__)
    world = World(layout="BLHNC", impl=backend.get_impl_cls())
    names = world.add_layers(*LAYERS)
    world.bind()
    return Engine(world, backend, names)


class TestZeroing:
    """vllm#43990, vllm#50276, vllm#52709: zeroing the block stride from a layer's first byte wipes
    the beginning of the next block.
    """

    OFFSETS = (0, 37_440, 74_880, 112_320)
    STRIDE, SPAN, BLOCKS = 149_760, 37_376, 100

    def test_a_span_ends_where_the_layer_does(self) -> None:
        memory = torch.zeros(self.BLOCKS * self.STRIDE, dtype=torch.uint8)
        caches = {
            f"layer{index}": memory.as_strided(
                (self.BLOCKS, 1, 64, 584), (self.STRIDE, 64 * 584, 584, 1), offset
            )
            for index, offset in enumerate(self.OFFSETS)
        }
        segments = zeroing_segments(caches, self.BLOCKS, 64)
        assert [segment[1:] for segment in segments] == [(self.STRIDE, self.SPAN)] * 4
        address, stride, span = segments[3]
        end = address + 99 * stride + span - memory.data_ptr()
        assert end == 14_975_936 <= memory.numel() == 14_976_000

    def test_repaging_does_not_move_a_byte_of_it(self, engine: Engine) -> None:
        world = engine.world
        before = zeroing_segments(engine.caches, world.num_blocks, world.block_tokens)
        engine.step()
        after = zeroing_segments(engine.caches, world.num_blocks, world.block_tokens)
        page = world.spec().page_size_bytes
        assert after == before
        assert [segment[1:] for segment in after] == [(2 * page, page)] * 2


class TestRegisteredCaches:
    """vllm#53264, vllm#53779, vllm#28661, vllm#28677: connectors must see manager blocks."""

    def test_a_connector_gets_the_views_that_vllm_bound(self, engine: Engine) -> None:
        from vllm.v1.worker.utils import bind_kv_cache

        registered = dict(engine.caches)
        runner_caches: list[torch.Tensor] = []
        bind_kv_cache(registered, engine.world.layers, runner_caches)
        engine.step()
        world = engine.world
        for name, cache in registered.items():
            assert world.layers[name].kv_cache is cache
            assert cache.shape == (world.num_blocks, world.heads, world.block_tokens, 128)
        assert len(runner_caches) == 2

    def test_the_kernel_reads_another_view_of_the_same_bytes(self, engine: Engine) -> None:
        engine.step()
        for name, cache in engine.caches.items():
            (read,) = engine.world.layers[name].impl.reads
            assert read.shape[2] == 32
            assert read.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()

    def test_slots_and_writes_stay_in_manager_terms(self, engine: Engine) -> None:
        step = engine.step()
        assert step.metadata.slot_mapping is step.common.slot_mapping
        for name, cache in engine.caches.items():
            ((written, slots),) = engine.world.layers[name].impl.writes
            assert written is cache
            assert slots is step.common.slot_mapping

    def test_the_managers_table_is_not_written_to(self, engine: Engine) -> None:
        step = engine.step()
        assert step.common.block_table_tensor[:, :2].tolist() == [[3, 1], [2, 0]]
        assert step.builder.kv_cache_spec.block_size == engine.world.block_tokens

    def test_block_size_and_hash_granularity_stay(self, engine: Engine) -> None:
        """vllm#52804, vllm#55622, vllm#53749: prefix hits are counted in manager blocks."""
        spec = engine.world.spec()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
            assert engine.backend.customize_spec(spec).block_size == spec.block_size
            (size,) = engine.backend.get_supported_kernel_block_sizes(spec)
        assert spec.block_size % size.base == 0


def test_kernel_ids_of_manager_ids_where_blocks_are_dense() -> None:
    """vllm#28661: block 7 of two kernel pages is pages 14 and 15."""
    plan = Layer(128 * 1024, 128, 1, 1024, blocks=8).walked(64)
    table = repage.build_page_table(torch.tensor([[7]], dtype=torch.int32), plan)
    assert table.tolist() == [[14, 15]]


class TestStridesOfAConnector:
    def test_the_manager_stride_is_not_the_first_stride_of_a_page_view(self) -> None:
        """vllm#51718: offloading and mooncake take stride(0) for the manager's."""
        plan = QWEN_TARGET.walked(64)
        view = repage.virtual_view(QWEN_TARGET.cache(), plan)
        assert view.stride(0) == plan.page_unit == 131_072
        assert plan.block_step * view.stride(0) == QWEN_STRIDE == QWEN_TARGET.cache().stride(0)
        assert plan.pages_per_block * view.stride(0) == 1_310_720

    def test_padded_blocks_have_a_stride_of_their_own(self) -> None:
        """LMCache#5166, LMCache#4729: a padded pool needs the block stride in elements."""
        memory = torch.empty(8 * 20_000, dtype=torch.bfloat16, device="meta")
        cache = memory.as_strided((8, 2, 64, 128), (20_000, 8192, 128, 1))
        geometry = repage.BlockGeometry.from_tensor(cache)
        assert geometry.block_stride // geometry.element_size == 20_000


class TestPoolsOfOtherAllocators:
    def test_pages_of_a_block_are_counted(self) -> None:
        """kvcached#330: ratio 1 for 33: 2699 blocks of 528 tokens are 89,067 pages of 16."""
        layer = Layer(528 * 2048, 528, 4, 512, blocks=2699)
        plan = layer.walked(16)
        assert (plan.pages_per_block, plan.num_virtual_pages) == (33, 89_067)

    def test_blocks_counted_by_their_natural_size_do_not_fit_padded_ones(self) -> None:
        """kvcached#399, kvcached#426: more blocks than the padded pool holds."""
        padded = replace(Layer(884_736, 768, 1, 512), blocks=10).geometry()
        natural = 10 * 884_736 // (768 * 512)
        assert natural == 22
        with pytest.raises(GeometryError, match="the last of 22 blocks ends at byte"):
            replace(padded, num_blocks=natural)

    def test_a_pool_need_not_be_a_whole_number_of_a_layers_pages(self) -> None:
        """vllm#54756: "shape '[-1, 9543, 16896]' is invalid for input of size 66850470912"."""
        indexer, latent = 128 * 132, 128 * 656
        assert (indexer, latent) == (16_896, 83_968)
        assert 66_850_470_912 % (9543 * indexer)
        stride = 70 * latent + 66 * indexer
        memory = torch.empty(66_850_470_912, dtype=torch.uint8, device="meta")
        cache = memory.as_strided((9543, 1, 128, 132), (stride, indexer, 132, 1), 70 * latent)
        plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 64)
        page = repage.virtual_view(cache, plan)[plan.page(9542, 1)]
        assert page.storage_offset() == 70 * latent + 9542 * stride + 64 * 132
