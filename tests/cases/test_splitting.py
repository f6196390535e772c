# SPDX-License-Identifier: Apache-2.0
"""Splitting packed and padded blocks into kernel pages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import repage
from cases.packed_layers import QWEN_DRAFT, QWEN_STRIDE, QWEN_TARGET, Layer, int32, tiling
from repage.errors import NoValidPageError, UnsupportedLayoutError

DENSE = {"requires_dense_pages": True}


class TestQwen35WithDFlash:
    """vLLM's proposal of a block-outermost layout: "64-token kernel blocks, which packed 640-token
    KV cache blocks cannot be split into" (vllm 0.33.0, v1/worker/utils.py).
    """

    @pytest.mark.parametrize(
        ("layer", "page", "unit", "scale", "pages"),
        [
            (QWEN_TARGET, 16, 32_768, 480, 40),
            (QWEN_TARGET, 32, 65_536, 240, 20),
            (QWEN_TARGET, 64, 131_072, 120, 10),
            (QWEN_TARGET, 128, 262_144, 60, 5),
            (QWEN_DRAFT, 16, 65_536, 240, 40),
            (QWEN_DRAFT, 32, 131_072, 120, 20),
            (QWEN_DRAFT, 64, 262_144, 60, 10),
        ],
    )
    def test_token_major(self, layer: Layer, page: int, unit: int, scale: int, pages: int) -> None:
        plan = layer.walked(page)
        assert (plan.page_unit, plan.block_step, plan.page_step) == (unit, scale, 1)
        assert plan.pages_per_block == pages

    @pytest.mark.parametrize(
        ("layer", "scales"),
        [(QWEN_TARGET, (960, 480, 240, 120)), (QWEN_DRAFT, (1920, 960, 480, 240))],
    )
    def test_head_major(self, layer: Layer, scales: tuple[int, ...]) -> None:
        layer = replace(layer, interior="HNC")
        assert tuple(layer.walked(page).block_step for page in (16, 32, 64, 128)) == scales

    def test_the_offset_may_be_a_multiple_of_the_unit_but_need_not(self) -> None:
        assert [QWEN_DRAFT.offset / QWEN_DRAFT.walked(n).page_unit for n in (16, 32, 64)] == [
            200,
            100,
            50,
        ]
        replace(QWEN_DRAFT, offset=QWEN_DRAFT.offset - 16).walked(64)

    def test_table(self) -> None:
        table = repage.build_page_table(int32([3, 1]), QWEN_TARGET.walked(64))
        assert table.tolist() == [[*range(360, 370), *range(120, 130)]]


class TestPaddedPageOfKimiK3:
    """vllm#54877: a page stride per kernel block asks for the storage `split ratio` times over."""

    LAYER = Layer(884_736, 768, 1, 512, blocks=10)

    def test_a_padded_page_splits_within_its_storage(self) -> None:
        plan = self.LAYER.walked(64)
        assert (plan.page_unit, plan.block_step, plan.pages_per_block) == (32_768, 27, 12)
        assert repage.build_page_table(int32([2]), plan).tolist() == [list(range(54, 66))]
        extent = plan.num_virtual_pages * plan.page_stride
        assert extent == 9 * 884_736 + 393_216 == 8_355_840 <= 8_847_360

    def test_128_tokens_do_not_tile_it_and_the_error_says_what_would(self) -> None:
        with pytest.raises(NoValidPageError, match=r"ratio 13\.50") as error:
            self.LAYER.tiling(128)
        assert error.value.suggestions == ("a block stride of 917504 bytes (+32768)",)
        assert replace(self.LAYER, stride=917_504).tiling(128).block_step == 14
        assert self.LAYER.tiling(64, 128).page_tokens == 64

    def test_kernels_that_add_up_addresses_read_128_token_pages_all_the_same(self) -> None:
        """Our contract is wider than the report: pages may overlap where nothing objects."""
        plan = self.LAYER.walked(128)
        assert (plan.block_step, plan.page_step) == (27, 2)


