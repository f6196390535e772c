# SPDX-License-Identifier: Apache-2.0
"""Integer range, strides and alignment."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import repage
from cases.packed_layers import QWEN_TARGET, Layer, int32
from repage.errors import GeometryError, NoValidPageError

INT32, UINT32 = 2**31 - 1, 2**32 - 1


class TestAddressesBeyond32Bits:
    """Kernels wrapped where a page id times a stride left 31 or 32 bits; ids here never do."""

    @pytest.mark.parametrize(
        ("report", "stride", "last_good", "limit"),
        [
            ("b12x#45", 1_077_120, 1993, INT32),
            ("b12x#20", 1_039_680, 4131, UINT32),
            ("vllm#52109", 1_002_240, 2142, INT32),
            ("15,728,640-byte blocks", 15_728_640, 136, INT32),
        ],
    )
    def test_byte_offsets(self, report: str, stride: int, last_good: int, limit: int) -> None:
        assert last_good * stride <= limit < (last_good + 1) * stride, report
        layer = Layer(stride, 64, 1, 576, blocks=7100)
        plan = layer.walked(64)
        cache = layer.cache()
        view = repage.virtual_view(cache, plan)
        for block in (last_good, last_good + 1, 7024):
            page = view[plan.page(block, 0)]
            assert page.storage_offset() == cache[block].storage_offset() == block * stride

    def test_7024_blocks_of_1039680_bytes(self) -> None:
        layer = Layer(1_039_680, 64, 1, 576, blocks=7025)
        plan = layer.walked(16)
        assert plan.page(7024, 0) * plan.page_stride == 7_302_712_320

    def test_pages_past_2_to_the_32_elements(self) -> None:
        """flashinfer#3136: a stride of 16,384 elements wraps at page 262,144."""
        memory = torch.empty(300_000 * 16_384, dtype=torch.bfloat16, device="meta")
        cache = memory.as_strided((300_000, 1, 64, 256), (16_384, 16_384, 256, 1))
        plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 64)
        page = repage.virtual_view(cache, plan)[262_144]
        assert page.storage_offset() == 2**32

    def test_a_kernel_that_multiplies_in_32_bits_says_so_by_its_largest_id(self) -> None:
        """syv-ai/qwen38-27b-rtx3090#86: block times stride in int32, a pool of 480k tokens."""
        pool = Layer(640 * 8192, 640, 4, 2048, blocks=480_000 // 640)
        rules = repage.KernelPageRules(page_sizes=(64,), max_page_index=INT32 // (64 * 8192))
        with pytest.raises(NoValidPageError, match="largest page id 7499 is above 4095"):
            repage.plan_pages(pool.geometry(), rules)
        assert repage.plan_pages(replace(pool, blocks=400).geometry(), rules).max_page_id == 3999

    def test_pages_of_one_token(self) -> None:
        """ROCm/aiter#2608: (pages - 1) * stride left 31 bits with one-token pages."""
        layer = Layer(64 * 1024, 64, 1, 1024, blocks=40_000)
        plan = layer.walked(1)
        assert (plan.num_virtual_pages - 1) * plan.page_stride > INT32
        assert plan.page(39_999, 63) == 40_000 * 64 - 1

    def test_page_ids_that_int32_tables_cannot_hold_are_refused(self) -> None:
        geometry = Layer(64 * 16, 64, 1, 16, blocks=2**26).geometry()
        with pytest.raises(NoValidPageError, match="largest page id"):
            repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(1,)))
        with pytest.raises(GeometryError, match="page tables hold int32 ids"):
            repage.build_page_table(int32([0]), repage.PagePlan(geometry, 1))


