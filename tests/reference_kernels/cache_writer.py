# SPDX-License-Identifier: Apache-2.0
"""``reshape_and_cache_flash``: the writer that stores new K and V token by token.

Registered as the real torch op, so that vLLM reaches it the way it reaches the CUDA kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reference_kernels.context import KernelContext
from reference_kernels.errors import Rules
from reference_kernels.sources import DTYPES, UNIQUE_SLOTS, WRITER

__all__ = ["register_cache_writer", "reshape_and_cache_flash", "write_tokens"]

_RULES = Rules("reshape_and_cache_flash")
_SCHEMA = (
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
_FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass
class _Registration:
    """The process's op, and where it records."""

    context: KernelContext = field(default_factory=KernelContext)
    library: Any = None


_REGISTRATION = _Registration()


def register_cache_writer(context: KernelContext) -> None:
    """Register the op once a process; later calls only change where writes are recorded.

    Raises
    ------
    RuntimeError
        If a compiled vLLM already provides the op.
    """
    _REGISTRATION.context = context
    if _REGISTRATION.library is not None:
        return
    if hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        raise RuntimeError("this vLLM build already has reshape_and_cache_flash")
    library: Any = torch.library.Library("_C_cache_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_SCHEMA)
    library.impl("reshape_and_cache_flash", _write_into_context, "CPU")
    _REGISTRATION.library = library


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Call the registered op; the counterpart of ``vllm._custom_ops.reshape_and_cache_flash``."""
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def _write_into_context(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    write_tokens(
        _REGISTRATION.context,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype,
        k_scale,
        v_scale,
    )


def write_tokens(
    context: KernelContext,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Store ``key`` and ``value`` at their slots, and record who they are.

    Parameters
    ----------
    key, value : Tensor
        ``[tokens or more, heads, head_dim]``; ``slot_mapping`` says how many are real.
    key_cache, value_cache : Tensor
        ``[blocks, block_tokens, heads, head_dim]``, any strides with a contiguous head.
    slot_mapping : Tensor
        int64 ``[tokens]``, ``block * block_tokens + offset``; negative: not stored.
    kv_cache_dtype : str
        ``"auto"`` or one of the fp8 names (the cache is then uint8).
    k_scale, v_scale : Tensor
        float32 scalars that fp8 values are divided by.
    """
    require = _RULES.require
    require(
        slot_mapping.dtype == torch.int64 and slot_mapping.dim() == 1,
        "slot_mapping",
        "int64, one dimension",
        f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}",
        WRITER,
    )
    fp8 = _FP8_CACHES.get(kv_cache_dtype)
    if kv_cache_dtype != "auto" and fp8 is None:
        _RULES.unmodelled(kv_cache_dtype=kv_cache_dtype)
    wanted = torch.uint8 if fp8 is not None else key.dtype
    require(
        key_cache.dtype == wanted and value_cache.dtype == wanted,
        "key_cache.dtype",
        wanted,
        f"{key_cache.dtype}, {value_cache.dtype}",
        DTYPES,
    )
    count = slot_mapping.shape[0]
    num_blocks, block_tokens, heads, head_dim = key_cache.shape
    for name, given in (("key", key), ("value", value)):
        require(
            given.shape[0] >= count and given.shape[1:] == (heads, head_dim),
            f"{name}.shape",
            f"at least {count} tokens of {(heads, head_dim)}",
            tuple(given.shape),
            WRITER,
        )
    require(
        key_cache.shape == value_cache.shape and key_cache.stride() == value_cache.stride(),
        "value_cache",
        f"shape and strides of key_cache, {tuple(key_cache.shape)} {key_cache.stride()}",
        f"{tuple(value_cache.shape)} {value_cache.stride()}",
        WRITER,
    )
    require(key_cache.stride(3) == 1, "key_cache.stride(-1)", 1, key_cache.stride(3), WRITER)
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    if slots.numel() == 0:
        return
    require(
        int(slots.max()) < num_blocks * block_tokens,
        "slot_mapping",
        f"slots below {num_blocks * block_tokens}",
        int(slots.max()),
        WRITER,
    )
    distinct = len(set(slots.tolist()))
    require(
        distinct == slots.numel(),
        "slot_mapping",
        "one token a slot",
        f"{slots.numel()} tokens in {distinct} slots",
        UNIQUE_SLOTS,
    )
    blocks, offsets = slots // block_tokens, slots % block_tokens
    for side, tokens, cache, scale in (
        ("K", key, key_cache, k_scale),
        ("V", value, value_cache, v_scale),
    ):
        new = tokens[:count][stored]
        if fp8 is not None:
            limit = torch.finfo(fp8).max
            new = (new.float() / scale).clamp(-limit, limit).to(fp8).view(torch.uint8)
        cache.index_put_((blocks, offsets), new)
        if context.provenance is not None:
            context.provenance.record_write(side, cache, blocks, offsets, slots)
    context.count("write", block_tokens)
