# SPDX-License-Identifier: Apache-2.0
"""Calls of the real attention kernels, and the answer that plain torch gives."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from repage.selftest.result import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from repage.selftest.pool import KernelPages, PackedPool
    from repage.selftest.target import AttentionKernels, Target

GROUP = 4
"""Query heads per KV head; XQA kernels are built for one ratio."""

_WORKSPACE_BYTES = 128 << 20
_PREFILL_QUERIES = 19


@dataclass(frozen=True)
class Queries:
    """Queries of a batch.

    Parameters
    ----------
    tokens : torch.Tensor
        bf16 [total queries, query heads, head_dim]; the last tokens of each sequence.
    counts : tuple of int
        Queries of each sequence.
    """

    tokens: torch.Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class AttentionPath:
    """One way through FlashInfer's kernels.

    Parameters
    ----------
    name : str
        Part of the check's name.
    kind : {"decode", "prefill"}
        One query a sequence, or several.
    call : callable
        Takes the kernels, pages, queries and the window (-1 for none), and returns
        [total queries, query heads, head_dim].
    page_sizes : tuple of int
        Page sizes to check.
    takes_whole_blocks : bool
        Whether a page as large as the manager block is valid too.
    majors : tuple of int or None, default None
        Major compute capabilities that have the kernel; None for every one.
    cache_dtype : torch.dtype, default torch.bfloat16
        Element type of K and V.
    tolerance : float, default 2e-2
        Largest absolute difference from `attention_reference`.
    """

    name: str
    kind: Literal["decode", "prefill"]
    call: Callable[[AttentionKernels, KernelPages, Queries, int], torch.Tensor]
    page_sizes: tuple[int, ...]
    takes_whole_blocks: bool
    majors: tuple[int, ...] | None = None
    cache_dtype: torch.dtype = torch.bfloat16
    tolerance: float = 2e-2

    def require_device(self, target: Target) -> None:
        """Raise `NotAvailableError` on a device that lacks the kernel."""
        major, minor = target.capability
        if self.majors is not None and major not in self.majors:
            wanted = ", ".join(f"SM{number}x" for number in self.majors)
            raise NotAvailableError(f"{self.name} runs on {wanted}, this is SM{major}{minor}")


def make_queries(pool: PackedPool, kind: Literal["decode", "prefill"]) -> Queries:
    """Draw the queries of every sequence in a pool.

    With an fp8 cache they are fp8 values: the kernels round queries to the cache's type.
    """
    counts = tuple(1 if kind == "decode" else min(n, _PREFILL_QUERIES) for n in pool.lengths)
    generator = torch.Generator().manual_seed(23)
    heads = GROUP * pool.shape.kv_heads
    tokens = torch.randn(sum(counts), heads, pool.shape.head_dim, generator=generator)
    tokens = tokens.to(pool.shape.dtype).to(torch.bfloat16)
    return Queries(tokens.to(pool.seq_lens.device), counts)


def attention_reference(pool: PackedPool, queries: Queries) -> torch.Tensor:
    """Attend with torch's own kernel, in float32, over the tokens that the pool was made of.

    Returns
    -------
    torch.Tensor
        float32 [total queries, query heads, head_dim].
    """
    results = []
    start = 0
    for row, count in enumerate(queries.counts):
        query = queries.tokens[start : start + count].float().transpose(0, 1)
        start += count
        key, value = (part.float().transpose(0, 1) for part in pool.tokens[row])
        length = key.shape[1]
        positions = torch.arange(length, device=query.device)
        last = torch.arange(length - count, length, device=query.device).unsqueeze(1)
        visible = positions <= last
        if pool.window is not None:
            visible &= positions > last - pool.window
        results.append(
            torch.nn.functional.scaled_dot_product_attention(
                query,
                key.repeat_interleave(GROUP, 0),
                value.repeat_interleave(GROUP, 0),
                attn_mask=visible,
            ).transpose(0, 1)
        )
    return torch.cat(results)


@functools.lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    """Return scratch memory of the native kernels."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=1)
def _xqa_workspace(device: torch.device) -> torch.Tensor:
    """Return scratch memory of XQA alone: its semaphores must be zero, and end as zero."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _decode(
    kernels: AttentionKernels,
    pages: KernelPages,
    queries: Queries,
    window_left: int,
    *,
    backend: str,
    use_tensor_cores: bool,
) -> torch.Tensor:
    wrapper = kernels.decode_wrapper(
        _workspace(queries.tokens.device),
        pages.layout,
        use_tensor_cores=use_tensor_cores,
        backend=backend,
    )
    return _plan_and_run(wrapper, pages, queries, window_left)


def _prefill(
    kernels: AttentionKernels,
    pages: KernelPages,
    queries: Queries,
    window_left: int,
    *,
    backend: str,
) -> torch.Tensor:
    wrapper = kernels.prefill_wrapper(
        _workspace(queries.tokens.device), pages.layout, backend=backend
    )
    starts = torch.tensor([0, *queries.counts]).cumsum(0).to(torch.int32)
    return _plan_and_run(wrapper, pages, queries, window_left, starts, causal=True)


def _plan_and_run(
    wrapper: Any,
    pages: KernelPages,
    queries: Queries,
    window_left: int,
    *query_starts: torch.Tensor,
    **options: bool,
) -> torch.Tensor:
    """Call a native wrapper as vLLM does; prefill plans take the queries' starts first."""
    heads = queries.tokens.shape[1]
    wrapper.plan(
        *query_starts,
        pages.kv_indptr,
        pages.kv_indices,
        pages.last_page_len,
        heads,
        heads // GROUP,
        queries.tokens.shape[2],
        pages.page_tokens,
        window_left=window_left,
        q_data_type=queries.tokens.dtype,
        kv_data_type=pages.key.dtype,
        **options,
    )
    result = wrapper.run(queries.tokens, (pages.key, pages.value))
    assert isinstance(result, torch.Tensor)
    return result


