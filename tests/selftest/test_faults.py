# SPDX-License-Identifier: Apache-2.0
"""What is broken on purpose must fail a check: the step, the unit, the view, the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import repage
from repage import _core, buffer, ops
from repage.geometry import BlockGeometry
from repage.plan import PagePlan
from repage.selftest import pool as pool_module
from repage.selftest.attention import AttentionPath, Queries, make_queries
from repage.selftest.attention_checks import compare
from repage.selftest.pool import KernelPages, PackedPool, PoolShape
from repage.selftest.result import CheckFailedError, Status
from repage.selftest.run import run_on, select_checks
from repage.selftest.target import AttentionKernels, Target

ATTENTION = [
    f"attention.{path}.{layout}.hd128"
    for path in ("fa2-decode", "fa2-prefill", "fa3-prefill", "xqa-decode", "xqa-fp8-decode")
    for layout in ("NHD", "HND")
]
TABLES = ["ops.virtual_view", "ops.page_table", "ops.kv_indices", "ops.buffer"]


def other_block_stride(plan: PagePlan) -> BlockGeometry:
    """A block step one too small."""
    geometry = plan.geometry
    return dataclasses.replace(geometry, block_stride=geometry.block_stride - plan.page_unit)


def half_a_unit(plan: PagePlan) -> BlockGeometry:
    """Pages half as far apart as they are."""
    return dataclasses.replace(plan.geometry, token_stride=plan.geometry.token_stride // 2)


class WrongMaps:
    """The compiled operations, called with the map of another geometry."""

    def __init__(self, change: Callable[[PagePlan], BlockGeometry]) -> None:
        self._change = change
        self.plans: list[PagePlan] = []

    def __getattr__(self, name: str) -> object:
        real = getattr(_core, name)
        if name not in ("build_page_table", "TableBuilder", "build_kv_indices", "map_slots"):
            return real

        def call(page_map: _core.PageMap, *arguments: int) -> object:
            (plan,) = {plan for plan in self.plans if plan.page_map is page_map}
            return real(self._change(plan).page_map(plan.page_tokens), *arguments)

        return call


@pytest.fixture(params=[other_block_stride, half_a_unit], ids=lambda change: change.__name__)
def wrong_maps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = WrongMaps(request.param)
    real = PagePlan.__post_init__

    def remember(plan: PagePlan) -> None:
        real(plan)
        wrong.plans.append(plan)

    monkeypatch.setattr(PagePlan, "__post_init__", remember)
    for module in (ops, buffer):
        monkeypatch.setattr(module, "_core", wrong)


@pytest.mark.usefixtures("wrong_maps")
@pytest.mark.parametrize("name", [*TABLES, "ops.slots", *ATTENTION])
def test_a_wrong_map_fails(name: str, target: Target) -> None:
    (result,) = run_on(target, select_checks([name]))
    assert result.status is Status.FAIL, result.detail


@pytest.mark.parametrize("name", ATTENTION)
def test_the_view_of_another_layer_fails(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pool_module.virtual_view

    def first_layer(kv_cache: torch.Tensor, plan: PagePlan) -> torch.Tensor:
        view = real(kv_cache, plan)
        return view.as_strided(view.shape, view.stride(), 0)

    monkeypatch.setattr(pool_module, "virtual_view", first_layer)
    (result,) = run_on(target, select_checks([name]))
    assert result.status is Status.FAIL, result.detail


def test_stale_columns_fail(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(repage.PageTableBuffer):
        def build(self, *args: torch.Tensor, check_ids: bool | None = None) -> torch.Tensor:
            before = self.table.clone()
            result = super().build(*args, check_ids=check_ids)
            self.table.copy_(torch.where(self.table == 0, before, self.table))
            return result

    monkeypatch.setattr(repage, "PageTableBuffer", Stale)
    (result,) = run_on(target, select_checks(["ops.buffer"]))
    assert result.status is Status.FAIL, result.detail


def whole_pages(
    _kernels: AttentionKernels, pages: KernelPages, queries: Queries, _window: int
) -> torch.Tensor:
    """A kernel that reads the last page to its end, and weighs every token alike."""
    value = pages.value if pages.layout == "NHD" else pages.value.transpose(1, 2)
    out = torch.empty_like(queries.tokens)
    for row in range(len(queries.counts)):
        ids = pages.kv_indices[int(pages.kv_indptr[row]) : int(pages.kv_indptr[row + 1])].long()
        mean = value[ids].float().flatten(0, 1).mean(0)
        out[row] = mean.repeat_interleave(4, 0)
    return out


def reading_path(tolerance: float = 2e-2) -> AttentionPath:
    return AttentionPath("reads-tails", "decode", whole_pages, (64,), False, tolerance=tolerance)


def test_a_kernel_that_reads_page_tails_is_told_from_wrong_pages(target: Target) -> None:
    path = reading_path()
    pool = PackedPool(PoolShape("NHD", 2, 128), (65, 640), target.device)
    with pytest.raises(CheckFailedError, match="1 are not finite; the same on dense pages"):
        compare(target, path, pool, 64, make_queries(pool, "decode"))


def test_wrong_values_fail_where_both_agree(target: Target) -> None:
    """Whole pages have no tails: packed and dense agree, and plain torch does not."""
    pool = PackedPool(PoolShape("NHD", 2, 128), (640,), target.device)
    queries = make_queries(pool, "decode")
    with pytest.raises(CheckFailedError, match=r"away from plain torch, expected at most 0\.02"):
        compare(target, reading_path(), pool, 64, queries)
    assert compare(target, reading_path(tolerance=10), pool, 64, queries) > 0.02


def test_a_kernel_that_reads_the_null_block_passes_and_is_reported(target: Target) -> None:
    """Weighed with zero, a finite null block does no harm; NaN would."""
    assert target.attention is not None

    class ReadsNullBlock(target.attention.decode_wrapper):
        def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
            pages_of_block_0 = paged_kv_cache[1][: 640 // 64]
            return super().run(q, paged_kv_cache) + 0 * pages_of_block_0.float().sum()

    kernels = dataclasses.replace(target.attention, decode_wrapper=ReadsNullBlock)
    checks = select_checks(["attention.fa2-decode.HND.window"])
    (stock,) = run_on(target, checks)
    assert stock.measurements["reads_null_block"] == 0.0
    (result,) = run_on(dataclasses.replace(target, attention=kernels), checks)
    assert result.status is Status.PASS, result.detail
    assert result.measurements["reads_null_block"] == 1.0
    assert result.detail.endswith("; reads the null block")


def test_every_failing_combination_is_named(target: Target) -> None:
    """One page size that is wrong does not hide what the others do."""
    assert target.attention is not None
    real = target.attention.xqa_decode

    def wrong_for_some(*, kv_cache: tuple[torch.Tensor, ...], **arguments: torch.Tensor) -> None:
        real(kv_cache=kv_cache, **arguments)
        if kv_cache[0].shape[1] in (32, 128) and not kv_cache[0].is_contiguous():
            arguments["out"] += 1

    checks = select_checks(["attention.xqa-decode.NHD.hd128"])
    kernels = dataclasses.replace(target.attention, xqa_decode=wrong_for_some)
    (result,) = run_on(dataclasses.replace(target, attention=kernels, quick=False), checks)
    assert result.status is Status.FAIL
    assert result.detail.startswith("4 of 8 fail: pages of 32, 1 KV heads, page step 1: 7 of 7")
    assert "pages of 128, 4 KV heads" in result.detail
    assert "pages of 64" not in result.detail
