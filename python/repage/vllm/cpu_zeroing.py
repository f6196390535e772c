# SPDX-License-Identifier: Apache-2.0
"""Zeroing of new blocks in the V1 CPU runner, for packed groups too.

``CPUModelRunner._zero_block_ids`` skips every group whose spec is not a ``FullAttentionSpec``
(``v1/worker/cpu_model_runner.py:114-120``, 0.32.0 and 0.33.0). Packed groups carry
``UniformTypeKVCacheSpecs`` or a sliding-window spec, so a block that held a recurrent state is read
with the state's bytes behind the last token, as NaN. The V2 runner and GPUs use ``KVBlockZeroer``,
which goes by layers and is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from repage.vllm import compat
from repage.vllm.layouts import packed_layout

_MARK = "_repage_zeroes_packed_groups"


def install() -> None:
    """Wrap ``CPUModelRunner._zero_block_ids``; calls after the first change nothing."""
    runner = compat.cpu_model_runner()
    stock: Callable[[Any, list[int]], None] = runner._zero_block_ids
    if not hasattr(stock, _MARK):
        runner._zero_block_ids = _wrap(stock)


def _wrap(stock: Callable[[Any, list[int]], None]) -> Callable[[Any, list[int]], None]:
    @functools.wraps(stock)
    def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
        stock(self, block_ids)
        if packed_layout(self.vllm_config) is not None:
            zero_skipped_groups(
                self.kv_cache_config,
                self.compilation_config.static_forward_context,
                block_ids,
            )

    setattr(_zero_block_ids, _MARK, True)
    return _zero_block_ids


def zero_skipped_groups(kv_cache_config: Any, layers: dict[str, Any], block_ids: list[int]) -> None:
    """Zero new blocks in the attention layers that the stock method passes over.

    Parameters
    ----------
    kv_cache_config : vllm.v1.kv_cache_interface.KVCacheConfig
        With the groups and the number of blocks.
    layers : dict of str to layer
        vLLM's ``static_forward_context``. The layers' ``kv_cache`` is written through its own
        [B, H, N, C] view: exactly the layer's bytes of each block, none of a neighbour's.
    block_ids : list of int
        Manager block ids, owned by the caller from now on.
    """
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for kv_cache in _skipped_caches(kv_cache_config, layers):
        # Layers that share a cache are one; overlaid layers begin at one address but differ.
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if key in seen:
            continue
        seen.add(key)
        # Kernel blocks of a manager block follow each other, where vLLM split them.
        ratio = kv_cache.shape[0] // kv_cache_config.num_blocks
        for block_id in block_ids:
            kv_cache[block_id * ratio : (block_id + 1) * ratio].zero_()


def _skipped_caches(kv_cache_config: Any, layers: dict[str, Any]) -> Iterator[torch.Tensor]:
    interface = compat.kv_cache_interface()
    for group in kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, interface.FullAttentionSpec):
            continue  # zeroed by the stock method
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, interface.UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs.get(name)  # None: shares the cache of a layer with one
            if not isinstance(spec, interface.AttentionSpec) or isinstance(
                spec, interface.EncoderOnlyAttentionSpec
            ):
                continue
            kv_cache = getattr(layers.get(name), "kv_cache", None)
            if isinstance(kv_cache, torch.Tensor) and kv_cache.numel():
                yield kv_cache
