# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's native paged wrappers (fa2, fa3): ``plan`` and ``run`` for decode and prefill."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer import decode as fi_decode
from flashinfer import prefill as fi_prefill
from torch import Tensor

from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules, Source
from reference_kernels.native_base import (
    FP8,
    NativePlan,
    NativeWrapper,
    softmax_scale,
    torch_dtype,
)
from reference_kernels.signatures import bind
from reference_kernels.sources import (
    FI_DECODE_PLAN,
    FI_DECODE_RUN,
    FI_FAST_DECODE_PLAN,
    FI_PREFILL_PLAN,
    FI_PREFILL_RUN,
)

__all__ = ["NativeDecodeWrapper", "NativePrefillWrapper", "fast_decode_plan", "wrappers_for"]

_FA3_HEAD_DIMS = (64, 128, 256)


class NativeDecodeWrapper(NativeWrapper):
    """Reference of ``flashinfer.BatchDecodeWithPagedKVCacheWrapper``."""

    rules = Rules("BatchDecodeWithPagedKVCacheWrapper")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        real = fi_decode.BatchDecodeWithPagedKVCacheWrapper
        call = bind(real.__init__, self, *args, **kwargs)
        self._requested_backend = call["backend"]
        if call["backend"] not in ("auto", "fa2", "fa3"):
            self.rules.unmodelled(backend=call["backend"])
        self.use_tensor_cores = bool(call["use_tensor_cores"])
        last_page_len = call["paged_kv_last_page_len_buffer"]
        self._initialise(
            call["kv_layout"],
            call["use_cuda_graph"],
            None if last_page_len is None else last_page_len.numel(),
        )
        if self.is_cuda_graph_enabled:
            self._indptr = call["paged_kv_indptr_buffer"]
            self._indices = call["paged_kv_indices_buffer"]
            self._last_page_len = last_page_len

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan as the real one: the arguments of ``_plan_impl``, which ``plan`` forwards to."""
        real = fi_decode.BatchDecodeWithPagedKVCacheWrapper
        self._replan(bind(real._plan_impl, self, *args, **kwargs), FI_DECODE_PLAN)

    def _replan(self, call: dict[str, Any], source: Source, *, fast: bool = False) -> None:
        require, rules = self.rules.require, self.rules
        rules.unmodelled(
            block_tables=call.get("block_tables"), window_right=call.get("window_right") or None
        )
        if call["pos_encoding_mode"] != "NONE":
            rules.unmodelled(pos_encoding_mode=call["pos_encoding_mode"])
        per_request = call["q_len_per_req"]
        query_dtype = torch_dtype(call["q_data_type"] or call["data_type"] or "float16")
        cache_dtype = torch_dtype(call["kv_data_type"] or query_dtype)
        backend = self._requested_backend
        if not self.use_tensor_cores:
            backend = "cuda-core"
        elif backend == "auto":
            fp8 = query_dtype in FP8 or cache_dtype in FP8
            backend = "fa3" if fp8 and self.context.capability[0] == 9 else "fa2"
        require(per_request >= 1, "q_len_per_req", "at least 1", per_request, source)
        require(
            per_request == 1 or backend == "fa2",
            "q_len_per_req",
            f"1 on {backend}: only fa2 tensor-core decode takes more",
            per_request,
            source,
        )
        previous = self._plan
        if self.is_cuda_graph_enabled and previous is not None:
            frozen = previous.query_starts[1] - previous.query_starts[0]
            require(
                frozen == per_request,
                "q_len_per_req",
                f"{frozen}, part of the CUDA graph's shape",
                per_request,
                source,
            )
        self._check_heads(call["num_qo_heads"], call["num_kv_heads"], source)
        self._store_pages(
            call["indptr"],
            call["indices"],
            call["last_page_len"],
            page_tokens=call["page_size"],
            seq_lens=call.get("seq_lens"),
            source=source,
            copy_to_graph_buffers=not fast,
        )
        batch = call["last_page_len"].numel()
        self._window_left = call["window_left"]
        self._logits_soft_cap = call["logits_soft_cap"] or 0.0
        self._sm_scale = softmax_scale(call["sm_scale"], call["head_dim"])
        self._causal = per_request > 1
        self._plan = NativePlan(
            backend=backend,
            page_tokens=call["page_size"],
            query_heads=call["num_qo_heads"],
            kv_heads=call["num_kv_heads"],
            head_dim=call["head_dim"],
            query_dtype=query_dtype,
            cache_dtype=cache_dtype,
            out_dtype=torch_dtype(call.get("o_data_type") or query_dtype),
            causal=self._causal,
            query_starts=[per_request * row for row in range(batch + 1)],
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the real one; returns ``out`` or ``(out, lse)``."""
        call = bind(fi_decode.BatchDecodeWithPagedKVCacheWrapper.run, self, *args, **kwargs)
        if self._plan is not None:
            self.context.count("fi_decode", self._plan.page_tokens)
        return self._run(call, FI_DECODE_RUN)