class TestRowsOfAMultiHeadLatentCache:
    """vllm#47783, #47493, #47805, #47895, #58069 and flashinfer#3856, #4362: sparse kernels address
    base + row * token stride, so the block stride must be whole rows (gsm8k fell from 95% to 0%).
    """

    ROW = repage.KernelPageRules(page_sizes=(1,), allow_overlapping_pages=False, stride_alignment=8)

    def test_a_block_of_a_fraction_of_a_row_is_refused_with_the_next_whole_one(self) -> None:
        with pytest.raises(NoValidPageError, match=r"ratio 256\.44") as error:
            repage.plan_pages(Layer(149_760, 64, 1, 584).geometry(), self.ROW)
        assert error.value.suggestions == ("a block stride of 150088 bytes (+328)",)
        plan = repage.plan_pages(Layer(150_088, 64, 1, 584).geometry(), self.ROW)
        assert plan.block_step == 257

    def test_rows_of_576_bytes(self) -> None:
        plan = repage.plan_pages(Layer(149_760, 64, 1, 576, blocks=8).geometry(), self.ROW)
        assert plan.block_step == 260
        assert plan.map_slot(5 * 64 + 3) == 5 * 260 + 3 == 1303

    @pytest.mark.usefixtures("vllm")
    def test_sparse_backends_are_not_repaged(self) -> None:
        """FlashInfer from 0.7 on takes storage offsets there; ids must never be mapped twice."""
        from repage.vllm.registration import BACKENDS

        assert not [name for name in BACKENDS if "SPARSE" in name]


class TestKernelsThatRebuildStrides:
    """ROCm/aiter#3498: a kernel took N * token stride for the block stride, and hybrid models with
    interleaved K and V have twice that (error 6.3 instead of 0.09).
    """

    KEYS = torch.empty(8 * 8192, dtype=torch.float16, device="meta").as_strided(
        (8, 1, 16, 256), (8192, 4096, 256, 1)
    )

    def test_blocks_twice_as_long_are_every_second_virtual_page(self) -> None:
        """The page stride of the view is the dense one, so even such a kernel reads them right."""
        geometry = repage.BlockGeometry.from_tensor(self.KEYS)
        assert geometry.block_stride == 2 * (2 * 4096)
        plan = repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,), **DENSE))
        assert (plan.page_stride, plan.block_step) == (2 * 4096, 2)

    def test_blocks_that_are_no_whole_pages_apart_are_refused(self) -> None:
        geometry = replace(repage.BlockGeometry.from_tensor(self.KEYS), block_stride=12_288)
        repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,)))
        with pytest.raises(NoValidPageError, match="dense pages of 8192 bytes, one after the"):
            repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,), **DENSE))


class TestScalesNextToData:
    """flashinfer#4044: strided scale factors corrupt fa2 and XQA (cosine 0.927 or NaN)."""

    def test_interleaved_scale_rows_are_not_dense(self) -> None:
        """NVFP4 with head dim 256: 128 bytes of data and 16 of scales make a row of 144."""
        memory = torch.empty(8 * 64 * 144, dtype=torch.uint8, device="meta")
        scales = memory.as_strided((8, 1, 64, 16), (64 * 144, 144, 144, 1), 128)
        geometry = repage.BlockGeometry.from_tensor(scales)
        assert geometry.token_stride == 144
        with pytest.raises(NoValidPageError, match="dense pages of 256 bytes"):
            repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,), **DENSE))

    @pytest.mark.usefixtures("vllm")
    def test_a_cache_with_scales_apart_inside_each_page_is_refused(self) -> None:
        """All data, then all scales, per page: the bytes depend on the page, so it is not split."""
        from types import SimpleNamespace

        from repage.vllm.backends import FAMILIES
        from repage.vllm.policy import refusal_reason

        spec = SimpleNamespace(kv_quant_mode=SimpleNamespace(is_nvfp4=True))
        policy = FAMILIES["RepagedFlashAttentionBackend"].derive.keywords["policy"]
        assert "scales apart inside each page" in str(refusal_reason(policy, spec))


class TestOuterStridesAreFree:
    """vllm#34158: a contiguity test refused cross-layer caches that every kernel can read."""

    def test_a_cross_layer_cache(self) -> None:
        shape = (167_623, 2, 8, 16, 16, 64)
        memory = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        cache = memory[:, 0, 3].transpose(1, 2)  # [B, H, N, C] of one layer's keys
        geometry = repage.BlockGeometry.from_tensor(cache)
        plan = repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,)))
        page = repage.virtual_view(cache, plan)[plan.page(167_622, 0)]
        assert page.storage_offset() == cache[167_622].storage_offset()

    def test_the_content_must_be_dense(self) -> None:
        cache = torch.empty((8, 2, 16, 64, 2), dtype=torch.bfloat16, device="meta")[..., 0]
        with pytest.raises(UnsupportedLayoutError, match="contiguous content dimension"):
            repage.BlockGeometry.from_tensor(cache)


