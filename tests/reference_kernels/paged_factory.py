# SPDX-License-Identifier: Apache-2.0
"""Factories for the harness: from vLLM's backend class to the one that an engine runs.

``product`` is what users get. The others make a backend of one page size, ``REPAGE_TEST_PAGE``:
they let a test choose the page, where the product's policies choose the best one.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from repage import KernelPageRules
from repage.vllm.factory import repage_backend
from repage.vllm.policy import BackendPolicy, PageContext

__all__ = ["limited", "product", "repaged"]


class _OnePagePolicy(BackendPolicy):
    """Pages of one size, for caches whose backend takes fixed sizes only."""

    def __init__(self, real: type[Any], page_tokens: int) -> None:
        self.name = real.get_name()
        self._real = real
        self._page_tokens = page_tokens

    def page_rules(self, context: PageContext) -> KernelPageRules | None:
        native = self._real.get_supported_kernel_block_sizes(context.spec)
        if not all(isinstance(size, int) for size in native):
            return None
        return KernelPageRules(name=self.name, page_sizes=(self._page_tokens,))

    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return native


def _page_tokens() -> int:
    return int(os.environ["REPAGE_TEST_PAGE"])


def repaged(real: type[Any]) -> type[Any]:
    """The re-paged backend, its kernel pages of ``REPAGE_TEST_PAGE`` tokens on packed layouts."""
    backend = repage_backend(real, _OnePagePolicy(real, _page_tokens()), module=__name__)
    # vLLM tells backends apart by module and name.
    globals()[backend.__name__] = backend
    return backend


def product(real: type[Any]) -> type[Any]:
    """The class that repage registers in the place of ``real``."""
    backends = importlib.import_module("repage.vllm.backends")
    backend: type[Any] = getattr(backends, f"Repaged{real.__name__}")
    if not issubclass(backend, real):
        raise TypeError(f"{backend} was derived before the harness replaced {real}")
    return backend


def limited(real: type[Any]) -> type[Any]:
    """The stock backend with pages of ``REPAGE_TEST_PAGE`` tokens only.

    vLLM picks the largest page by the model's heads and then asserts by the group's: a grouped
    target with an ungrouped drafter dies on SM100 with pages of 128 (0.32.0, flashinfer.py:876).
    """
    page_tokens = _page_tokens()

    class LimitedBackend(real):  # type: ignore[misc]
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:  # noqa: ARG004
            return [page_tokens]

    LimitedBackend.__qualname__ = LimitedBackend.__name__
    globals()[LimitedBackend.__name__] = LimitedBackend
    return LimitedBackend
