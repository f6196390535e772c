# SPDX-License-Identifier: Apache-2.0
"""What the reference kernels of one process share: the device, the provenance map, counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from reference_kernels.provenance import ProvenanceMap

__all__ = ["KernelContext"]

_FLOATS = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class KernelContext:
    """The pretended device and the state that kernels and cache writer share.

    Attributes
    ----------
    capability : tuple[int, int]
        Compute capability of the device that the kernels pretend to run on.
    provenance : ProvenanceMap | None
        Records of the cache writer; ``None`` for caches that were filled without it.
    calls : Counter[str]
        Calls per kernel and page size, such as ``"xqa_decode p32"``.
    float32 : bool
        Accept float32 queries and caches, which no kernel here has: the stand-in for bf16 that
        makes a comparison with another implementation exact to rounding.
    """

    capability: tuple[int, int] = (8, 0)
    provenance: ProvenanceMap | None = field(default_factory=ProvenanceMap)
    calls: Counter[str] = field(default_factory=Counter)
    float32: bool = False

    def count(self, kernel: str, page_tokens: int) -> None:
        """Count one call."""
        self.calls[f"{kernel} p{page_tokens}"] += 1

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that queries, K and V may have; a kernel may take fewer."""
        return (*_FLOATS, *_FP8, *((torch.float32,) if self.float32 else ()))
