# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks in one process: real specs and executor, workers that only answer."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports use what torch deprecates
    from vllm.v1.executor.abstract import Executor

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from repage.planner.request import offline_config
from repage.vllm import layouts
from support.specs import BLOCK, attention, layers, state

TARGET, DRAFTER = attention(2, 256), attention(8, 128)
STATE = state(TARGET.page_size_bytes, num_speculative_blocks=7)


class Whole:
    """Takes every manager block whole, as re-paged backends do."""

    name = "WHOLE"
    sizes: tuple[Any, ...] = ()

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_kernel_block_sizes(cls, _spec: Any = None) -> list[Any]:
        return list(cls.sizes)


class Splitting(Whole):
    """A stock backend of fixed pages."""

    name, sizes = "FIXED", (16, 32, 64)


class Worker:
    """One rank; its sliding-window layers get small blocks unless the run is packed."""

    def __init__(self, layers: dict[str, Any], backend: type, supported: list[str]) -> None:
        self.layers, self.supported = layers, supported
        context = {
            name: SimpleNamespace(get_attn_backend=lambda: backend)
            for name, spec in layers.items()
            if not isinstance(spec, MambaSpec)
        }
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=context)
        )
        self.modes: list[str | None] = []

    def get_kv_cache_spec(self) -> dict[str, Any]:
        packed = layouts.packed_layout()
        self.modes.append(None if packed is None else packed.name)
        small = {
            name: spec.copy_with_new_block_size(64)
            for name, spec in self.layers.items()
            if packed is None and isinstance(spec, SlidingWindowSpec)
        }
        return {**self.layers, **small}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return list(self.supported)


class Ranks(Executor):
    """Runs every rank in this process."""

    def __init__(self, *workers: Worker, length: int = 262_144) -> None:
        self.workers = workers
        self.vllm_config = offline_config(length, 8192)
        self.vllm_config.cache_config.block_size = BLOCK
        self.vllm_config.model_config.model = "fake"

    def collective_rpc(self, method: Any, timeout=None, args=(), kwargs=None, non_block=False):
        del timeout, kwargs, non_block
        if isinstance(method, str):
            return [getattr(worker, method)(*args) for worker in self.workers]
        return [method(worker, *args) for worker in self.workers]


Ranks.__abstractmethods__ = frozenset()


def headline() -> dict[str, Any]:
    return layers(
        state=(STATE, 30),
        full=(TARGET, 10),
        window=(attention(8, 128, 2048), 5),
        draft=(DRAFTER, 1),
    )
