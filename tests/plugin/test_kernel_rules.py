"""What each kernel takes, as data: pages, strides, limits."""

from __future__ import annotations

import re

import pytest

from repage import BlockGeometry, plan_pages
from repage.errors import NoValidPageError
from repage.vllm import kernel_rules as rules

BF16, FP8 = 2, 1
TABLE = {name: value for name, value in vars(rules).items() if isinstance(value, rules.KernelPath)}


def candidates(path: rules.KernelPath, head_dim: int = 128, block: int = 5120) -> list[int]:
    """Pages of a path that divide a block, largest first."""
    found = path.for_cache(head_dim, BF16).candidates(block)
    return [page for page in found if block % page == 0]


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("FLASHINFER_NATIVE", [64, 32, 16]),
        ("FLASHINFER_NATIVE_SM120", [64, 32, 16]),
        ("XQA", [64, 32, 16]),
        ("XQA_SM90_FP8", [64, 32, 16]),
        ("TRTLLM_GEN", [1024, 512, 256, 128, 64, 32, 16]),
        ("FA4_HD256", [128]),
        ("FA4_FP8_HD512_SM90", [64]),
        ("FLASHINFER_MLA", [64, 32]),
        ("FLASHMLA", [64]),
        ("CUTLASS_MLA", [128]),
        ("TURBOQUANT", [128, 64, 32, 16]),
    ],
)
def test_pages(name: str, pages: list[int]) -> None:
    assert candidates(TABLE[name]) == pages


def test_the_table_is_complete() -> None:
    """A path that is added belongs into the list above."""
    (marks,) = (mark for mark in test_pages.pytestmark if mark.name == "parametrize")
    assert {name for name, _ in marks.args[1]} == set(TABLE)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_entry_says_where_it_was_read(name: str) -> None:
    assert re.search(r"\.(cuh|cu|h|py|cpp):?\d*", TABLE[name].source)


# Tensor maps with overlapping pages are not proven on a device.
TENSOR_MAPS = {
    "XQA_SM90_FP8",
    "TRTLLM_GEN",
    "FA4_HD256",
    "FA4_FP8_HD512_SM90",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "CUTLASS_MLA",
}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_pages_overlap_only_where_no_tensor_map_is_encoded(name: str) -> None:
    assert TABLE[name].rules.allow_overlapping_pages == (name not in TENSOR_MAPS)
    if name in TENSOR_MAPS:
        assert TABLE[name].rules.max_stride_bytes < 2**40
        assert TABLE[name].rules.stride_alignment % 16 == 0


@pytest.mark.parametrize(
    ("version", "largest", "smallest_of_hd256"),
    [((0, 5), 128, 32), ((0, 6), 128, 16), ((0, 7), 1024, 16), ((1, 0), 1024, 16)],
)
def test_trtllm_gen_by_flashinfer_version(
    version: tuple[int, int], largest: int, smallest_of_hd256: int
) -> None:
    """flashinfer#4347 and vllm#27994; (0, 0) stands for an unknown version, so it gets both."""
    path = rules.trtllm_gen(version)
    assert candidates(path)[0] == largest
    assert candidates(path)[-1] == 16
    assert candidates(path, head_dim=256)[-1] == smallest_of_hd256
    assert candidates(rules.trtllm_gen((0, 0)), head_dim=256) == [128, 64, 32]


def test_head_dim_256_on_sm120_takes_64_at_least() -> None:
    assert candidates(rules.FLASHINFER_NATIVE_SM120, head_dim=256) == [64]
    assert candidates(rules.FLASHINFER_NATIVE, head_dim=256) == [64, 32, 16]


@pytest.mark.parametrize(
    ("head_dim", "element_size", "alignment"),
    [(128, BF16, 256), (256, BF16, 512), (128, FP8, 128), (80, FP8, 80), (72, FP8, 144)],
)
def test_xqa_counts_strides_in_heads(head_dim: int, element_size: int, alignment: int) -> None:
    for path in (rules.XQA, rules.XQA_SM90_FP8):
        assert path.for_cache(head_dim, element_size).stride_alignment == alignment
    assert rules.FLASHINFER_NATIVE.for_cache(head_dim, element_size).stride_alignment == 16


def geometry(block_stride: int, *, blocks: int = 4, heads: int = 1) -> BlockGeometry:
    """640-token blocks of one layer, bf16, head dim 128, token-major."""
    return BlockGeometry(
        num_blocks=blocks,
        block_tokens=640,
        num_heads=heads,
        content_bytes=512,
        element_size=2,
        block_stride=block_stride,
        head_stride=512,
        token_stride=512 * heads,
        base_offset=0,
        storage_bytes=blocks * block_stride,
    )


def test_xqa_refuses_a_page_stride_between_heads() -> None:
    """128 bytes are half a head: the kernel would drop them."""
    between = geometry(640 * 512 + 128)
    assert plan_pages(between, rules.FLASHINFER_NATIVE.for_cache(128, BF16)).page_stride == 128
    with pytest.raises(NoValidPageError, match="not a multiple of 256"):
        plan_pages(between, rules.XQA.for_cache(128, BF16))


def test_strides_are_32_bit_elements() -> None:
    assert rules.FLASHINFER_NATIVE.rules.max_stride_elements == 2**32 - 1
    assert rules.XQA.rules.max_stride_elements == 2**32 - 1
    assert rules.TRTLLM_GEN.rules.max_stride_elements == 2**31 - 1
    assert rules.FLASHINFER_MLA.rules.max_stride_elements == 2**31 - 1


def test_trtllm_gen_counts_twice_the_pages_in_an_int32() -> None:
    unit = 64 * 512
    step = 2**20
    blocks = 2**10 + 2
    pool = geometry(step * unit, blocks=blocks)
    native = plan_pages(pool, rules.FLASHINFER_NATIVE.for_cache(128, BF16))
    assert native.page_tokens == 64
    assert native.max_page_id > 2**30 - 1
    plan = plan_pages(pool, rules.TRTLLM_GEN.for_cache(128, BF16))
    # Only larger pages keep the ids in range.
    assert plan.page_tokens == 128
    assert plan.max_page_id <= 2**30 - 1


def test_cutlass_mla_takes_dense_pages_only() -> None:
    dense = geometry(2 * 640 * 512)
    plan = plan_pages(dense, rules.CUTLASS_MLA.for_cache(512, BF16))
    assert plan.page_stride == 128 * 512
    with pytest.raises(NoValidPageError, match="not a multiple of the page unit"):
        plan_pages(geometry(640 * 512 + 4096), rules.CUTLASS_MLA.for_cache(512, BF16))


def test_both_keeps_what_both_accept() -> None:
    xqa = rules.XQA_SM90_FP8.for_cache(80, FP8)
    found = rules.both(rules.FLASHINFER_NATIVE_SM120.for_cache(256, BF16), xqa)
    assert found.page_sizes == (64,)
    assert found.stride_alignment == 80
    assert not found.allow_overlapping_pages
    old = rules.trtllm_gen((0, 6)).for_cache(128, BF16)
    found = rules.both(rules.FLASHINFER_NATIVE.for_cache(128, BF16), old)
    assert found.max_stride_elements == 2**31 - 1
    assert found.max_page_index == 2**30 - 1
    assert found.max_page_tokens == 128
    dense = rules.CUTLASS_MLA.for_cache(512, BF16)
    assert rules.both(dense, rules.TRTLLM_GEN.for_cache(512, BF16)).requires_dense_pages
