# SPDX-License-Identifier: Apache-2.0
"""How a kernel sees K and V pages: base, strides, page id and page size, in 64-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reference_kernels.attention import AttentionMask, attend
from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules, Source
from reference_kernels.sources import (
    DEAD_COLUMNS,
    DTYPES,
    FI_LAYOUT,
    FI_VECTOR_LOADS,
    FINITE,
    LIVE_TOKENS,
    TMA_STRIDES,
)

__all__ = ["PagedCache", "SequenceTokens", "attend_pages", "cdiv", "check_ids", "check_pages"]

Layout = Literal["NHD", "HND"]


def cdiv(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class PagedCache:
    """K and V pages of one layer.

    Attributes
    ----------
    key, value : Tensor
        ``[pages, page_tokens, heads, head_dim]`` (NHD) or ``[pages, heads, page_tokens, head_dim]``
        (HND), any strides.
    layout : str
        ``"NHD"`` or ``"HND"``.
    """

    key: Tensor
    value: Tensor
    layout: Layout

    @classmethod
    def unpack(cls, rules: Rules, kv_cache: object, layout: str) -> PagedCache:
        """From the ``(key, value)`` pair or the ``[pages, 2, ...]`` tensor of a kernel call."""
        rules.require(layout in ("NHD", "HND"), "kv_layout", "NHD or HND", layout, FI_LAYOUT)
        if isinstance(kv_cache, Tensor):
            rules.require(
                kv_cache.dim() == 5 and kv_cache.shape[1] == 2,
                "kv_cache",
                "[pages, 2, ...] or a (key, value) tuple",
                tuple(kv_cache.shape),
                FI_LAYOUT,
            )
            key, value = kv_cache.unbind(1)
        else:
            rules.require(
                isinstance(kv_cache, tuple) and len(kv_cache) == 2,
                "kv_cache",
                "a tensor or a (key, value) tuple",
                type(kv_cache).__name__,
                FI_LAYOUT,
            )
            assert isinstance(kv_cache, tuple)
            key, value = kv_cache
        return cls(key, value, "HND" if layout == "HND" else "NHD")

    @property
    def token_dim(self) -> int:
        """Dimension of the token inside a page."""
        return 2 if self.layout == "HND" else 1

    @property
    def head_dim_index(self) -> int:
        """Dimension of the head."""
        return 1 if self.layout == "HND" else 2

    @property
    def num_pages(self) -> int:
        """Pages in the view."""
        return int(self.key.shape[0])

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return int(self.key.shape[self.token_dim])

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return int(self.key.shape[self.head_dim_index])

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return int(self.key.shape[3])


@dataclass(frozen=True)
class SequenceTokens:
    """The live tokens of one sequence: what a kernel may read of its pages.

    Attributes
    ----------
    first : int
        First token that any query of this call may see.
    length : int
        Tokens in the sequence.
    """

    first: int
    length: int

    def read(
        self,
        rules: Rules,
        context: KernelContext,
        cache: PagedCache,
        page_ids: Tensor,
        start: int,
        stop: int,
    ) -> tuple[Tensor, Tensor]:
        """Read the tokens ``start .. stop``, each by its page id, position and strides.

        Returns
        -------
        tuple[Tensor, Tensor]
            K and V, ``[stop - start, heads, head_dim]``.

        Raises
        ------
        StrictKernelError
            A token past the length or before the window, a page list that is too short, a page id
            outside the view, or bytes that are not this token's.
        """
        rules.require(
            self.first <= start <= stop <= self.length,
            "tokens read",
            f"within the live tokens [{self.first}, {self.length})",
            f"[{start}, {stop})",
            LIVE_TOKENS,
        )
        pages_needed = cdiv(stop, cache.page_tokens)
        rules.require(
            page_ids.numel() >= pages_needed,
            "pages of a sequence",
            f"at least {pages_needed} for {stop} tokens of {cache.page_tokens} a page",
            page_ids.numel(),
            LIVE_TOKENS,
        )
        check_ids(rules, page_ids[:pages_needed], cache.num_pages, "page ids")
        tokens = torch.arange(start, stop)
        pages = page_ids.to(torch.int64)[tokens // cache.page_tokens]
        offsets = tokens % cache.page_tokens
        results = []
        for name, side in (("K", cache.key), ("V", cache.value)):
            if context.provenance is not None and stop > start:
                context.provenance.check_read(
                    rules.kernel,
                    name,
                    side,
                    pages,
                    offsets,
                    tokens,
                    token_dim=cache.token_dim,
                    head_dim=cache.head_dim_index,
                )
            by_page = side if cache.layout == "NHD" else side.transpose(1, 2)
            raw = by_page.view(torch.uint8) if by_page.element_size() == 1 else by_page
            result = raw[pages, offsets].view(side.dtype)
            rules.require(
                bool(torch.isfinite(result.float()).all()),
                f"{name} of the live tokens",
                "finite values",
                "inf or nan",
                FINITE,
            )
            results.append(result)
        return results[0], results[1]


def check_pages(
    rules: Rules,
    context: KernelContext,
    cache: PagedCache,
    *,
    same_strides: Source | None = None,
    tma: bool = False,
) -> None:
    """Check what every kernel asks of a K and V view.

    Parameters
    ----------
    same_strides : Source | None
        Where the kernel demands, or assumes, equal strides of K and V.
    tma : bool
        Whether the strides end up in a tensor map (below 2**40 bytes).
    """
    for name, side in (("k_cache", cache.key), ("v_cache", cache.value)):
        rules.require(side.dim() == 4, name, "4 dimensions", tuple(side.shape), FI_LAYOUT)
        rules.require(
            side.dtype in context.dtypes(),
            f"{name}.dtype",
            context.dtypes(),
            side.dtype,
            DTYPES,
        )
        rules.require(side.stride(3) == 1, f"{name}.stride(-1)", 1, side.stride(3), FI_VECTOR_LOADS)
        item = side.element_size()
        rules.require(
            all(stride * item % 16 == 0 for stride in side.stride()[:3]),
            f"{name}.stride()",
            "multiples of 16 bytes",
            f"{side.stride()} elements of {item} bytes",
            FI_VECTOR_LOADS,
        )
        rules.require(
            side.data_ptr() % 16 == 0,
            f"{name}.data_ptr()",
            "a multiple of 16",
            f"{side.data_ptr() % 16} past one",
            FI_VECTOR_LOADS,
        )
        if tma:
            rules.require(
                all(0 < stride * item < 2**40 for stride in side.stride()[:3]),
                f"{name}.stride()",
                "between 16 and 2**40 - 1 bytes",
                side.stride(),
                TMA_STRIDES,
            )
    rules.require(
        cache.key.shape == cache.value.shape and cache.key.dtype == cache.value.dtype,
        "v_cache",
        f"shape and dtype of k_cache, {tuple(cache.key.shape)} {cache.key.dtype}",
        f"{tuple(cache.value.shape)} {cache.value.dtype}",
        FI_LAYOUT,
    )
    if same_strides is not None:
        rules.require(
            cache.key.stride() == cache.value.stride(),
            "v_cache.stride()",
            f"that of k_cache, {cache.key.stride()}",
            cache.value.stride(),
            same_strides,
        )


def check_ids(rules: Rules, ids: Tensor, num_pages: int, argument: str) -> None:
    """Every id is a page of the view, whether its column is read or not."""
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    rules.require(
        low >= 0 and high < num_pages,
        argument,
        f"ids in [0, {num_pages})",
        f"ids from {low} to {high}",
        DEAD_COLUMNS,
    )


def attend_pages(
    rules: Rules,
    context: KernelContext,
    cache: PagedCache,
    query: Tensor,
    page_ids: Tensor,
    length: int,
    *,
    scale: float,
    mask: AttentionMask,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last ``len(query)`` tokens of one sequence over its pages.

    Returns
    -------
    tuple[Tensor, Tensor]
        float32 output ``[T, query_heads, head_dim]`` and natural log-sum-exp ``[T, query_heads]``.
    """
    live = SequenceTokens(mask.first_key(len(query), length), length)
    key, value = live.read(rules, context, cache, page_ids, live.first, length)
    return attend(
        query,
        key,
        value,
        scale=scale,
        mask=mask,
        softcap=softcap,
        sinks=sinks,
        first_key=live.first,
    )