class TestSizeOneHeads:
    """vllm#40737, vllm#30842, vllm#32417, flashinfer#2232: a size-1 dimension may carry any stride,
    and a tensor map refuses those that are no multiple of 16 bytes (Qwen3.5-397B TP8: one KV head).
    """

    @pytest.mark.parametrize("stray", [1, 2, 7, 512 * 16])
    def test_the_head_stride_is_written_out(self, stray: int) -> None:
        memory = torch.empty(8 * 640 * 512, dtype=torch.bfloat16, device="meta")
        cache = memory.as_strided((8, 1, 640, 512), (640 * 512, stray, 512, 1))
        plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 16)
        view = repage.virtual_view(cache, plan)
        assert view.stride(1) * 2 == 16 * 1024 == 16_384
        assert plan.page_unit == 16_384

    def test_token_major_blocks_keep_the_content_as_head_stride(self) -> None:
        layer = Layer(2**20, 640, 1, 1024)
        assert repage.virtual_view(layer.cache(), layer.walked(16)).stride(1) == 1024

    def test_many_pages_of_one_head(self) -> None:
        """flashinfer#2232: 3,860,866 pages, strides (2, 256, 256, 2064384) bytes."""
        memory = torch.empty(3_860_866 * 16 * 128, dtype=torch.bfloat16, device="meta")
        cache = memory.as_strided((3_860_866, 1, 16, 128), (2048, 1, 128, 1))
        plan = repage.plan_pages(
            repage.BlockGeometry.from_tensor(cache), repage.KernelPageRules(page_sizes=(16,))
        )
        strides = [stride * 2 for stride in repage.virtual_view(cache, plan).stride()[:-1]]
        assert all(stride % 16 == 0 and stride >= 256 for stride in strides)
        assert plan.max_page_id == 3_860_865


class TestFp8NextToNvfp4:
    """vllm#57445: 512 and 288 bytes a token and layer, four layers of each, blocks of 1056."""

    FP8, FP4 = 512, 288
    STRIDE = 1056 * 4 * (FP8 + FP4)

    def test_pages_and_block(self) -> None:
        assert (1056 * self.FP8, 1056 * self.FP4) == (540_672, 304_128)
        assert self.STRIDE == 3_379_200

    def test_nvfp4_pages_do_not_tile_it(self) -> None:
        layer = Layer(self.STRIDE, 1056, 1, self.FP4, 4 * 540_672)
        with pytest.raises(NoValidPageError, match=r"unit 9216 \(ratio 366\.67\)"):
            layer.tiling(32)

    def test_the_next_block_stride_that_both_tile(self) -> None:
        units = 32 * self.FP8, 32 * self.FP4
        common = math.lcm(*units)
        stride = math.ceil(self.STRIDE / common) * common
        assert (common, stride) == (147_456, 3_391_488)
        for content in (self.FP8, self.FP4):
            assert Layer(stride, 1056, 1, content).tiling(32).page_step == 1


class TestRowAlignment:
    """flash-attention#2368: asynchronous copies take rows aligned to 16 bytes."""

    def test_192_and_128_dim_heads(self) -> None:
        """K rows of 384 bytes, V begins 384 bytes later."""
        assert 384 % 16 == 0
        plan = repage.plan_pages(
            Layer(64 * 640 * 4, 64, 1, 640).geometry(), repage.KernelPageRules(page_sizes=(64,))
        )
        assert plan.geometry.token_stride == 640

    def test_fp8_rows_of_72_bytes_are_refused(self) -> None:
        assert 72 % 16 == 8
        with pytest.raises(NoValidPageError, match="72 is not a multiple of 16 bytes"):
            repage.plan_pages(
                Layer(64 * 72 * 16, 64, 1, 72).geometry(), repage.KernelPageRules(page_sizes=(16,))
            )

    def test_a_page_in_a_longer_slot(self) -> None:
        """vllm#50276: DSV4 pages of 37,376 bytes in slots of 37,440, a multiple of 576."""
        assert 37_440 % 576 == 0
        layer = Layer(37_440, 64, 1, 584, blocks=100)
        plan = layer.walked(64)
        view = repage.virtual_view(layer.cache(), plan)
        page = view[plan.page(99, 0)]
        assert page.storage_offset() == 99 * 37_440
        assert page.numel() == 37_376


class TestBlocksThatOverlap:
    """vllm-ascend#15408: 2048 tokens of 1024 bytes in slots made for 1024 tokens."""

    def test_a_layer_longer_than_its_block_is_an_error(self) -> None:
        with pytest.raises(GeometryError, match=r"2097152 .*1048576"):
            replace(QWEN_TARGET, stride=1_048_576, tokens=2048, heads=1).geometry()

    def test_1024_tokens_fit(self) -> None:
        replace(QWEN_TARGET, stride=1_048_576, tokens=1024, heads=1).geometry()

    @pytest.mark.parametrize(
        "fields",
        [
            {"token_stride": 1024},  # tokens within the heads of another
            {"head_stride": 512},  # heads within heads
            {"block_stride": 640 * 2048 - 16},  # blocks within blocks
        ],
    )
    def test_no_dimension_may_step_into_another(self, fields: dict[str, int]) -> None:
        geometry = Layer(640 * 2048, 640, 2, 1024).geometry()
        with pytest.raises(GeometryError, match="overlap"):
            replace(geometry, storage_bytes=None, **fields)
