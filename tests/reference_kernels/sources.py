# SPDX-License-Identifier: Apache-2.0
"""The files that the rules were read in, one constant per rule.

``FLASHINFER`` paths are inside the ``flashinfer`` package (its C++ under ``data/``), ``VLLM`` paths
inside the ``vllm`` package; its C++ is not part of a wheel.
"""

from __future__ import annotations

from reference_kernels.errors import Source

FLASHINFER = "flashinfer-python 0.7.2.post1"
VLLM = "vllm 0.33.0"
POLICY = "repage tests"

# FlashInfer, native (fa2, fa3) wrappers
FI_PAGE_FASTDIV = Source(FLASHINFER, "data/include/flashinfer/page.cuh:39 (uint_fastdiv)")
FI_STRIDE_UINT32 = Source(FLASHINFER, "data/include/flashinfer/page.cuh:43-48 (uint32_t)")
FI_VECTOR_LOADS = Source(FLASHINFER, "data/include/flashinfer/cp_async.cuh (16-byte copies)")
FI_DECODE_KV_STRIDES = Source(FLASHINFER, "data/csrc/batch_decode.cu:176-185")
FI_SM90_KV_STRIDES = Source(FLASHINFER, "data/csrc/batch_prefill_sm90.cu:234-238")
FI_DECODE_PLAN = Source(FLASHINFER, "decode.py:1975-2478 (_plan_impl)")
FI_DECODE_RUN = Source(FLASHINFER, "decode.py:2711-2900 (run)")
FI_FAST_DECODE_PLAN = Source(FLASHINFER, "decode.py:4797-5078 (fast_decode_plan)")
FI_PREFILL_PLAN = Source(FLASHINFER, "prefill.py:3215-3560 (plan)")
FI_PREFILL_RUN = Source(FLASHINFER, "prefill.py:4027-4330 (run)")
FI_LAYOUT = Source(FLASHINFER, "utils.py (_unpack_paged_kv_cache)")
FI_PAGE_TABLE = Source(FLASHINFER, "data/include/flashinfer/page.cuh:55-60 (indices, indptr)")

# FlashInfer, XQA
XQA_PAGES = Source(FLASHINFER, "jit/xqa.py:82")
XQA_HEAD_DIM = Source(FLASHINFER, "jit/xqa.py:88")
XQA_K_STRIDES_FOR_V = Source(FLASHINFER, "data/csrc/xqa/xqa_wrapper.cu:73-75")
XQA_STRIDE_IN_HEADS = Source(FLASHINFER, "data/csrc/xqa/mha.cu:3047-3049")
XQA_TABLE = Source(FLASHINFER, "xqa.py (num_pages_per_seq = page_table.shape[-1])")
XQA_MASK = Source(FLASHINFER, "xqa.py (mask of speculative decoding)")
XQA_CALL = Source(FLASHINFER, "decode.py:4592-4795 (xqa_batch_decode_with_kv_cache)")
XQA_DEVICES = Source(FLASHINFER, "xqa.py (SM90, SM100, SM120/SM121)")

# FlashInfer, trtllm-gen
TRTLLM_HND = Source(VLLM, "v1/attention/backends/flashinfer.py:2472, 2663 (HND asserted)")
TRTLLM_PAGES = Source(FLASHINFER, "data/include/flashinfer/trtllm/fmha/fmhaKernels.cuh:540-570")
TRTLLM_LARGE_PAGE_MHA = Source("flashinfer", "issue 4094 (no MHA kernel at page 128)")
TRTLLM_STRIDE_INT = Source(FLASHINFER, "data/csrc/trtllm_fmha_kernel_launcher.cu:508-510 (int)")
TRTLLM_NUM_PAGES_INT = Source(FLASHINFER, "data/csrc/trtllm_fmha_kernel_launcher.cu:497 (int)")
TRTLLM_DECODE = Source(FLASHINFER, "decode.py:3710-4590 (trtllm_batch_decode_with_kv_cache)")
TRTLLM_CONTEXT = Source(FLASHINFER, "prefill.py (trtllm_batch_context_with_kv_cache)")
TRTLLM_TABLE = Source(VLLM, "v1/attention/backends/flashinfer.py:2475, 2668 (contiguous)")
TRTLLM_LAST_DIM = Source(FLASHINFER, "decode.py (head_dim must have stride 1: TMA)")
TRTLLM_SINKS = Source(FLASHINFER, "data/csrc/trtllm_fmha_kernel_launcher.cu:547 (float32)")
TMA_STRIDES = Source("CUDA 13.0 driver API", "cuTensorMapEncodeTiled (multiples of 16, < 2**40)")

# FlashAttention
FA_INTERFACE = Source(VLLM, "vllm_flash_attn/flash_attn_interface.py (flash_attn_varlen_func)")
FA_PAGE_16 = Source(VLLM, "v1/attention/backends/flash_attn.py (MultipleOf(16))")
FA_PAGE_TABLE = Source(VLLM, "vllm_flash_attn/cute/interface.py:739-746")
FA_MAYBE_CONTIGUOUS = Source(VLLM, "vllm_flash_attn/cute/cute_dsl_utils.py:105-124 (would clone)")
FA4_HD256_PAGE = Source(VLLM, "vllm_flash_attn/cute/sm100_hd256_2cta_fmha_forward.py:69-71")
FA4_HD256_WIDTH = Source(VLLM, "vllm_flash_attn/cute/interface.py:1679-1688")
FA4_HD256_SPLITS = Source(VLLM, "v1/attention/backends/flash_attn.py (hd256: num_splits = 1)")
FA4_SM90_FP8_PAGE = Source(VLLM, "vllm_flash_attn/cute/interface.py:1006-1012 (tile_n = 64)")
FA3_SCHEDULER = Source(VLLM, "vllm_flash_attn/flash_attn_interface.py (get_scheduler_metadata)")

# vLLM's cache writer
WRITER = Source("vllm source tree", "csrc/cache_kernels.cu (K strides address V)")

# Policies of these tests, stricter than a kernel: a device would not notice every one of them.
DEAD_COLUMNS = Source(POLICY, "every id of a table row is a page of the view, read or not")
LIVE_TOKENS = Source(POLICY, "only live tokens inside the window may be read")
FINITE = Source(POLICY, "a live token is finite: the tests never write anything else")
DTYPES = Source(POLICY, "fp16, bf16, fp8; float32 stands in for them in exact comparisons")
PROVENANCE = Source(POLICY, "the writer records layer, slot and block size of every 16 elements")
UNIQUE_SLOTS = Source(POLICY, "two tokens in one slot are a race")
