# SPDX-License-Identifier: Apache-2.0
"""Which page a kernel gets, and what the error says when there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import repage
from repage.errors import GeometryError, NoValidPageError
from support import oracle

FLASHINFER = repage.KernelPageRules(name="FLASHINFER", page_sizes=(16, 32, 64))


def blocks_of(block_tokens: int, **changes: int) -> repage.BlockGeometry:
    sizes = {
        "num_blocks": 8,
        "block_tokens": block_tokens,
        "num_heads": 2,
        "content_bytes": 1024,
        "block_stride": block_tokens * 2048 * 12,
    }
    return repage.BlockGeometry.dense("NHC", **(sizes | changes))


@pytest.mark.parametrize(
    ("block_tokens", "page_sizes", "expected"),
    [
        (640, (16, 32, 64, 128, 256, 512, 1024), 128),
        (1280, (16, 32, 64, 128, 256, 512, 1024), 256),
        (1088, (16, 32, 64, 128, 256, 512, 1024), 64),
        (544, (16, 32, 64, 128, 256, 512, 1024), 32),
        (528, (16, 32, 64, 128, 256, 512, 1024), 16),
        (544, (16, 32, 64), 32),
        (4192, (16, 32, 64), 32),
        (2112, (16, 32, 64), 64),
        (16, (16, 32, 64), 16),
    ],
)
def test_the_largest_page_that_divides_wins(
    block_tokens: int, page_sizes: tuple[int, ...], expected: int
) -> None:
    rules = repage.KernelPageRules(page_sizes=page_sizes)
    assert repage.plan_pages(blocks_of(block_tokens), rules).page_tokens == expected


def test_a_cap_limits_exact_sizes_and_multiples() -> None:
    exact = repage.KernelPageRules(page_sizes=(64, 128, 256), max_page_tokens=128)
    multiple = repage.KernelPageRules(multiple_of=32, max_page_tokens=100)
    assert repage.plan_pages(blocks_of(1280), exact).page_tokens == 128
    assert repage.plan_pages(blocks_of(640), multiple).page_tokens == 64


@pytest.mark.parametrize("block_tokens", [640, 1280, 768])
def test_a_multiple_takes_the_whole_block(block_tokens: int) -> None:
    rules = repage.KernelPageRules(multiple_of=16)
    assert repage.plan_pages(blocks_of(block_tokens), rules).page_tokens == block_tokens


@pytest.mark.parametrize(
    ("block_tokens", "nearest"),
    [(448, 512), (528, 640), (544, 640), (1056, 1152), (1600, 1664), (2096, 2176)],
)
def test_blocks_that_128_does_not_divide_name_the_next_that_it_does(
    block_tokens: int, nearest: int
) -> None:
    """FlashAttention 4 with head dim 256 takes pages of exactly 128 tokens."""
    rules = repage.KernelPageRules(name="FA4 hd256", page_sizes=(128,))
    with pytest.raises(NoValidPageError) as error:
        repage.plan_pages(blocks_of(block_tokens), rules)
    assert error.value.suggestions == (f"manager blocks of {nearest} tokens",)
    assert f"{block_tokens} % 128 = {block_tokens % 128}" in str(error.value)
    assert "FA4 hd256" in str(error.value)


def test_the_error_says_which_rule_failed_for_which_page() -> None:
    """Kimi-K3's padded draft page: 884,736 bytes hold 13.5 pages of 128 tokens."""
    geometry = repage.BlockGeometry.dense(
        "NHC",
        num_blocks=10,
        block_tokens=768,
        num_heads=1,
        content_bytes=512,
        block_stride=884_736,
    )
    tiling = repage.KernelPageRules(page_sizes=(128, 512), allow_overlapping_pages=False)
    with pytest.raises(NoValidPageError) as error:
        repage.plan_pages(geometry, tiling)
    assert dict(error.value.failures) == {
        512: "does not divide the block (768 % 512 = 256)",
        128: "block stride 884736 is not a multiple of the page unit 65536 (ratio 13.50)",
    }
    assert "a block stride of 917504 bytes (+32768)" in error.value.suggestions
    smaller = repage.KernelPageRules(page_sizes=(64, 128), allow_overlapping_pages=False)
    assert repage.plan_pages(geometry, smaller).page_tokens == 64


