# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels of FlashInfer, FlashAttention and the MLA backends accept as pages.

Facts read in the kernels' sources, as data. Each cites the file and version that imposes it;
FlashInfer is 0.7.2.post1 and vLLM 0.33.0 unless it says otherwise. What depends on the cache (its
head dim) or on the installed version is filled in by `for_cache`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from repage import KernelPageRules


@dataclass(frozen=True)
class KernelPath:
    """One kernel, or a family of kernels with the same demands.

    Parameters
    ----------
    rules : KernelPageRules
        What holds for every cache.
    strides_in_heads : bool, default False
        The kernel counts strides in whole heads and drops the rest, so they must be multiples of
        the head dim.
    needs_head_major : bool, default False
        The kernel reads HND interiors only.
    excluded : tuple of tuple of (int, int), default ()
        (head dim, page) pairs that give wrong results.
    block_multiple : int, default 1
        Manager blocks must be a multiple of this many tokens, for kernels that count table columns
        in groups.
    tensor_map : str or None, default None
        The kernel's entry in `repage.tensor_map.TENSOR_MAP_RULES`, if it encodes one.
    source : str
        Where this was read.
    """

    rules: KernelPageRules
    source: str
    strides_in_heads: bool = False
    needs_head_major: bool = False
    excluded: tuple[tuple[int, int], ...] = ()
    block_multiple: int = 1
    tensor_map: str | None = None

    def for_cache(self, head_dim: int, element_size: int) -> KernelPageRules:
        """Return the rules for one cache.

        Parameters
        ----------
        head_dim : int
            Elements of K of one token and head.
        element_size : int
            Bytes of one cache element.

        Returns
        -------
        KernelPageRules
        """
        sizes = tuple(
            page for page in self.rules.page_sizes if (head_dim, page) not in self.excluded
        )
        alignment = self.rules.stride_alignment
        if self.strides_in_heads:
            alignment = math.lcm(alignment, head_dim * element_size)
        return replace(self.rules, page_sizes=sizes, stride_alignment=alignment)


def both(first: KernelPageRules, second: KernelPageRules) -> KernelPageRules:
    """Return the rules of a group that runs two kernels on the same pages.

    Parameters
    ----------
    first, second : KernelPageRules
        With exact page sizes only.

    Returns
    -------
    KernelPageRules
        What both accept, under both names.
    """

    def smaller(name: str) -> int | None:
        limits = (getattr(first, name), getattr(second, name))
        return min((limit for limit in limits if limit is not None), default=None)

    return KernelPageRules(
        name=f"{first.name} and {second.name}",
        page_sizes=tuple(size for size in first.page_sizes if size in second.page_sizes),
        max_page_tokens=smaller("max_page_tokens"),
        stride_alignment=math.lcm(first.stride_alignment, second.stride_alignment),
        base_alignment=math.lcm(first.base_alignment, second.base_alignment),
        max_stride_bytes=min(first.max_stride_bytes, second.max_stride_bytes),
        max_stride_elements=smaller("max_stride_elements"),
        max_page_index=min(first.max_page_index, second.max_page_index),
        allow_overlapping_pages=first.allow_overlapping_pages and second.allow_overlapping_pages,
        requires_dense_pages=first.requires_dense_pages or second.requires_dense_pages,
    )


# The fa2 and fa3 kernels divide by any page size and add up addresses, so pages may overlap;
# vLLM plans them with 16, 32 and 64 only.
FLASHINFER_NATIVE = KernelPath(
    KernelPageRules(
        name="FlashInfer fa2/fa3",
        page_sizes=(16, 32, 64),
        max_stride_elements=2**32 - 1,
    ),
    source="include/flashinfer/page.cuh:39-48 (uint_fastdiv page size, uint32 strides); "
    "vllm/v1/attention/backends/flashinfer.py:603 (pages)",
)

# page < 64 with head dim 256 is wrong on SM120 (flashinfer#2638).
FLASHINFER_NATIVE_SM120 = replace(FLASHINFER_NATIVE, excluded=((256, 16), (256, 32)))

# K strides serve V as well, unchecked; vLLM's K and V share one content dimension, so they agree.
# 128-token pages exist, but vLLM asserts at most 64 outside of trtllm-gen.
XQA = KernelPath(
    KernelPageRules(name="FlashInfer XQA", page_sizes=(16, 32, 64), max_stride_elements=2**32 - 1),
    strides_in_heads=True,
    source="jit/xqa.py:82 (page sizes), csrc/xqa/xqa_wrapper.cu:73-75 (K strides), "
    "csrc/xqa/mha.cu:3047 (strides in heads); vllm/v1/attention/backends/flashinfer.py:1001",
)

