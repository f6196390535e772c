# SPDX-License-Identifier: Apache-2.0
"""What runs in the workers: collect specs as a run on some layout would.

The engine core sends these functions by `Executor.collective_rpc`, so every name here must be
importable in the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from repage.planner.layout_plan import KernelPage, layer_kind
from repage.vllm import compat, layouts
from repage.vllm.policy import PageContext, choose_page
from repage.vllm.preference import planner_compat
from repage.vllm.refusals import page_refusal


@dataclass(frozen=True)
class RankReport:
    """A worker's answers for a run on one layout.

    Parameters
    ----------
    specs : mapping of str to vllm.v1.kv_cache_interface.KVCacheSpec
        Its layers.
    pages : tuple of KernelPage
        Per kind of attention layer, the page that its backend would use; ``page_tokens`` is None
        where the backend must split blocks and cannot.
    refusal : str or None
        Why specs could not be collected.
    """

    specs: Mapping[str, Any]
    pages: tuple[KernelPage, ...] = ()
    refusal: str | None = None


def set_mode(_worker: Any, layout: str | None) -> None:
    """Plan a worker's process for a layout.

    Parameters
    ----------
    _worker : vllm.v1.worker.worker_base.WorkerBase
        Given by vLLM.
    layout : str or None
        Block-outermost layout; None for a layer-compact run.
    """
    layouts.set_packed_mode(layout)


def collect(worker: Any, layout: str | None) -> RankReport:
    """Collect specs as a run on a layout would, and leave the worker planned for it.

    Parameters
    ----------
    worker : vllm.v1.worker.worker_base.WorkerBase
        Given by vLLM; its model is loaded.
    layout : str or None
        Block-outermost layout; None for a layer-compact run.

    Returns
    -------
    RankReport
        A refusal of a backend (`repage.errors.RepagingRefusedError` and every other error) is
        reported, not raised: the stock layout may still serve.
    """
    layouts.set_packed_mode(layout)
    try:
        specs = worker.get_kv_cache_spec()
        return RankReport(specs, _pages(worker, specs, layout))
    except Exception as error:
        return RankReport({}, refusal=f"{type(error).__name__}: {error}")


def backend_names(worker: Any) -> list[str]:
    """Name the attention backends of a worker.

    Parameters
    ----------
    worker : vllm.v1.worker.worker_base.WorkerBase
        Given by vLLM.

    Returns
    -------
    list of str
        Each once.
    """
    backends = (_backend(layer) for layer in _layers(worker).values())
    return sorted({backend.get_name() for backend in backends if backend is not None})


def _layers(worker: Any) -> Mapping[str, Any]:
    context = worker.vllm_config.compilation_config.static_forward_context
    return dict(context)


def _backend(layer: Any) -> Any | None:
    getter = getattr(layer, "get_attn_backend", None)
    return None if getter is None else getter()


def _pages(worker: Any, specs: Mapping[str, Any], layout: str | None) -> tuple[KernelPage, ...]:
    attention = compat.kv_cache_interface().AttentionSpec
    layers = _layers(worker)
    pages: dict[tuple[str, str], KernelPage] = {}
    for name, spec in specs.items():
        backend = _backend(layers.get(name))
        if backend is None or not isinstance(spec, attention):
            continue
        key = (backend.get_name(), layer_kind(name, spec))
        if key not in pages:
            pages[key] = _page(backend, name, spec, layout, worker.vllm_config)
    return tuple(pages.values())


def _page(backend: Any, name: str, spec: Any, layout: str | None, vllm_config: Any) -> KernelPage:
    """Return the page with which a backend would read a layer's blocks."""
    kind, block, who = layer_kind(name, spec), int(spec.block_size), backend.get_name()
    policy = getattr(backend, "repage_policy", None)
    if policy is not None and layout is not None:
        context = PageContext(spec, compat.layout_by_name(layout), vllm_config, (name,))
        choice = choose_page(policy, context)
        if choice is not None:
            page, reason = choice.page_tokens, page_refusal(policy, context, choice)
            if reason is not None:
                return KernelPage(kind, who, block, None, problem=reason)
            return KernelPage(kind, f"{who} (re-paged)", block, page, block // page)
    sizes = backend.get_supported_kernel_block_sizes(spec)
    bases = [(planner_compat.multiple_of_base(size), size) for size in sizes]
    whole = not bases or any(
        block % base == 0 if base is not None else block == size for base, size in bases
    )
    if whole or spec.tokens_per_state != 1:
        return KernelPage(kind, who, block, block, 1)
    if layout is None:
        fitting = [size for base, size in bases if base is None and block % size == 0]
        if fitting:
            return KernelPage(kind, who, block, max(fitting), block // max(fitting))
    return KernelPage(
        kind, who, block, None, problem=f"{who} takes {sizes}, not {block}-token blocks whole"
    )
