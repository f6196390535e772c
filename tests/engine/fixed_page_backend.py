# SPDX-License-Identifier: Apache-2.0
"""CPU_ATTN as if its kernels took 32-token blocks only, on packed layouts too; not re-paged."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout


class FixedPageCPUAttentionBackend(CPUAttentionBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        del kv_cache_spec
        return [32]