# The Hopper kernel for fp8 caches encodes the page stride into a tensor map.
XQA_SM90_FP8 = replace(
    XQA,
    rules=replace(XQA.rules, name="FlashInfer XQA fp8 (TMA)", allow_overlapping_pages=False),
    tensor_map="xqa",
    source="xqa.py:391 (fp8 caches on SM90), csrc/xqa/tensorMap.cpp:78-87 (strides in the map); "
    + XQA.source,
)

# Twice the pages are counted in an int32; strides are int32 elements. What older versions get wrong
# is in `trtllm_gen`.
TRTLLM_GEN = KernelPath(
    KernelPageRules(
        name="FlashInfer trtllm-gen",
        page_sizes=(16, 32, 64, 128, 256, 512, 1024),
        max_stride_elements=2**31 - 1,
        max_page_index=2**30 - 1,
        allow_overlapping_pages=False,
    ),
    needs_head_major=True,
    tensor_map="trtllm-gen",
    source="csrc/trtllm_fmha_kernel_launcher.cu:497 (page count), :508-510 (strides), "
    "include/flashinfer/trtllm/fmha/kernelParams.h:411-413 (tensor map), "
    "fmhaKernels.cuh:540-564 (powers of two); vllm/v1/attention/backends/flashinfer.py:604 "
    "(pages), :729-734 (layouts)",
)
# Pages above 128 tokens were wrong past 4096 tokens in 0.6.16; fixed by flashinfer#3849, which no
# 0.6 release is known to have (flashinfer#4347).
LARGEST_PAGE_BEFORE_FLASHINFER_0_7 = 128
# 16-token pages with head dim 256 were wrong until 0.6 (vllm#27994, taken back by vllm#36987).
EXCLUDED_BEFORE_FLASHINFER_0_6 = ((256, 16),)

FA4_HD256 = KernelPath(
    KernelPageRules(
        name="FlashAttention 4 hd256", page_sizes=(128,), allow_overlapping_pages=False
    ),
    tensor_map="fa4-hd256",
    source="vllm/vllm_flash_attn/cute/sm100_hd256_2cta_fmha_forward.py:69-70 (128 tokens by TMA); "
    "vllm/v1/attention/backends/fa_utils.py:13",
)

FA4_FP8_HD512_SM90 = KernelPath(
    KernelPageRules(
        name="FlashAttention 4 fp8 hd512", page_sizes=(64,), allow_overlapping_pages=False
    ),
    source="vllm/v1/attention/backends/flash_attn.py:318-325 (64-token TMA page)",
)

# Unless trtllm-gen is asked for by name, which vLLM does not do, table rows must be as wide as a
# multiple of 128 tokens.
FLASHINFER_MLA = KernelPath(
    KernelPageRules(
        name="FlashInfer MLA (trtllm-gen)",
        page_sizes=(32, 64),
        max_stride_elements=2**31 - 1,
        max_page_index=2**30 - 1,
        allow_overlapping_pages=False,
    ),
    block_multiple=128,
    source="flashinfer/mla/_core.py:831, :4656 (table width); "
    "vllm/v1/attention/backends/mla/flashinfer_mla.py:205 (pages); " + TRTLLM_GEN.source,
)

FLASHMLA = KernelPath(
    KernelPageRules(name="FlashMLA", page_sizes=(64,), allow_overlapping_pages=False),
    source="vllm/v1/attention/backends/mla/flashmla.py:58",
)

# Some versions of the kernel read the page stride, some take it from the page's shape; dense pages
# are right for both.
CUTLASS_MLA = KernelPath(
    KernelPageRules(
        name="CUTLASS MLA",
        page_sizes=(128,),
        allow_overlapping_pages=False,
        requires_dense_pages=True,
    ),
    source="csrc/attention/mla/sm100_cutlass_mla_kernel.cu of vLLM (stride_C); "
    "vllm/v1/attention/backends/mla/cutlass_mla.py:50",
)

# Triton kernels on a uint8 cache; strides are 64-bit arguments.
TURBOQUANT = KernelPath(
    KernelPageRules(
        name="TurboQuant",
        page_sizes=(16, 32, 64, 128),
        stride_alignment=1,
        base_alignment=1,
        max_stride_bytes=2**63 - 1,
    ),
    source="vllm/v1/attention/backends/turboquant_attn.py:164, 1002-1017",
)


def trtllm_gen(flashinfer_version: tuple[int, int]) -> KernelPath:
    """Return trtllm-gen's demands for an installed FlashInfer.

    Parameters
    ----------
    flashinfer_version : tuple of (int, int)
        Major and minor version.

    Returns
    -------
    KernelPath
        Without the pages that this version reads wrongly.
    """
    path = TRTLLM_GEN
    if flashinfer_version < (0, 7):
        rules = replace(path.rules, max_page_tokens=LARGEST_PAGE_BEFORE_FLASHINFER_0_7)
        path = replace(path, rules=rules)
    if flashinfer_version < (0, 6):
        path = replace(path, excluded=EXCLUDED_BEFORE_FLASHINFER_0_6)
    return path
