# SPDX-License-Identifier: Apache-2.0
"""Group counts, bytes and the choice between layouts, by vLLM's own planner.

`test_vllm_033.py` runs this file once more with vLLM 0.33.0.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from repage.errors import UnsupportedLayoutError
from support.specs import attention, layers, state

pytestmark = pytest.mark.usefixtures("vllm")

LENGTH = 262_144


def plan(specs: dict[str, Any], layout: str, *, length: int = LENGTH, width: int = 1) -> Any:
    from repage.planner.layout_plan import plan_layout
    from repage.planner.request import offline_config

    return plan_layout(offline_config(length, 8192), [specs], layout, min_group_layers=width)


def verdict(specs: dict[str, Any], length: int = LENGTH) -> str:
    from repage.planner import prefers_packed_kv_cache

    plans = [plan(specs, layout, length=length) for layout in ("LBHNC", "BLHNC")]
    return prefers_packed_kv_cache(plans[0], plans[1:]).verdict


def qwen(states: int, full: int) -> dict[str, Any]:
    """A hybrid target of 2 heads of 256 with a drafter of 8 of 128: five windows, one full."""
    target = attention(2, 256)
    return layers(
        state=(state(target.page_size_bytes), states),
        full=(target, full),
        window=(attention(8, 128, 2048), 5),
        draft=(attention(8, 128), 1),
    )


def buckets(*counts: int) -> dict[str, Any]:
    """Kinds of layers with pages of one size: the first full attention, the others windows."""
    kinds = {
        f"kind{index}": (attention(2, 256, 1024 * index or None), count)
        for index, count in enumerate(counts)
    }
    return layers(**kinds)


def test_this_is_the_expected_vllm() -> None:
    from repage.vllm import compat

    assert compat.vllm_version().startswith(os.environ.get("REPAGE_EXPECT_VLLM", "0.32"))


class TestGroupCounts:
    """vllm#51742, vllm#49472, vllm#58175, vllm#49730, vllm#58207: one full-attention layer in a
    drafter makes a group of every layer of the target.
    """

    @pytest.mark.parametrize(("width", "groups", "padded"), [(1, 46, 0), (3, 17, 4), (5, 10, 4)])
    def test_30_10_5_1(self, width: int, groups: int, padded: int) -> None:
        found = plan(qwen(30, 10), "LBHNC", width=width)
        assert (found.num_groups, found.padded_slots) == (groups, padded)

    @pytest.mark.parametrize(("width", "groups", "padded"), [(5, 11, 1), (9, 7, 0), (10, 6, 1)])
    def test_9_39_5(self, width: int, groups: int, padded: int) -> None:
        """Width 3 would be 18 groups without padding; vLLM's own width is 5 already."""
        found = plan(buckets(9, 39, 5), "LBHNC", width=width)
        assert (found.num_groups, found.padded_slots) == (groups, padded)
        assert plan(buckets(9, 39, 5), "LBHNC").num_groups == 11

    def test_48_16_5_1(self) -> None:
        assert plan(qwen(48, 16), "LBHNC").num_groups == 70

    @pytest.mark.parametrize(("width", "groups"), [(1, 73), (4, 19), (6, 13), (12, 7)])
    def test_1_12_12_12_36(self, width: int, groups: int) -> None:
        assert plan(buckets(1, 12, 12, 12, 36), "LBHNC", width=width).num_groups == groups


class TestBytesOfAToken:
    """Upstream's comparison on Qwen3.6-35B-A3B with DFlash."""

    @pytest.mark.parametrize(
        ("width", "groups", "bytes_per_token"), [(1, 46, 24_576), (3, 17, 36_864)]
    )
    def test_layer_compact(self, width: int, groups: int, bytes_per_token: int) -> None:
        """Wider groups halve them twice and cost half as many bytes again (12 KiB) per token."""
        found = plan(qwen(30, 10), "LBHNC", width=width)
        assert found.num_groups == groups
        assert self.used(found) + found.padding_bytes_per_token == bytes_per_token

    def test_packed(self) -> None:
        found = plan(qwen(30, 10), "BLHNC")
        assert (found.num_groups, self.used(found)) == (5, 24_576)
        assert found.bytes_per_block == 15_728_640

    @staticmethod
    def used(found: Any) -> float:
        growing = [group for group in found.groups if group.layers[0].type == "full"]
        return sum(x.used_bytes / group.block_tokens for group in growing for x in group.layers)


class TestGroupsOnBothLayouts:
    def test_pages_of_one_size_gain_nothing(self) -> None:
        """Qwen3.5-397B TP8, fp8 and a bf16 drafter: 512 bytes a token in every layer."""
        target, draft = attention(1, 256, dtype=torch.uint8), attention(1, 128)
        specs = layers(
            state=(state(target.page_size_bytes), 45),
            full=(target, 15),
            window=(attention(1, 128, 2048), 5),
            draft=(draft, 1),
        )
        assert [plan(specs, layout).num_groups for layout in ("LBHNC", "BLHNC")] == [66, 66]
        assert verdict(specs) == "stock"

    def test_27b_fp8_with_five_windows(self) -> None:
        target = attention(4, 256, dtype=torch.uint8)
        specs = layers(
            state=(state(target.page_size_bytes), 48),
            full=(target, 16),
            window=(attention(8, 128, 2048), 5),
        )
        assert [plan(specs, layout).num_groups for layout in ("LBHNC", "BLHNC")] == [15, 5]

    def test_gpt_oss_20b_keeps_its_two_groups(self) -> None:
        """12 window layers and 13 full ones: vLLM's widest-group rule serves both layouts."""
        specs = layers(
            full=(attention(8, 64, block=16), 13), window=(attention(8, 64, 128, block=16), 12)
        )
        assert [plan(specs, layout).num_groups for layout in ("LBHNC", "BLHNC")] == [2, 2]
        assert verdict(specs) == "stock"


