# SPDX-License-Identifier: Apache-2.0
"""The rule of the decision, on plans made up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repage.planner.decision import prefers_packed_kv_cache
from repage.planner.layout_plan import KernelPage, LayoutPlan

STOCK = LayoutPlan(
    layout="LBHNC",
    groups=(),
    num_groups=9,
    bytes_per_block=100,
    bytes_per_request=10_000,
    capacity_tokens=None,
    padding_bytes_per_token=0,
    padded_slots=0,
    mixed_page_sizes=True,
    max_model_len=4096,
)
PACKED = replace(STOCK, layout="BLHNC", num_groups=3, bytes_per_request=9000)


@pytest.mark.parametrize(
    ("groups", "request_bytes", "verdict"),
    [
        (3, 9_000, "packed"),
        (9, 9_999, "packed"),
        (12, 9_000, "packed"),
        (8, 10_000, "packed"),
        (9, 10_000, "stock"),
        (1, 10_001, "stock"),
    ],
)
def test_never_more_bytes_and_strictly_better_in_bytes_or_groups(groups, request_bytes, verdict):
    packed = replace(PACKED, num_groups=groups, bytes_per_request=request_bytes)
    assert prefers_packed_kv_cache(STOCK, [packed]).verdict == verdict


def test_the_layout_whose_pages_all_exist_goes_before_a_cheaper_one():
    missing = KernelPage("full", "FLASHINFER", 640, None, problem="no page")
    fitting = KernelPage("full", "FLASHINFER", 640, 64, 10, 120, 1)
    cheap = replace(PACKED, layout="BLNHC", bytes_per_request=8000, kernel_pages=(missing,))
    whole = PACKED.with_pages([fitting])
    assert prefers_packed_kv_cache(STOCK, [cheap, whole]).layout == "BLHNC"


def test_larger_pages_break_a_tie():
    small = PACKED.with_pages([KernelPage("full", "FLASHINFER", 640, 16, 40)])
    large = replace(PACKED, layout="BLNHC").with_pages([KernelPage("full", "X", 640, 64, 10)])
    assert prefers_packed_kv_cache(STOCK, [small, large]).layout == "BLNHC"


def test_a_backend_that_must_split_is_the_reason():
    decision = prefers_packed_kv_cache(STOCK, [PACKED], cannot_pack=["rank 0: FIXED splits"])
    assert decision.verdict == "stock"
    assert decision.reasons[0] == "rank 0: FIXED splits"


def test_packed_where_no_layer_compact_layout_can_express_the_model():
    assert prefers_packed_kv_cache(None, [PACKED]).layout == "BLHNC"


def test_no_packed_layout_at_all():
    decision = prefers_packed_kv_cache(STOCK, [])
    assert (decision.verdict, decision.layout) == ("stock", "LBHNC")
