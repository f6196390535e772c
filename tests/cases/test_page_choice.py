# SPDX-License-Identifier: Apache-2.0
"""Which page a kernel gets of which manager block, and what the error says when there is none."""

from __future__ import annotations

import math

import pytest

import repage
from cases.packed_layers import Layer, int32, tiling
from repage.errors import NoValidPageError
from repage.vllm.kernel_rules import FA4_HD256, both, trtllm_gen

TRTLLM_GEN_PAGES = (16, 32, 64, 128, 256, 512, 1024)


def blocks_of(tokens: int, content: int = 1024, heads: int = 1) -> repage.BlockGeometry:
    return Layer(tokens * heads * content * 12, tokens, heads, content).geometry()


@pytest.mark.parametrize("sizes", [(16, 32, 64), (16, 32, 64, 128)])
def test_qwen3_next_blocks_of_544_tokens_have_17_pages_of_32(sizes: tuple[int, ...]) -> None:
    """flashinfer#1796, vllm#24280, vllm#24486: trtllm-gen takes at most 128 tokens a page."""
    plan = repage.plan_pages(blocks_of(544), repage.KernelPageRules(page_sizes=sizes))
    assert (plan.page_tokens, plan.pages_per_block) == (32, 17)


class TestPagesAbove128:
    """flashinfer#4347: trtllm-gen is wrong past 4096 tokens with 256-token pages (0.6.16.post1)."""

    def test_versions_with_the_fault_get_128(self) -> None:
        plan = repage.plan_pages(blocks_of(1280), trtllm_gen((0, 6)).for_cache(128, 2))
        assert (plan.page_tokens, plan.pages_per_block) == (128, 10)

    def test_versions_without_it_get_256(self) -> None:
        plan = repage.plan_pages(blocks_of(1280), trtllm_gen((0, 7)).for_cache(128, 2))
        assert (plan.page_tokens, plan.pages_per_block) == (256, 5)


class TestFlashAttention4WithHeadDim256:
    """vllm#42669: pages of exactly 128 tokens on SM100."""

    @pytest.mark.parametrize(("tokens", "pages"), [(640, 5), (1280, 10), (768, 6)])
    def test_fits(self, tokens: int, pages: int) -> None:
        plan = repage.plan_pages(blocks_of(tokens), FA4_HD256.rules)
        assert (plan.page_tokens, plan.pages_per_block) == (128, pages)

    @pytest.mark.parametrize(
        ("tokens", "next_block"),
        [(448, 512), (528, 640), (544, 640), (1056, 1152), (1600, 1664), (2096, 2176)],
    )
    def test_does_not_fit(self, tokens: int, next_block: int) -> None:
        with pytest.raises(NoValidPageError) as error:
            repage.plan_pages(blocks_of(tokens), FA4_HD256.rules)
        assert error.value.suggestions == (f"manager blocks of {next_block} tokens",)

    @pytest.mark.parametrize(("length", "padded"), [(1, 128), (128, 128), (130, 256), (4000, 4096)])
    def test_the_longest_sequence_counts_in_whole_pages(self, length: int, padded: int) -> None:
        """vllm#53785: decode was disabled for lengths that are no multiple of the page.

        The kernel wants `page_table.shape[1] == max_seqlen_k // 128`; a page table of whole blocks
        always is that many columns for the length which it covers.
        """
        plan = repage.plan_pages(blocks_of(640), FA4_HD256.rules)
        assert math.ceil(length / 128) * 128 == padded
        assert length + plan.over_read_tokens(length) == padded
        table = repage.build_page_table(int32([3] * math.ceil(length / 640)), plan)
        assert table.shape[1] * 128 % 640 == 0
        assert table.shape[1] * 128 >= padded