class TestWhatIsCompared:
    def test_no_padding_is_no_reason_to_stay_and_fewer_groups_none_to_pack(self) -> None:
        """Review of the packed-layout proposal: compare what a request may allocate at worst."""
        wide = attention(2, 192, block=64, head_size_v=128)
        specs = layers(
            full=(wide, 9),
            window=(attention(4, 192, 128, block=64, head_size_v=128), 39),
            draft=(attention(4, 128, 1024, block=64), 5),
        )
        packed = plan(specs, "BLHNC", length=65_536)
        assert (packed.num_groups, packed.bytes_per_block) == (12, 737_280)
        assert verdict(specs, 65_536) == "stock"

    def test_every_group_pins_a_block(self) -> None:
        """vllm#54458: 23 groups of 7808-token blocks cost each request 118k tokens and more."""
        stock, packed = (plan(qwen(30, 10), layout, length=1) for layout in ("LBHNC", "BLHNC"))
        for found in (stock, packed):
            assert found.bytes_per_request >= found.num_groups * found.bytes_per_block
        assert packed.bytes_per_request < stock.bytes_per_request

    def test_heads_of_192_and_128_dims(self) -> None:
        """vllm#45181, vllm#45775: pages of 3 to 2 need padding, or a packed block."""
        target, draft = attention(4, 192, block=64), attention(4, 128, 1024, block=64)
        assert target.page_size_bytes / draft.page_size_bytes == 1.5
        specs = layers(full=(target, 4), window=(draft, 8))
        packed = plan(specs, "BLHNC")
        assert all(x.page_bytes == x.used_bytes for g in packed.groups for x in g.layers)
        stock = plan(specs, "LBHNC")
        assert any(layer.page_bytes > layer.used_bytes for g in stock.groups for layer in g.layers)

    def test_the_error_of_ranks_without_a_common_layout_names_their_backends(self) -> None:
        """vllm#55312, vllm#55340: the target's FLEX and the drafter's ROCM have none in common."""
        from repage.vllm.preference.choose import agree_on_layouts

        with pytest.raises(UnsupportedLayoutError, match=r"rank 0 \(FLEX\): LBNHC; rank 1 \(ROCM"):
            agree_on_layouts([["LBNHC"], ["LHBNC", "LBHNC"]], lambda: ["FLEX", "ROCM"])

    def test_a_rank_without_attention_is_planned_with_the_specs_of_all(self) -> None:
        """vllm#51752: such a rank kept 16-token blocks while the others had 512."""
        from repage.planner.layout_plan import plan_layout
        from repage.planner.request import offline_config

        target = attention(2, 256)
        ranks = [
            layers(state=(state(target.page_size_bytes), 30)),
            layers(full=(target, 10), draft=(attention(8, 128), 1)),
        ]
        both = [plan_layout(offline_config(LENGTH, 8192), ranks, "BLHNC")]
        both.append(plan_layout(offline_config(LENGTH, 8192), ranks[::-1], "BLHNC"))
        assert len({(found.num_groups, found.bytes_per_block) for found in both}) == 1
        assert {group.block_tokens for group in both[0].groups} == {640}


class TestWhatOutranksThePreference:
    """LMCache#4729: LMCache reads neither LHBNC nor BHLNC and asks for LBHNC."""

    @pytest.mark.parametrize(("asked", "layout"), [("HND", "LBHNC"), ("NHD", "LBNHC")])
    def test_a_connectors_layout(
        self, asked: str, layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from types import SimpleNamespace

        from vllm.v1.attention.backends import utils

        from repage.vllm.preference.choose import connector_or_request

        monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
        monkeypatch.setattr(utils, "get_kv_connector_cache_layout", lambda *_: asked)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=object()
        )
        assert connector_or_request(config) == layout
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
        assert connector_or_request(config) == "BLHNC"


def test_feasible_before_anything_is_allocated() -> None:
    """vllm#51718: fixed pages on a packed layout died in an assert at allocation."""
    from repage.planner.backends import BackendRules
    from repage.planner.kernel_pages import kernel_pages

    specs = layers(full=(attention(2, 256, block=256), 4), draft=(attention(8, 128, block=256), 1))
    found = plan(specs, "BLHNC")
    rules = BackendRules("FLASHINFER", page_sizes=(16, 32, 64))
    pages = kernel_pages(found, specs, dict.fromkeys(specs, rules))
    assert {page.page_tokens for page in pages} == {64}
    assert not any(page.problem for page in pages)
    fa4 = BackendRules("FA4", page_sizes=(384,))
    (first, _) = kernel_pages(found, specs, dict.fromkeys(specs, fa4))
    assert "does not divide the block" in str(first.problem)


class TestSmallDrafterBlocks:
    """local-inference-lab/vllm#509: a drafter's block raised from 16 to 64 tokens gave 50% more KV
    cache. Their model and drafter are not public, so their numbers are not reproduced; this is the
    mechanism: on a packed layout every block of a sliding window occupies a whole pool block.
    """

    @staticmethod
    def with_drafter_block(block: int) -> dict[str, Any]:
        target = attention(2, 256)
        return layers(
            state=(state(target.page_size_bytes), 30),
            full=(target, 10),
            window=(attention(8, 128, 2048, block=block), 5),
            draft=(attention(8, 128), 1),
        )

    def test_a_request_needs_fewer_bytes_with_larger_drafter_blocks(self) -> None:
        needs = [
            plan(self.with_drafter_block(block), "BLHNC").bytes_per_request
            for block in (16, 64, 640)
        ]
        assert needs[0] > needs[1] > needs[2]