@pytest.mark.parametrize(
    ("interior", "heads", "content", "feasible"),
    [
        ("NHC", 2, 640, True),
        ("NHC", 4, 640, True),
        ("NHC", 4, 512, False),
        ("HNC", 2, 640, True),
        ("HNC", 4, 512, True),
    ],
)
def test_head_major_blocks_tile_where_token_major_ones_do_not(
    interior: str, heads: int, content: int, feasible: bool
) -> None:
    """MiMo-V2.5 TP2 + DFlash, pages of 32 tokens in blocks 737,280 bytes apart."""
    geometry = repage.BlockGeometry.dense(
        interior,
        num_blocks=4,
        block_tokens=64,
        num_heads=heads,
        content_bytes=content,
        block_stride=737_280,
    )
    rules = repage.KernelPageRules(page_sizes=(32,), allow_overlapping_pages=False)
    if feasible:
        assert repage.plan_pages(geometry, rules).page_step == 1
    else:
        with pytest.raises(NoValidPageError, match=r"786432 bytes"):
            repage.plan_pages(geometry, rules)


@pytest.mark.parametrize(
    ("rules", "changes", "message"),
    [
        (
            {"requires_dense_pages": True},
            {"block_stride": 640 * 2048 * 12 + 16_384},
            "the kernel takes dense pages of 32768 bytes, one after the other; these are 16384",
        ),
        ({"max_stride_elements": 100}, {}, "page stride of 32768 elements is above 100"),
        ({"max_stride_bytes": 1000}, {}, "page stride 32768 is above 1000 bytes"),
        ({}, {"base_offset": 8}, "base offset 8 is not a multiple of 16 bytes"),
        ({}, {"content_bytes": 72}, "head stride 72 is not a multiple of 16 bytes"),
        ({"max_page_index": 5}, {}, "largest page id"),
    ],
)
def test_every_rule_is_named_when_it_fails(
    rules: dict[str, int], changes: dict[str, int], message: str
) -> None:
    kernel = repage.KernelPageRules(page_sizes=(16,), **rules)
    with pytest.raises(NoValidPageError, match=message):
        repage.plan_pages(blocks_of(640, **changes), kernel)


def test_a_kernel_that_derives_strides_takes_pages_that_tile_the_pool() -> None:
    dense = repage.KernelPageRules(page_sizes=(16,), requires_dense_pages=True)
    layer_compact = blocks_of(640, block_stride=640 * 2048)
    assert repage.plan_pages(layer_compact, dense).page_tokens == 16
    # Virtual pages abut across the other layers of a packed block as well.
    assert repage.plan_pages(blocks_of(640), dense).page_tokens == 16
    # Head-major blocks split into pages of separate runs, one per head.
    head_major = repage.BlockGeometry.dense(
        "HNC",
        num_blocks=8,
        block_tokens=640,
        num_heads=2,
        content_bytes=1024,
        block_stride=640 * 2048,
    )
    with pytest.raises(NoValidPageError, match="dense pages"):
        repage.plan_pages(head_major, dense)


def test_page_ids_stop_where_the_kernel_says() -> None:
    geometry = repage.BlockGeometry.dense(
        "NHC",
        num_blocks=2**30,
        block_tokens=64,
        num_heads=1,
        content_bytes=16,
        block_stride=64 * 16,
    )
    assert repage.plan_pages(geometry, FLASHINFER).max_page_id == 2**30 - 1
    with pytest.raises(NoValidPageError, match=r"2147483647 is above 1073741823"):
        repage.plan_pages(
            geometry, repage.KernelPageRules(page_sizes=(32,), max_page_index=2**30 - 1)
        )


def test_no_multiple_fits_a_block_that_is_none() -> None:
    with pytest.raises(NoValidPageError, match="manager blocks of 544 tokens"):
        repage.plan_pages(blocks_of(540), repage.KernelPageRules(multiple_of=32))


@given(oracle.pools(), st.sets(st.integers(1, 64), min_size=1, max_size=5), st.booleans())
def test_the_choice_is_the_largest_valid_one(
    pool: oracle.Pool, sizes: set[int], overlap: bool
) -> None:
    rules = repage.KernelPageRules(
        page_sizes=tuple(sizes), allow_overlapping_pages=overlap, stride_alignment=16
    )

    def valid(size: int) -> bool:
        if pool.block_tokens % size:
            return False
        unit = size * pool.geometry.token_stride
        return overlap or pool.block_stride % unit == 0

    expected = max(filter(valid, sizes), default=None)
    if expected is None:
        with pytest.raises(NoValidPageError) as error:
            repage.plan_pages(pool.geometry, rules)
        assert {size for size, _ in error.value.failures} == sizes
    else:
        assert repage.plan_pages(pool.geometry, rules).page_tokens == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"page_sizes": (0,)},
        {"multiple_of": 0},
        {"page_sizes": (16,), "stride_alignment": 0},
        {"page_sizes": (16,), "max_page_tokens": 0},
    ],
)
def test_rules_without_meaning_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(GeometryError, match="my kernel"):
        repage.KernelPageRules(name="my kernel", **fields)
