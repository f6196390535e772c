# SPDX-License-Identifier: Apache-2.0
"""KV-cache specs of vLLM's own classes, for models that exist on paper only."""

from __future__ import annotations

from typing import Any

import torch

from repage.vllm import compat

BLOCK = 640


def attention(
    heads: int, dim: int, window: int | None = None, *, block: int = BLOCK, **fields: Any
) -> Any:
    """Full attention, or a sliding window of so many tokens; bf16 unless `fields` differ."""
    interface = compat.kv_cache_interface()
    values: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": heads,
        "head_size": dim,
        "dtype": torch.bfloat16,
        **fields,
    }
    if window is None:
        return interface.FullAttentionSpec(**values)
    return interface.SlidingWindowSpec(sliding_window=window, **values)


def state(page: int, *, block: int = BLOCK, **fields: Any) -> Any:
    """A recurrent state that fills a page of so many bytes."""
    return compat.kv_cache_interface().MambaSpec(
        block_size=block,
        shapes=((page // 2,),),
        dtypes=(torch.bfloat16,),
        page_size_padded=page,
        **fields,
    )


def layers(**kinds: tuple[Any, int]) -> dict[str, Any]:
    """Name so many layers of each kind: ``kind.index``."""
    return {
        f"{kind}.{index}": spec for kind, (spec, count) in kinds.items() for index in range(count)
    }
