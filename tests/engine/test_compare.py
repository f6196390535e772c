# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs: what counts as a difference, and how it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repage.demo.compare import IDENTICAL, compare
from repage.demo.result import Generation, KVGroup, RunResult


@pytest.fixture
def result() -> RunResult:
    generation = Generation(token_ids=[1, 2, 3], logprobs=[-0.5, -1.25, -2.0], cached_tokens=0)
    return RunResult(
        setup="some",
        layout="BLHNC",
        page=32,
        plugin=True,
        runner="runner",
        num_blocks=7,
        num_groups=1,
        capacity=4480,
        groups=[KVGroup(0, "FullAttentionSpec", ["a"], 640, 1, 640, 1280, 32, [1], [2, 3])],
        rounds=[[generation, generation], [generation, generation]],
        drafts=[[[4, 5], [6, 7]]],
        attention_blocks=[[1], [2]],
        state_blocks=[[3], [4]],
        preemptions=0,
        tokens_per_second=1.0,
        seconds={"start": 1.0},
        versions={"vllm": "0"},
    )


def with_generation(result: RunResult, generation: Generation) -> RunResult:
    """The same run with another generation for the second request of the second round."""
    return replace(result, rounds=[result.rounds[0], [result.rounds[1][0], generation]])


def test_a_run_is_identical_to_itself(result: RunResult) -> None:
    assert compare(result, result) == IDENTICAL


def test_other_geometry_and_speed_are_no_differences(result: RunResult) -> None:
    other = replace(result, layout="LBHNC", num_blocks=9, capacity=1, groups=[], preemptions=3)
    assert compare(result, other) == IDENTICAL


def test_token_ids(result: RunResult) -> None:
    other = with_generation(result, Generation([1, 2, 9], [-0.5, -1.25, -2.0], 0))
    assert compare(result, other) == "round 2, request 1, token 2: id 3 and 9"
    assert compare(result, other, exact=False) == "round 2, request 1, token 2: id 3 and 9"


def test_missing_tokens(result: RunResult) -> None:
    other = with_generation(result, Generation([1, 2], [-0.5, -1.25], 0))
    assert compare(result, other) == "round 2, request 1, length: 3 and 2 tokens"


def test_one_bit_of_a_logprob(result: RunResult) -> None:
    other = with_generation(result, Generation([1, 2, 3], [-0.5, -1.2500001192092896, -2.0], 0))
    assert compare(result, other) == (
        "round 2, request 1, token 1: logprob -1.25 and -1.2500001192092896"
    )
    assert compare(result, other, exact=False) == IDENTICAL


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_is_never_identical(result: RunResult, value: float) -> None:
    broken = with_generation(result, Generation([1, 2, 3], [-0.5, value, -2.0], 0))
    assert "logprob of the reference is" in compare(broken, broken)
    assert "logprob of the candidate is" in compare(result, broken, exact=False)


def test_draft_tokens(result: RunResult) -> None:
    other = replace(result, drafts=[[[4, 5], [6, 8]]])
    assert compare(result, other) == "drafting call 0: row 1: [6, 7] and [6, 8]"
    assert compare(result, other, exact=False) == IDENTICAL


def test_missing_drafting_calls(result: RunResult) -> None:
    assert compare(result, replace(result, drafts=[])) == "drafting calls: 1 and 0"


def test_missing_rounds_and_requests(result: RunResult) -> None:
    assert compare(result, replace(result, rounds=result.rounds[:1])) == "rounds: 2 and 1"
    fewer = replace(result, rounds=[result.rounds[0][:1], result.rounds[1]])
    assert compare(result, fewer) == "round 1, requests: 2 and 1"


def test_different_setups_are_not_compared(result: RunResult) -> None:
    assert "different setups" in compare(result, replace(result, setup="other"))


def test_a_record_survives_its_file(result: RunResult, tmp_path: Path) -> None:
    result.save(tmp_path / "run.json")
    assert RunResult.load(tmp_path / "run.json") == result
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]
