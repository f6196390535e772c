# SPDX-License-Identifier: Apache-2.0
"""Page tables, lengths, windows and persistent buffers."""

from __future__ import annotations

import math

import pytest
import torch

import repage
from cases.packed_layers import QWEN_TARGET, Layer, int32
from repage.errors import PageIdError, ShapeError
from repage.vllm.kernel_rules import FLASHINFER_MLA

CPU = torch.device("cpu")
PLAN = QWEN_TARGET.walked(64)  # N = 640, ten pages a block, 120 page ids from block to block


def plan_of(tokens: int, page: int, blocks: int = 16) -> repage.PagePlan:
    return Layer(tokens * 1024, tokens, 1, 1024, blocks=blocks).walked(page)


def test_lengths_count_in_kernel_pages_not_in_blocks() -> None:
    """vllm#27547, vllm#27753: the block size in the page's place (gsm8k 0.02 instead of 0.85)."""
    plan = plan_of(544, 32)
    length = int32(1000)
    pages = -(-1000 // plan.page_tokens)
    assert pages == 32
    assert repage.last_page_len(length, plan.page_tokens).tolist() == [8]
    table = repage.build_page_table(int32([1, 2]), plan, seq_lens=length)
    assert table[0, :pages].tolist() == list(range(17, 17 + 32))
    assert repage.last_page_len(length, 544).tolist() == [456]  # the mistake


class TestTableWidth:
    """vllm#39324: TRT-LLM MLA takes rows of a multiple of 128 tokens."""

    @pytest.mark.usefixtures("vllm")
    def test_vllms_own_rule(self) -> None:
        """`max_model_len` 9416 with pages of 32 tokens: 295 columns become 296."""
        from vllm.v1.worker import block_table

        width = -(-9416 // 32)
        assert (width, block_table.get_block_table_width(width, 32)) == (295, 296)

    def test_whole_blocks_of_640_tokens_need_no_more(self) -> None:
        width = -(-262_144 // 640)
        table = repage.build_page_table(torch.zeros((1, width), dtype=torch.int32), PLAN)
        assert (width, table.shape[1]) == (410, 4100)
        assert table.shape[1] * 64 % 128 == 0

    @pytest.mark.usefixtures("vllm")
    def test_blocks_that_are_no_multiple_of_128_tokens_are_left_to_vllm(self) -> None:
        """2096-token blocks and 16-token pages: 126 * 131 = 16,506 columns instead of 16,512.

        A page table is as wide as its blocks, so such blocks are not re-paged at all.
        """
        assert 126 * 131 == 16_506
        assert math.ceil(16_506 / 8) * 8 == 16_512
        assert 2096 % FLASHINFER_MLA.block_multiple == 48
        from types import SimpleNamespace

        from repage.vllm.backends import FAMILIES
        from repage.vllm.policy import PageContext

        policy = FAMILIES["RepagedFlashInferMLABackend"].derive.keywords["policy"]
        answers = SimpleNamespace(get_supported_kernel_block_sizes=lambda _spec: [32, 64])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("repage.vllm.compat.backend_class", lambda _path: answers)
            specs = {
                n: SimpleNamespace(block_size=n, head_size=576, dtype=torch.bfloat16)
                for n in (640, 2096)
            }
            assert policy.page_rules(PageContext(specs[2096], None)) is None
            assert policy.page_rules(PageContext(specs[640], None)).page_sizes == (32, 64)


def test_slot_of_a_drafter_that_reads_kernel_pages() -> None:
    """vllm#47698, vllm-ascend#13372: block size of the manager with ids of kernel blocks."""
    row = [3, 1]
    column, index, offset = PLAN.locate_token(700)
    assert (column * 10 + index, offset) == (10, 60)
    page = PLAN.page(row[column], index)
    assert page == 120
    slot = row[column] * 640 + 700 % 640
    assert PLAN.map_slot(slot) == page * 64 + offset == 7740
    mapped = repage.map_slots(torch.tensor([slot]), PLAN)
    assert mapped.tolist() == [7740]


class TestDecodeContextParallelism:
    """vllm#54679 and the RFC vllm#50391: each rank holds every D-th run of I tokens."""

    def test_two_ranks_share_two_blocks(self) -> None:
        """32 tokens are one local block of 16. Global lengths keep more columns live, never fewer,
        and all that a kernel reads with its local length is right."""
        plan = plan_of(16, 16)
        table = repage.build_page_table(int32([5, 0]), plan, seq_lens=int32(32))
        local = repage.build_page_table(int32([5, 0]), plan, seq_lens=int32(16))
        assert (local != 0).sum() == 1
        assert table[0, 0] == local[0, 0] == plan.page(5, 0)

    @pytest.mark.usefixtures("vllm")
    def test_local_lengths(self) -> None:
        """local(r, L) = floor(L / (D I)) I + clamp(L % (D I) - r I, 0, I)."""
        from vllm.v1.attention.backends import utils

        lengths = [utils.get_dcp_local_seq_lens(int32(70), 2, rank, 16) for rank in range(2)]
        assert [length.tolist() for length in lengths] == [[38], [32]]
        plan = plan_of(32, 16)
        live = [
            repage.build_page_table(int32([1, 2]), plan, seq_lens=length)[0].tolist()
            for length in lengths
        ]
        assert live == [[2, 3, 4, 5], [2, 3, 0, 0]]


class TestSlidingWindow:
    """A sequence of 5000 tokens and a window of 4096."""

    def test_the_first_needed_page_is_found_by_rounding_down(self) -> None:
        """kekzl/imp#967. Blocks before it are the null block, in the live range of the row."""
        begin = 5000 - 4096
        column, index, _ = PLAN.locate_token(begin)
        assert (column, column * 10 + index) == (1, 14) == (1, begin // 64)
        plan = Layer(640 * 2048, 640, 2, 1024, blocks=16).walked(64)
        row = repage.build_page_table(int32([0, *range(5, 12)]), plan, seq_lens=int32(5000))[0]
        assert row[:10].tolist() == list(range(10))  # null block 0, pages and all
        assert row[10:20].tolist() == list(range(50, 60))

    def test_a_table_cut_to_the_window_needs_shorter_lengths(self) -> None:
        """vllm#23010: 14 skipped pages are 896 tokens less."""
        skipped = 14
        kv_len = 5000 - skipped * 64
        assert kv_len == 4104
        assert repage.last_page_len(int32(kv_len), 64).tolist() == [8]
        assert repage.last_page_len(int32(5000), 64).tolist() == [8]
        pages = -(-5000 // 64)
        indptr = int32(0, pages)
        row = repage.build_kv_indices(int32([3, 1, 2, 0, 3, 1, 2, 0]), indptr, PLAN)
        assert row[skipped:].numel() == -(-kv_len // 64)


class TestNullBlock:
    """vllm#57156, vllm#57158: graph capture wrote into block 0, and 0 * NaN is NaN."""

    def test_its_pages_lie_in_the_first_block_of_the_pool(self) -> None:
        """So zeroing the 15,728,640 bytes of block 0 cleans them, for every layer."""
        for offset in range(0, 15_728_640, 1_310_720):
            layer = Layer(15_728_640, 640, 2, 1024, offset)
            view = repage.virtual_view(layer.cache(), layer.walked(64))
            for page in range(10):
                begin = view[page].storage_offset()
                assert begin >= 0
                assert begin + 64 * 2 * 1024 <= 15_728_640

    @pytest.mark.parametrize("length", [0, 1])
    def test_padding_rows_hold_valid_pages(self, length: int) -> None:
        """vllm#37442, vllm#38359, vllm#38436: padding rows come with length 0 or 1."""
        lengths = int32(700, length)
        table = repage.build_page_table(int32([3, 1], [0, 0]), PLAN, seq_lens=lengths)
        assert table[1].tolist() == ([0] * 20 if length == 0 else [*range(10), *[0] * 10])
        assert int(table.min()) >= 0
        assert int(table.max()) < PLAN.num_virtual_pages


class TestPersistentBuffer:
    def test_columns_of_a_longer_batch_do_not_stay(self) -> None:
        """GeeeekExplorer/nano-vllm#258, vllm#13418: five blocks, then three."""
        buffer = repage.PageTableBuffer(PLAN, 2, 5, CPU)
        blocks = int32([3, 1, 2, 3, 1])
        assert (buffer.build(blocks, int32(5 * 640))[0, 30:50] != 0).all()
        table = buffer.build(blocks, int32(3 * 640))
        assert table[0, 30:50].tolist() == [0] * 20

    def test_a_table_wider_than_the_captured_one_is_an_error(self) -> None:
        """The same reports: captured 16 columns wide, and 17 were needed."""
        buffer = repage.PageTableBuffer(PLAN, 2, 16, CPU)
        with pytest.raises(ShapeError, match="exactly 16 columns"):
            buffer.build(torch.zeros((1, 17), dtype=torch.int32))

    def test_padding_rows_of_a_full_graph_are_cleared(self) -> None:
        """local-inference-lab/vllm#621: rows of the batch before gave NaN at two requests."""
        buffer = repage.PageTableBuffer(PLAN, 4, 2, CPU)
        address = buffer.table.data_ptr()
        buffer.build(int32(*[[3, 1]] * 4))
        buffer.build(int32([3, 1]), int32(700))
        assert buffer.table[1:].eq(0).all()
        assert buffer.table.data_ptr() == address

    def test_rows_beyond_the_largest_batch_are_an_error(self) -> None:
        """vllm 0.33.0, AttentionGroup.map_to_kernel_block_table: `max_num_seqs` rows."""
        buffer = repage.PageTableBuffer(PLAN, 2, 2, CPU)
        with pytest.raises(ShapeError, match="at most 2 rows"):
            buffer.build(torch.zeros((3, 2), dtype=torch.int32))

    def test_micro_batches_do_not_share_memory(self) -> None:
        first, second = (repage.PageTableBuffer(PLAN, 2, 2, CPU) for _ in range(2))
        table = first.build(int32([3, 1]))
        second.build(int32([2, 2]))
        assert table[0, 0] == 360


def test_writes_and_reads_go_through_one_view() -> None:
    """sgl-project/sglang#19107, sglang#26531: written by full-pool ids, read by window ids."""
    row = [2, 3, 1]
    table = set(repage.build_page_table(int32(row), PLAN)[0].tolist())
    slots = torch.tensor([row[token // 640] * 640 + token % 640 for token in range(3 * 640)])
    assert set((repage.map_slots(slots, PLAN) // 64).tolist()) == table


def test_compressed_rows_of_pages_longer_than_a_token() -> None:
    """sgl-project/sglang#8593, sglang#9990, sglang#9572: lengths 65, 1 and 640."""
    lengths = int32(65, 1, 640)
    pages = torch.div(lengths + 63, 64, rounding_mode="floor")
    indptr = torch.cat([int32(0), pages.cumsum(0)]).to(torch.int32)
    assert indptr.tolist() == [0, 2, 3, 13]
    assert repage.last_page_len(lengths, 64).tolist() == [1, 1, 64]
    indices = repage.build_kv_indices(int32([3], [1], [2]), indptr, PLAN)
    assert indices.tolist() == [360, 361, 120, *range(240, 250)]


@pytest.mark.parametrize(("tokens", "index"), [(4192, 93), (2112, 93)])
def test_a_token_is_on_one_page_whatever_the_block(tokens: int, index: int) -> None:
    """vllm#41037, vllm#45575, vllm#49612: prefill and decode with unequal blocks, equal pages."""
    plan = plan_of(tokens, 32)
    column, page, _ = plan.locate_token(3000)
    assert column * plan.pages_per_block + page == index


class TestIdsOutsideThePool:
    """tpu-inference#2366: ids past a layer's slots were clipped, silently."""

    def test_debug_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REPAGE_DEBUG", "1")
        with pytest.raises(PageIdError, match=r"ids from 0 to 3, got 4 at \[0, 1\]"):
            repage.build_page_table(int32([3, 4]), PLAN)
        with pytest.raises(PageIdError, match="slots below 2560"):
            repage.map_slots(torch.tensor([4 * 640]), PLAN)

    def test_otherwise_they_are_the_null_block_not_a_neighbour(self) -> None:
        assert repage.build_page_table(int32([4]), PLAN)[0].tolist() == list(range(10))
        assert repage.map_slots(torch.tensor([4 * 640]), PLAN).tolist() == [-1]