class TestMimoWithDFlash:
    """MiMo-V2.5 TP2 + DFlash: 192- and 128-dim heads, packed blocks of 64 tokens."""

    STRIDE = 737_280
    FULL, SWA, DRAFT = (
        Layer(STRIDE, 64, 2, 640),
        Layer(STRIDE, 64, 4, 640),
        Layer(STRIDE, 64, 4, 512),
    )

    def test_token_major_blocks_tile_the_targets_only(self) -> None:
        assert self.FULL.tiling(32).block_step == 18
        assert self.SWA.tiling(32).block_step == 9
        with pytest.raises(NoValidPageError, match=r"ratio 11\.25") as error:
            self.DRAFT.tiling(32)
        assert error.value.suggestions == ("a block stride of 786432 bytes (+49152)",)
        padding = 786_432 / self.STRIDE - 1
        assert padding == pytest.approx(0.0667, abs=1e-4)

    def test_padding_for_all_three_costs_a_third(self) -> None:
        layers = (self.FULL, self.SWA, self.DRAFT)
        common = math.lcm(*(layer.walked(32).page_unit for layer in layers))
        stride = math.ceil(self.STRIDE / common) * common
        assert (common, stride) == (327_680, 983_040)
        assert [replace(layer, stride=stride).tiling(32).page_step for layer in layers] == [1] * 3

    def test_head_major_blocks_need_no_padding(self) -> None:
        """Hence BLHNC is better than BLNHC here."""
        layers = [replace(x, interior="HNC") for x in (self.FULL, self.SWA, self.DRAFT)]
        plans = [layer.tiling(32) for layer in layers]
        assert [plan.page_unit for plan in plans] == [20_480, 20_480, 16_384]
        assert [plan.block_step for plan in plans] == [36, 36, 45]


def test_minimax_m3_with_64_drafter_heads() -> None:
    """MiniMax-M3 TP4 + EAGLE-3: the token-major drafter tiles with 32 tokens, not with 64."""
    draft = Layer(4_980_736, 128, 16, 512, 3_932_160)
    with pytest.raises(NoValidPageError, match=r"524288 \(ratio 9\.50\)"):
        draft.tiling(64)
    assert draft.tiling(32, 64).block_step == 19
    head_major = replace(draft, interior="HNC").tiling(64)
    assert (head_major.page_unit, head_major.block_step) == (32_768, 152)


def test_a_head_major_page_is_one_run_of_bytes_per_head() -> None:
    """Whoever copies `page size` contiguous bytes of such a page copies other pages' tokens."""
    layer = replace(QWEN_TARGET, interior="HNC")
    view = repage.virtual_view(layer.cache(), layer.walked(128))
    page = view[0]
    assert page[0].is_contiguous()
    assert page[0].numel() == 131_072
    assert page.stride(0) == 655_360
    with pytest.raises(NoValidPageError, match="dense pages"):
        repage.plan_pages(layer.geometry(), replace(tiling(128), **DENSE))


def test_qwen3_next_with_eagle3() -> None:
    """Qwen3-Next-80B + EAGLE-3: blocks of 544 tokens have 32-token pages and no 64-token ones."""
    target = Layer(15_597_568, 544, 2, 1024)
    draft = Layer(15_597_568, 544, 8, 512, 13_369_344)
    assert target.tiling(32, 64).block_step == 238
    plan = draft.tiling(32, 64)
    assert (plan.block_step, draft.offset // plan.page_unit) == (119, 102)
    with pytest.raises(NoValidPageError, match="544 % 64 = 32"):
        draft.tiling(64)


@pytest.mark.usefixtures("vllm")
def test_gpt_oss_blocks_are_pages() -> None:
    """gpt-oss-120b with five full drafters, 16-token blocks: one page a block.

    The report takes the block stride itself for the page stride then. A plan keeps the common
    divisor, which names the same bytes; re-paged backends leave such blocks alone and read vLLM's
    own view, with the block stride.
    """
    layers = Layer(917_504, 16, 8, 256), Layer(917_504, 16, 8, 512)
    assert [layer.walked(16).block_step for layer in layers] == [28, 14]
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from repage.vllm import compat
    from repage.vllm.backends import FAMILIES
    from repage.vllm.policy import PageContext, choose_page

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
    policy = FAMILIES["RepagedTurboQuantAttentionBackend"].derive.keywords["policy"]
    assert choose_page(policy, PageContext(spec, compat.layout_by_name("BLHNC"))) is None


def test_all_targets_share_a_table_and_the_drafter_has_its_own() -> None:
    """NVIDIA/TensorRT-LLM#18957: heterogeneous head dims need addresses per layer."""
    targets = [replace(QWEN_TARGET, offset=index * 1_310_720).walked(64) for index in range(10)]
    tables = {tuple(repage.build_page_table(int32([3, 1]), plan)[0].tolist()) for plan in targets}
    assert len(tables) == 1
    draft = repage.build_page_table(int32([3, 1]), QWEN_DRAFT.walked(64))[0].tolist()
    assert (targets[0].block_step, QWEN_DRAFT.walked(64).block_step) == (120, 60)
    assert tuple(draft) not in tables
    assert QWEN_STRIDE % 131_072 == 0