def _xqa(
    kernels: AttentionKernels, pages: KernelPages, queries: Queries, window_left: int
) -> torch.Tensor:
    # As vLLM 0.33.0 calls it (v1/attention/backends/flashinfer.py:2697).
    out = torch.empty_like(queries.tokens)
    kernels.xqa_decode(
        query=queries.tokens,
        kv_cache=(pages.key, pages.value),
        workspace_buffer=_xqa_workspace(queries.tokens.device),
        block_tables=pages.page_table,
        seq_lens=pages.seq_lens,
        max_seq_len=pages.page_table.shape[1] * pages.page_tokens,
        bmm1_scale=1.0 / math.sqrt(queries.tokens.shape[2]),
        bmm2_scale=1.0,
        window_left=window_left,
        out=out,
        kv_layout=pages.layout,
        q_len_per_req=1,
    )
    return out


_NATIVE_PAGES = (16, 32, 64, 128)

PATHS = (
    AttentionPath(
        "fa2-decode",
        "decode",
        functools.partial(_decode, backend="fa2", use_tensor_cores=False),
        _NATIVE_PAGES,
        takes_whole_blocks=True,
    ),
    AttentionPath(
        "fa2-tensor-core-decode",
        "decode",
        functools.partial(_decode, backend="fa2", use_tensor_cores=True),
        _NATIVE_PAGES,
        takes_whole_blocks=True,
    ),
    AttentionPath(
        "fa2-prefill",
        "prefill",
        functools.partial(_prefill, backend="fa2"),
        _NATIVE_PAGES,
        takes_whole_blocks=True,
    ),
    AttentionPath(
        "fa3-decode",
        "decode",
        functools.partial(_decode, backend="fa3", use_tensor_cores=True),
        _NATIVE_PAGES,
        takes_whole_blocks=True,
        majors=(9,),
    ),
    AttentionPath(
        "fa3-prefill",
        "prefill",
        functools.partial(_prefill, backend="fa3"),
        _NATIVE_PAGES,
        takes_whole_blocks=True,
        majors=(9,),
    ),
    # Page sizes: flashinfer-python 0.7.2.post1, jit/xqa.py:82; devices: xqa.py.
    AttentionPath(
        "xqa-decode",
        "decode",
        _xqa,
        (16, 32, 64, 128),
        takes_whole_blocks=False,
        majors=(9, 10, 12),
    ),
    # On SM90 an fp8 cache takes the TMA kernel (csrc/xqa/mha_sm90.cu), which computes in fp8.
    AttentionPath(
        "xqa-fp8-decode",
        "decode",
        _xqa,
        (16, 32, 64, 128),
        takes_whole_blocks=False,
        majors=(9, 10, 12),
        cache_dtype=torch.float8_e4m3fn,
        tolerance=0.15,
    ),
)
"""Every path that the self-test checks."""
