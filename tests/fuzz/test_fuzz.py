# SPDX-License-Identifier: Apache-2.0
"""The fuzz targets for a short time, and that they see what is wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import repage
from fuzz import __main__ as command
from fuzz import engine, ops, sanitizer
from fuzz.geometries import random_pool
from fuzz.traffic import make_traffic

FIRST_SEED = 20_000


def check_operations(first: int, count: int) -> None:
    for seed in range(first, first + count):
        try:
            ops.check(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 600, 100))
def test_operations(seed: int) -> None:
    check_operations(seed, 100)


def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    build = repage.build_page_table

    def dense(table: torch.Tensor, plan: repage.PagePlan, **options: object) -> torch.Tensor:
        found = build(table, plan, **options)  # type: ignore[arg-type]
        return found.floor_divide_(max(plan.block_step - plan.pages_per_block, 1))

    monkeypatch.setattr(repage, "build_page_table", dense)
    with pytest.raises(AssertionError):
        check_operations(FIRST_SEED, 20)


@pytest.fixture(scope="module", params=sanitizer.VECTOR_BITS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sanitizer.build(tmp_path_factory.mktemp("sanitized"), request.param)


@pytest.fixture
def twins(program: Path) -> Iterator[sanitizer.SanitizedTwins]:
    with sanitizer.SanitizedTwins(program) as process:
        yield process


class TestSanitizedTwins:
    """The CPU twins with AddressSanitizer and UBSan, for every width of vectors."""

    def test_random_arrays(self, twins: sanitizer.SanitizedTwins) -> None:
        for seed in range(FIRST_SEED, FIRST_SEED + 1500):
            sanitizer.check(seed, twins)

    def test_the_longest_sequence_in_one_token_blocks(
        self, twins: sanitizer.SanitizedTwins
    ) -> None:
        """2**31 - 1 tokens and one of lookahead need 2**31 blocks, which int32 cannot count."""
        plan = repage.PagePlan(
            repage.BlockGeometry.dense(
                "NHC",
                num_blocks=6,
                block_tokens=1,
                num_heads=1,
                content_bytes=16,
                block_stride=16,
            ),
            1,
        )
        sizes = (4, 1, 4, 1, 1, 1, 1)
        none = np.empty(0, np.int32)
        arrays = (
            np.array([4, 2, 4, 5], np.int32),
            np.array([2**31 - 1], np.int32),
            np.full(4, -7, np.int32),
            none,
            np.zeros(2, np.int32),
            none,
        )
        table, *_ = twins.run(
            *(0, sizes, plan.page_map.to_bytes(), arrays),
            ((4, np.int32), (0, np.int32), (0, np.int32)),
        )
        assert table.tolist() == [4, 2, 4, 5]

    def test_reading_behind_a_table_ends_with_a_report(
        self, twins: sanitizer.SanitizedTwins
    ) -> None:
        """The harness gives every array exactly its size, so that this is seen."""
        plan = random_pool(np.random.default_rng(1)).plan
        none, pages = np.empty(0, np.int32), plan.pages_per_block
        arrays = (np.zeros(2, np.int32), none, np.zeros(3 * pages, np.int32), none)
        with pytest.raises(AssertionError, match="AddressSanitizer: heap-buffer-overflow"):
            twins.run(
                *(0, (3, 1, 3, 1, 0, 1, 0), plan.page_map.to_bytes()),
                (*arrays, np.zeros(2, np.int32), none),
                ((3 * pages, np.int32), (0, np.int32), (0, np.int32)),
            )


def test_traffic_is_a_function_of_the_seed() -> None:
    assert make_traffic(5, 30, 1900) == make_traffic(5, 30, 1900)
    assert make_traffic(5, 30, 1900) != make_traffic(6, 30, 1900)
    traffic = make_traffic(5, 200, 1900)
    assert any(request.abort_after for request in traffic)
    assert max(len(request.prompt) for request in traffic) <= 1900


@pytest.mark.engine
def test_traffic_on_a_stock_and_a_packed_engine(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    stock, packed = engine.check(1, tmp_path, count=6)
    assert len(stock["tokens"]) == len(packed["tokens"]) == 6


class TestCommand:
    def test_it_prints_its_seed_and_what_was_done(self, capsys: pytest.CaptureFixture) -> None:
        assert command.main(["--target", "ops", "--seconds", "1", "--seed", "7"]) == 0
        out = capsys.readouterr().out
        assert "fuzz ops: seeds from 7" in out
        assert "nothing differed" in out

    def test_a_failure_names_the_command_that_repeats_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        def fail(seed: int) -> None:
            assert seed != 9

        monkeypatch.setattr(ops, "check", fail)
        assert command.main(["--target", "ops", "--seconds", "5", "--seed", "7"]) == 1
        assert "python -m fuzz --target ops --seed 9 --count 1" in capsys.readouterr().out

    def test_targets_share_the_time(self) -> None:
        assert sum(command.SHARES.values()) == pytest.approx(1.0)
        assert set(command.SHARES) == set(command.TARGETS)
