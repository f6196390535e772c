# SPDX-License-Identifier: Apache-2.0
"""Whether this run packs its KV cache, at each moment at which vLLM asks.

The answer to "which kernel blocks do you take" has to differ between model load, the collection
of specs and everything after the layout is resolved, because vLLM derives the manager block from
the first, the blocks of sliding-window layers from the second, and splits blocks by the third.
"""

from __future__ import annotations

from typing import Any

from repage.errors import UnsupportedLayoutError
from repage.vllm import compat

_planned_layout: str | None = None


def set_packed_mode(layout: str | None) -> None:
    """Plan this process for a block-outermost layout; see `repage.vllm.set_packed_mode`.

    Parameters
    ----------
    layout : str or None
        Layout name, or None to forget an earlier one.

    Raises
    ------
    UnsupportedLayoutError
        When vLLM knows no such layout, or it is layer-compact.
    """
    global _planned_layout  # noqa: PLW0603
    if layout is not None:
        known = compat.layout_by_name(layout)
        if known is None or not known.is_block_outermost:
            raise UnsupportedLayoutError(
                f"layout: expected a block-outermost layout of vLLM, such as BLHNC or BLNHC, "
                f"got {layout!r}"
            )
    _planned_layout = layout


def packed_layout(vllm_config: Any | None = None) -> Any | None:
    """Return the block-outermost layout of this run, as far as it is known by now.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig or None, default None
        None takes vLLM's current config, if one is set: when specs are collected none is
        (``v1/worker/worker_base.py``, 0.32.0 and 0.33.0).

    Returns
    -------
    vllm.v1.kv_cache_layout.KVCacheLayout or None
        None for a layer-compact layout, and while nothing asks for a packed one.

    Notes
    -----
    A layout that vLLM has resolved decides; before that, ``VLLM_KV_CACHE_LAYOUT``, which vLLM
    then either resolves to or fails on; then what `set_packed_mode` said.
    """
    config = compat.current_vllm_config() if vllm_config is None else vllm_config
    resolved = None if config is None else config.cache_config.kv_cache_layout
    name = resolved or compat.requested_layout_name() or _planned_layout
    layout = None if name is None else compat.layout_by_name(name)
    return layout if layout is not None and layout.is_block_outermost else None


def is_token_major(layout: Any) -> bool:
    """Whether tokens lie outside heads in a block (NHC), as in BLNHC.

    Parameters
    ----------
    layout : vllm.v1.kv_cache_layout.KVCacheLayout
        Its value orders the dimensions 0..4 of [L, B, H, N, C].

    Returns
    -------
    bool
    """
    order = layout.stride_order
    return bool(order.index(3) < order.index(2))
