# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence in float32: what every paged kernel has to compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionMask", "attend"]


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees; queries are the last ``T`` of the ``L`` tokens.

    Attributes
    ----------
    causal : bool
        A query sees no key behind its own position.
    window_left, window_right : int
        Keys before and behind the own position that are seen; -1 is unlimited.
    draft : Tensor | None
        bool ``[T, T]``: which of the last ``T`` keys each query sees, in place of ``causal``.
    """

    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    draft: Tensor | None = None

    def first_key(self, num_queries: int, length: int) -> int:
        """The first token that any query may see."""
        if self.window_left < 0:
            return 0
        return max(0, length - num_queries - self.window_left)

    def visible(self, num_queries: int, length: int) -> Tensor | None:
        """bool ``[T, L]``, or ``None`` where every query sees every key."""
        unlimited = self.window_left < 0 and self.window_right < 0
        if not self.causal and unlimited and self.draft is None:
            return None
        query = torch.arange(num_queries).view(-1, 1) + (length - num_queries)
        key = torch.arange(length).view(1, -1)
        visible = torch.ones(num_queries, length, dtype=torch.bool)
        if self.draft is not None:
            visible[:, length - num_queries :] = self.draft
        elif self.causal:
            visible &= key <= query
        if self.window_left >= 0:
            visible &= key >= query - self.window_left
        if self.window_right >= 0:
            visible &= key <= query + self.window_right
        return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend ``query`` to the tokens ``first_key .. first_key + len(key)`` of one sequence.

    Parameters
    ----------
    query : Tensor
        ``[T, query_heads, head_dim]``: the last ``T`` tokens of the sequence.
    key, value : Tensor
        ``[n, kv_heads, head_dim]``: the live tokens from ``first_key`` on.
    scale : float
        Factor on the scores.
    softcap : float
        ``softcap * tanh(score / softcap)`` if positive.
    sinks : Tensor | None
        ``[query_heads]``: a further logit per head in the softmax's denominator.

    Returns
    -------
    tuple[Tensor, Tensor]
        float32 output ``[T, query_heads, head_dim]`` and natural log-sum-exp ``[T, query_heads]``.
        A query without keys yields zeros and ``-inf``.
    """
    num_queries, query_heads, head_dim = query.shape
    count, kv_heads, value_dim = value.shape
    group = query_heads // kv_heads
    length = first_key + count
    if count == 0:
        return (
            torch.zeros(num_queries, query_heads, value_dim),
            torch.full((num_queries, query_heads), -math.inf),
        )
    rows = query.float().view(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(
        rows.reshape(kv_heads, group * num_queries, head_dim), key.float().permute(1, 2, 0)
    ).view(kv_heads, group, num_queries, count)
    scores *= scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = mask.visible(num_queries, length)
    if visible is not None:
        scores.masked_fill_(~visible[:, first_key:], -math.inf)
    if sinks is not None:
        extra = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat([scores, extra], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    weights = weights[..., :count].reshape(kv_heads, group * num_queries, count)
    out = torch.matmul(weights, value.float().permute(1, 0, 2))
    out = out.view(kv_heads, group, num_queries, value_dim).permute(2, 0, 1, 3)
    return (
        out.reshape(num_queries, query_heads, value_dim),
        lse.permute(2, 0, 1).reshape(num_queries, query_heads),
    )
