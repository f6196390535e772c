# SPDX-License-Identifier: Apache-2.0
"""Page ids, slots and extents against brute force over real memory, and worked numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import repage
from support import oracle

GIB = 2**30


@given(oracle.pools())
def test_page_ids_are_addresses_over_the_page_stride(pool: oracle.Pool) -> None:
    plan, ids = pool.plan, pool.page_ids()
    for block in range(pool.num_blocks):
        for page in range(pool.pages_per_block):
            assert plan.page(block, page) == ids[block, page]
    assert plan.max_page_id == ids.max()
    assert plan.num_virtual_pages == ids.max() + 1


@given(oracle.pools(), st.data())
def test_slots_follow_their_tokens(pool: oracle.Pool, data: st.DataObject) -> None:
    slots = np.array(
        data.draw(st.lists(st.integers(-3, pool.num_blocks * pool.block_tokens + 3), max_size=20)),
        dtype=np.int64,
    )
    expected = oracle.virtual_slots(pool.page_ids(), slots, pool)
    assert [pool.plan.map_slot(slot) for slot in slots.tolist()] == expected.tolist()


@given(
    st.integers(2, 2**34),
    st.one_of(st.integers(1, 2000), st.sampled_from([2**12 - 1, 2**12, 2**20 + 7])),
    st.data(),
)
def test_slots_beyond_31_bits(num_blocks: int, block_tokens: int, data: st.DataObject) -> None:
    """Pools of more than 2**31 tokens: slots need divisions of up to 62 bits."""
    plan = repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_heads=1,
            content_bytes=2,
            block_stride=2 * block_tokens,
        ),
        block_tokens,
    )
    last_block = data.draw(st.integers(num_blocks - 9, num_blocks - 1))
    block = max(data.draw(st.one_of(st.integers(0, num_blocks - 1), st.just(last_block))), 0)
    offset = data.draw(st.sampled_from([0, block_tokens // 2, block_tokens - 1]))
    # One page a block: a virtual slot is the slot itself.
    assert plan.map_slot(block * block_tokens + offset) == block * block_tokens + offset
    assert plan.map_slot(num_blocks * block_tokens) == -1


@given(oracle.pools(), st.integers(0, 10_000))
def test_tokens_are_located_by_column_page_and_offset(pool: oracle.Pool, token: int) -> None:
    column, page, offset = pool.plan.locate_token(token)
    assert 0 <= page < pool.pages_per_block
    assert 0 <= offset < pool.page_tokens
    assert column * pool.block_tokens + page * pool.page_tokens + offset == token


@given(oracle.pools())
def test_every_page_of_the_view_reads_the_tokens_it_stands_for(pool: oracle.Pool) -> None:
    storage = np.zeros(pool.offset + pool.num_blocks * pool.block_stride, dtype=np.uint8)
    rng = np.random.default_rng(0)
    layer = pool.bytes_of_layer(storage)
    layer[...] = rng.integers(1, 255, layer.shape, dtype=np.uint8)
    cache = torch.from_numpy(storage).as_strided(
        (pool.num_blocks, pool.num_heads, pool.block_tokens, pool.content_bytes),
        (layer.strides[0], layer.strides[2], layer.strides[1], 1),
        pool.offset,
    )
    plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), pool.page_tokens)
    view = repage.virtual_view(cache, plan)
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    for block in range(pool.num_blocks):
        for page in range(pool.pages_per_block):
            begin = page * pool.page_tokens
            expected = cache[block, :, begin : begin + pool.page_tokens]
            assert torch.equal(view[plan.page(block, page)], expected)


@pytest.mark.parametrize(
    ("heads", "content", "interior", "page_tokens", "block_step"),
    [
        (2, 1024, "NHC", 16, 480),
        (2, 1024, "NHC", 32, 240),
        (2, 1024, "NHC", 64, 120),
        (2, 1024, "NHC", 128, 60),
        (2, 1024, "HNC", 16, 960),
        (2, 1024, "HNC", 32, 480),
        (2, 1024, "HNC", 64, 240),
        (2, 1024, "HNC", 128, 120),
        (8, 512, "NHC", 16, 240),
        (8, 512, "NHC", 32, 120),
        (8, 512, "NHC", 64, 60),
        (8, 512, "HNC", 16, 1920),
        (8, 512, "HNC", 32, 960),
        (8, 512, "HNC", 64, 480),
    ],
)
def test_qwen_35b_with_dflash(
    heads: int, content: int, interior: str, page_tokens: int, block_step: int
) -> None:
    """Qwen3.6-35B-A3B + DFlash: blocks of 640 tokens, 15,728,640 bytes apart."""
    plan = repage.PagePlan(
        repage.BlockGeometry.dense(
            interior,
            num_blocks=1000,
            block_tokens=640,
            num_heads=heads,
            content_bytes=content,
            block_stride=15_728_640,
            base_offset=13_107_200 if heads == 8 else 0,
        ),
        page_tokens,
    )
    assert (plan.block_step, plan.page_step) == (block_step, 1)
    assert plan.num_virtual_pages == 999 * block_step + 640 // page_tokens


@pytest.mark.parametrize(
    ("block_stride", "unit_tokens", "token_bytes", "steps"),
    [
        (1_638_400, 128, 1024, (25, 2)),  # head dim 256 next to a drafter of 512 bytes per token
        (4_980_736, 64, 8192, (19, 2)),  # MiniMax-M3 TP4 + EAGLE-3, NHC
    ],
)
def test_units_that_do_not_divide_the_block_stride_overlap(
    block_stride: int, unit_tokens: int, token_bytes: int, steps: tuple[int, int]
) -> None:
    plan = repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=4,
            block_tokens=unit_tokens * 2,
            num_heads=1,
            content_bytes=token_bytes,
            block_stride=block_stride,
        ),
        unit_tokens,
    )
    assert (plan.block_step, plan.page_step) == steps
    assert plan.page_stride * plan.block_step == block_stride


def test_padded_page_of_kimi_k3_fits_its_storage() -> None:
    """A dense draft page padded to the MLA page: 884,736 bytes, 768 tokens of 512 bytes."""
    plan = repage.PagePlan(
        repage.BlockGeometry.dense(
            "NHC",
            num_blocks=10,
            block_tokens=768,
            num_heads=1,
            content_bytes=512,
            block_stride=884_736,
            storage_bytes=10 * 884_736,
        ),
        64,
    )
    assert (plan.page_unit, plan.block_step, plan.pages_per_block) == (32_768, 27, 12)
    assert [plan.page(2, page) for page in (0, 11)] == [54, 65]
    assert plan.num_virtual_pages * plan.page_stride == 9 * 884_736 + 393_216


def test_a_cache_needs_no_offset_that_pages_divide() -> None:
    memory = torch.arange(3 * 4096, dtype=torch.uint8)
    cache = memory.as_strided((2, 1, 64, 16), (4096, 1024, 16, 1), 16)
    plan = repage.plan_pages(
        repage.BlockGeometry.from_tensor(cache), repage.KernelPageRules(page_sizes=(32,))
    )
    assert torch.equal(repage.virtual_view(cache, plan)[plan.page(1, 1)], cache[1, :, 32:])


@pytest.mark.parametrize(
    ("interior", "expected"), [("NHC", 512), ("HNC", 16 * 512)], ids=["NHC", "HNC"]
)
def test_one_head_gets_the_stride_of_a_dense_cache(interior: str, expected: int) -> None:
    """Tensor maps refuse the stride of 1 that a size-1 dimension may carry."""
    memory = torch.zeros(4 * 65_536, dtype=torch.bfloat16)
    head_stride = 512 if interior == "NHC" else 1
    cache = memory.as_strided((4, 1, 64, 512), (65_536, head_stride, 512, 1))
    plan = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), 16)
    assert repage.virtual_view(cache, plan).stride() == (16 * 512, expected, 512, 1)


@pytest.mark.parametrize("block_stride", [1_077_120, 1_002_240, 1_039_680, 15_728_640, 2**39])
def test_addresses_beyond_32_bits_are_exact(block_stride: int) -> None:
    """Strides on which kernels with 32-bit offsets failed, at ids where those wrap."""
    geometry = repage.BlockGeometry.dense(
        "NHC",
        num_blocks=100_000,
        block_tokens=64,
        num_heads=1,
        content_bytes=576,
        block_stride=block_stride,
    )
    plan = repage.PagePlan(geometry, 16)
    for block in (1994, 2143, 4132, 99_999):
        assert plan.page(block, 3) * plan.page_stride == block * block_stride + 3 * 16 * 576


def test_slots_beyond_32_bits_are_exact() -> None:
    geometry = repage.BlockGeometry.dense(
        "HNC",
        num_blocks=10_000_000,
        block_tokens=640,
        num_heads=2,
        content_bytes=16,
        block_stride=2 * 640 * 16,
    )
    plan = repage.PagePlan(geometry, 64)
    slot = 9_999_999 * 640 + 639
    assert slot > 2**32
    assert plan.map_slot(slot) == (9_999_999 * 20 + 9) * 64 + 63
    assert plan.map_slot(slot + 1) == -1