class NativePrefillWrapper(NativeWrapper):
    """Reference of ``flashinfer.BatchPrefillWithPagedKVCacheWrapper``."""

    rules = Rules("BatchPrefillWithPagedKVCacheWrapper")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        real = fi_prefill.BatchPrefillWithPagedKVCacheWrapper
        call = bind(real.__init__, self, *args, **kwargs)
        self._requested_backend = call["backend"]
        if call["backend"] not in ("auto", "fa2", "fa3"):
            self.rules.unmodelled(backend=call["backend"])
        self.rules.unmodelled(use_cuda_graph=call["use_cuda_graph"])
        self._initialise(call["kv_layout"], False, None)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan as the real one."""
        real = fi_prefill.BatchPrefillWithPagedKVCacheWrapper
        call = bind(real.plan, self, *args, **kwargs)
        require, rules = self.rules.require, self.rules
        rules.unmodelled(
            custom_mask=call["custom_mask"],
            packed_custom_mask=call["packed_custom_mask"],
            block_tables=call["block_tables"],
            prefix_len_ptr=call["prefix_len_ptr"],
        )
        if call["pos_encoding_mode"] != "NONE":
            rules.unmodelled(pos_encoding_mode=call["pos_encoding_mode"])
        starts: Tensor = call["qo_indptr"]
        require(
            starts.dtype == torch.int32
            and int(starts[0]) == 0
            and bool((starts[1:] >= starts[:-1]).all())
            and starts.numel() == call["paged_kv_last_page_len"].numel() + 1,
            "qo_indptr",
            f"int32, rising from 0, {call['paged_kv_last_page_len'].numel() + 1} entries",
            f"{starts.dtype} {starts.tolist()}",
            FI_PREFILL_PLAN,
        )
        query_dtype = torch_dtype(call["q_data_type"])
        backend = self._requested_backend
        if backend == "auto":
            hopper = self.context.capability[0] == 9 and call["head_dim_qk"] in _FA3_HEAD_DIMS
            backend = "fa3" if hopper else "fa2"
        self._check_heads(call["num_qo_heads"], call["num_kv_heads"], FI_PREFILL_PLAN)
        self._store_pages(
            call["paged_kv_indptr"],
            call["paged_kv_indices"],
            call["paged_kv_last_page_len"],
            page_tokens=call["page_size"],
            seq_lens=call["seq_lens"],
            source=FI_PREFILL_PLAN,
        )
        self._window_left = call["window_left"]
        self._logits_soft_cap = call["logits_soft_cap"] or 0.0
        self._sm_scale = softmax_scale(call["sm_scale"], call["head_dim_qk"])
        self._causal = bool(call["causal"])
        self._plan = NativePlan(
            backend=backend,
            page_tokens=call["page_size"],
            query_heads=call["num_qo_heads"],
            kv_heads=call["num_kv_heads"],
            head_dim=call["head_dim_qk"],
            query_dtype=query_dtype,
            cache_dtype=torch_dtype(call["kv_data_type"] or query_dtype),
            out_dtype=torch_dtype(call["o_data_type"] or query_dtype),
            causal=self._causal,
            query_starts=starts.tolist(),
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the real one; returns ``out`` or ``(out, lse)``."""
        call = bind(fi_prefill.BatchPrefillWithPagedKVCacheWrapper.run, self, *args, **kwargs)
        if (call["lse_base"], call["lse_layout"]) != ("log2", "NH"):
            self.rules.unmodelled(lse=(call["lse_base"], call["lse_layout"]))
        if self._plan is not None:
            self.context.count("fi_prefill", self._plan.page_tokens)
        return self._run(call, FI_PREFILL_RUN)


def fast_decode_plan(wrapper: NativeDecodeWrapper, *args: Any, **kwargs: Any) -> None:
    """Reference of ``flashinfer.decode.fast_decode_plan``.

    It plans again without touching the CUDA graph's buffers: the caller has filled them.
    """
    call = bind(fi_decode.fast_decode_plan, wrapper, *args, **kwargs)
    wrapper._replan(call, FI_FAST_DECODE_PLAN, fast=True)


def wrappers_for(
    context: KernelContext,
) -> tuple[type[NativeDecodeWrapper], type[NativePrefillWrapper]]:
    """The two wrapper classes, bound to ``context``; vLLM constructs them and tests for them."""
    decode = type(
        "BatchDecodeWithPagedKVCacheWrapper", (NativeDecodeWrapper,), {"context": context}
    )
    prefill = type(
        "BatchPrefillWithPagedKVCacheWrapper", (NativePrefillWrapper,), {"context": context}
    )
    return decode, prefill