class TestTwoKernelsOnOneGroup:
    """vllm#48286, vllm#48313, vllm#49845: "No common block size for 16", without saying whose."""

    FIRST = repage.KernelPageRules(name="FIRST", page_sizes=(32, 64))
    SECOND = repage.KernelPageRules(name="SECOND", page_sizes=(64,))

    def test_the_common_page_is_chosen(self) -> None:
        assert repage.plan_pages(blocks_of(640), both(self.FIRST, self.SECOND)).page_tokens == 64

    def test_the_error_names_both(self) -> None:
        with pytest.raises(NoValidPageError, match=r"FIRST and SECOND: .*manager blocks of 32"):
            repage.plan_pages(blocks_of(32), both(self.FIRST, self.SECOND))


def test_the_error_names_block_pages_and_what_to_raise_it_to() -> None:
    """vllm-ascend#8480, vllm-ascend#7528: "None of the kernel sizes [128] can divide" 16."""
    with pytest.raises(NoValidPageError) as error:
        repage.plan_pages(blocks_of(16), repage.KernelPageRules(name="ASCEND", page_sizes=(128,)))
    message = str(error.value)
    for words in ("ASCEND", "blocks of 16 tokens", "16 % 128 = 16", "manager blocks of 128 tokens"):
        assert words in message


@pytest.mark.parametrize(("tokens", "page", "pages"), [(4192, 32, 131), (2112, 64, 33)])
def test_nemotron_3_nano_blocks_differ_by_rank_count(tokens: int, page: int, pages: int) -> None:
    """vllm#41037: fp8 blocks of 4192 tokens on one or two ranks, of 2112 on four."""
    plan = repage.plan_pages(blocks_of(tokens), repage.KernelPageRules(page_sizes=(16, 32, 64)))
    assert (plan.page_tokens, plan.pages_per_block) == (page, pages)


class TestRecurrentStatePageOfNemotron3Nano:
    """vllm#37467: TP4, a state of 540,672 bytes beside attention of 512 bytes a token."""

    STATE = 540_672

    def test_it_holds_66_pages_of_16_tokens_and_no_whole_number_of_64(self) -> None:
        layer = Layer(self.STATE, self.STATE // 512, 1, 512)
        assert layer.tiling(16).pages_per_block == 66
        with pytest.raises(NoValidPageError) as error:
            layer.tiling(64)
        assert error.value.suggestions == ("manager blocks of 1088 tokens",)

    def test_the_suggested_block_costs_three_percent(self) -> None:
        layer = Layer(1088 * 512, 1088, 1, 512)
        assert layer.tiling(64).pages_per_block == 17
        assert layer.stride == 557_056
        assert layer.stride / self.STATE - 1 == pytest.approx(0.0303, abs=1e-4)


class TestPartialPagesAreOverRead:
    """vllm#27264, vllm#27753, vllm#36701, vllm#35219: kernels with pages of 128 tokens and more
    read the rest of a partial page; a float32 state's bytes there become NaN. Blocks are zeroed.
    """

    PLAN = repage.plan_pages(blocks_of(640), tiling(128))

    def test_the_bytes_touched_are_reported(self) -> None:
        assert -(-130 // self.PLAN.page_tokens) == 2
        assert self.PLAN.over_read_tokens(130) == 126
        assert 130 + self.PLAN.over_read_tokens(130) == 256

    @pytest.mark.parametrize(("length", "rest"), [(0, 0), (1, 127), (128, 0), (129, 127)])
    def test_whole_pages_and_no_pages_are_not(self, length: int, rest: int) -> None:
        assert self.PLAN.over_read_tokens(length) == rest

    def test_negative_lengths_are_mistakes(self) -> None:
        with pytest.raises(repage.errors.GeometryError, match="seq_len: expected 0 or more"):
            self.PLAN.over_read_tokens(-1)


@pytest.mark.parametrize(
    ("tokens", "page"), [(640, 128), (1280, 256), (1088, 64), (544, 32), (528, 16)]
)
def test_grouped_queries_on_sm100(tokens: int, page: int) -> None:
    """vllm 0.33.0, v1/attention/backends/flashinfer.py: trtllm-gen takes powers of two to 1024."""
    rules = repage.KernelPageRules(page_sizes=TRTLLM_GEN_PAGES)
    assert repage.plan_pages(blocks_of(tokens), rules).page_tokens == page
