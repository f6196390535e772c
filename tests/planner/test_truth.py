# SPDX-License-Identifier: Apache-2.0
"""Published and measured numbers, reproduced with the real planner of both vLLM versions."""

from __future__ import annotations

import pytest

from planner.scenarios import PUBLIC_BLOCKS

MIB = 2**20


def test_every_private_name_of_the_planner_is_there(results):
    assert results["probes"] == []


class TestHeadline:
    """Qwen3.6-35B-A3B + DFlash, bf16 states, 7 drafted tokens, requests of 262,144 tokens."""

    def test_groups_and_blocks(self, results):
        plan = results["headline"]
        stock, packed = plan["layouts"]["LBHNC"], plan["layouts"]["BLHNC"]
        assert plan["manager_block"] == 640
        assert (stock["groups"], packed["groups"]) == (46, 5)
        assert packed["bytes_per_block"] == 15_728_640
        assert plan["verdict"] == "packed"
        assert plan["layout"] == "BLHNC"

    def test_bytes_of_a_request_and_capacity(self, results):
        stock, packed = (results["headline"]["layouts"][name] for name in ("LBHNC", "BLHNC"))
        assert stock["bytes_per_request"] == 6962.5 * MIB
        assert packed["bytes_per_request"] == 6765 * MIB
        assert 1.02 < packed["capacity_tokens"] / stock["capacity_tokens"] < 1.03

    def test_kernel_pages(self, results):
        """A1 of the public cases: head-major steps of 64-token pages."""
        pages = results["headline"]["layouts"]["BLHNC"]["kernel_pages"]
        steps = {page["kind"]: (page["page_tokens"], page["block_step"]) for page in pages}
        assert steps["full, 2x1024 B"] == (64, 240)
        assert steps["drafter full, 8x512 B"] == (64, 480)
        assert all(page["page_step"] == 1 for page in pages)

    def test_minimum_group_width(self, results):
        """Width 3: 17 groups, 12 KiB a token of padding, 4 empty slots; width 5: 10 groups."""
        three, five = results["headline"]["what_if"]
        assert (three["groups"], three["padded_slots"]) == (17, 4)
        assert three["padding_bytes_per_token"] == 12 * 1024
        assert five["groups"] == 10
        stock = results["headline"]["layouts"]["LBHNC"]
        assert three["capacity_tokens"] / stock["capacity_tokens"] == pytest.approx(
            5.19 / 7.42, abs=0.01
        )

    def test_fp8(self, results):
        plan = results["headline fp8"]
        stock, packed = plan["layouts"]["LBHNC"], plan["layouts"]["BLHNC"]
        assert plan["manager_block"] == 1280
        assert (stock["groups"], packed["groups"]) == (46, 6)
        assert packed["bytes_per_block"] == 18_350_080
        assert plan["verdict"] == "packed"

    def test_flash_attention_4_asks_for_128_token_pages(self, results):
        plan = results["fa4"]
        pages = plan["layouts"][plan["layout"]]["kernel_pages"]
        assert plan["verdict"] == "packed"
        assert {p["page_tokens"] for p in pages if p["kind"] == "full, 2x1024 B"} == {128}


class TestStay:
    def test_mimo(self, results):
        plan = results["mimo"]
        packed = plan["layouts"]["BLHNC"]
        assert (packed["groups"], packed["bytes_per_block"]) == (12, 737_280)
        assert plan["verdict"] == "stock"

    def test_mimo_says_from_which_length_on_it_would_pack(self, results):
        assert any("from 131,072 tokens on packed" in note for note in results["mimo"]["notes"])
        assert results["mimo long"]["verdict"] == "packed"

    def test_gemma_like(self, results):
        """Fewer bytes stock, although half as many groups is not why."""
        plan = results["gemma-like"]
        stock, packed = plan["layouts"]["LBHNC"], plan["layouts"]["BLHNC"]
        assert (stock["groups"], stock["bytes_per_request"]) == (6, 6185 * MIB)
        assert (packed["groups"], packed["bytes_per_request"]) == (14, 7272.5 * MIB)
        assert plan["verdict"] == "stock"

    def test_balanced_buckets(self, results):
        """Fewer groups packed, and yet less capacity."""
        plan = results["balanced"]
        stock, packed = plan["layouts"]["LBHNC"], plan["layouts"]["BLHNC"]
        assert packed["groups"] < stock["groups"]
        assert packed["bytes_per_request"] > stock["bytes_per_request"]
        assert plan["verdict"] == "stock"

    @pytest.mark.parametrize("name", ["gpt-oss-20b", "uniform"])
    def test_pages_of_one_size(self, results, name):
        plan = results[name]
        assert plan["verdict"] == "stock"
        assert "pages of one size" in plan["reasons"][0]

    def test_gpt_oss_has_two_groups_either_way(self, results):
        layouts = results["gpt-oss-20b"]["layouts"]
        assert [plan["groups"] for plan in layouts.values()] == [2, 2]


def test_a_pipeline_is_judged_by_the_stage_that_it_costs_most(results):
    plan = results["pipeline"]
    stock, packed = plan["layouts"]["LBHNC"], plan["layouts"]["BLHNC"]
    assert (stock["groups"], packed["groups"]) == (41, 4)
    assert plan["verdict"] == "packed"


def test_a_head_major_interior_is_chosen_where_it_divides_more_strides(results):
    plan = results["nano"]
    assert plan["layout"] == "BLHNC"
    assert all(page["problem"] is None for page in plan["layouts"]["BLHNC"]["kernel_pages"])


def test_planning_leaves_no_trace(results):
    assert results["trace"] == {"config": True, "specs": True, "log": True}


def test_a_vllm_with_its_own_preference_is_seen(results):
    assert results["own preference"] == {"this": False, "preferring": True}


@pytest.mark.parametrize("label", PUBLIC_BLOCKS)
def test_public_block_sizes(results, label):
    assert results["blocks"][label] == PUBLIC_BLOCKS[label][2]


def test_the_block_is_the_one_of_vllms_own_function(results):
    for label, tokens in results["vLLM's blocks"].items():
        assert results["blocks"][label] == tokens, label


def test_every_model_can_be_planned(results):
    assert len(results["every model"]) >= 20
    assert set(results["every model"].values()) <= {"packed", "stock"}
