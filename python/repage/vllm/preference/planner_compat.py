# SPDX-License-Identifier: Apache-2.0
"""The private names of vLLM's KV-cache planner, per version, and probes for them.

The sibling of `repage.vllm.compat` for everything that plans: nothing else imports these names.
In 0.32 the planner is part of ``v1/core/kv_cache_utils.py``; in 0.33 it is
``v1/core/kv_cache_planning.py`` and placement goes through a builder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from repage.errors import UnsupportedVllmError
from repage.vllm import probes
from repage.vllm.compat import kv_cache_interface, layout_by_name
from repage.vllm.probes import Probe

_UTILS = "vllm.v1.core.kv_cache_utils"
_PLANNING = "vllm.v1.core.kv_cache_planning"
_BUILDER = "vllm.v1.core.kv_cache_config_builder"
_LAYOUTS = "vllm.v1.attention.backends.utils"


def planning_module() -> ModuleType:
    """Return the module that groups and sizes KV caches."""
    name = _PLANNING if importlib.util.find_spec(_PLANNING) is not None else _UTILS
    return importlib.import_module(name)


def executor_class() -> Any:
    """Return ``vllm.v1.executor.abstract.Executor``, which every executor derives from."""
    return importlib.import_module("vllm.v1.executor.abstract").Executor


def state_shapes() -> Any:
    """Return vLLM's calculator of recurrent-state shapes."""
    module = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    return module.MambaStateShapeCalculator


def global_groups(config: Any, specs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Group the layers of all workers with vLLM's own rules.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        A copy whose layout is resolved.
    specs : sequence of mapping of str to KVCacheSpec
        Per worker; copied, because the planner may rewrite the mappings.

    Returns
    -------
    list of vllm.v1.kv_cache_interface.KVCacheGroupSpec
    """
    module = planning_module()
    copies = [dict(worker) for worker in specs]
    if hasattr(module, "get_global_kv_cache_groups"):
        return list(module.get_global_kv_cache_groups(config, copies))
    # 0.32: the merge is the first part of get_kv_cache_configs (kv_cache_utils.py:2563-2593).
    merged: dict[str, Any] = {}
    for worker in copies:
        merged.update(worker)
    extra = max(0, config.num_prefill_lookahead_tokens - 1)
    sliding = kv_cache_interface().SlidingWindowSpec
    for name, spec in merged.items():
        if isinstance(spec, sliding):
            merged[name] = replace(spec, extra_retained_tokens=extra)
    return list(module.get_kv_cache_groups(config, merged))


def worker_groups(groups: Sequence[Any], worker: Mapping[str, Any]) -> list[Any]:
    """Reduce global groups to one worker's layers."""
    return list(planning_module()._project_kv_cache_groups_to_worker(list(groups), dict(worker)))


def bytes_per_block(config: Any, groups: Sequence[Any]) -> int:
    """Return the bytes of one pool block on a worker (the block stride on packed layouts)."""
    module = planning_module()
    if hasattr(module, "_pool_bytes_per_block_from_builder"):
        builder = _builder(config)
        return int(module._pool_bytes_per_block_from_builder(builder, config, list(groups)))
    return int(module._pool_bytes_per_block(config, list(groups)))


def bytes_per_request(config: Any, groups: Sequence[Any]) -> int:
    """Return the bytes that one request of maximum length may hold on a worker."""
    module = planning_module()
    function = module._max_memory_usage_bytes_from_groups
    if len(inspect.signature(function).parameters) == 3:
        return int(function(_builder(config), config, list(groups)))
    return int(function(config, list(groups)))


def capacity_tokens(config: Any, groups: Sequence[Any], num_blocks: int) -> int:
    """Return the KV-cache size in tokens as vLLM reports it for a number of blocks."""
    cache = kv_cache_interface().KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=list(groups)
    )
    tokens, _ = importlib.import_module(_UTILS).get_kv_cache_capacity(config, cache)
    return int(tokens)


def group_page_size(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Give every layer the same page size, as vLLM does on layer-compact layouts."""
    return dict(planning_module().unify_kv_cache_spec_page_size(dict(specs)))


def make_groups(specs: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[Any]:
    """Return groups of the named layers, specs merged by vLLM."""
    lists = [list(group) for group in names]
    return list(planning_module().create_kv_cache_group_specs(dict(specs), lists))


def validate_layout(layout: str, groups: Sequence[Any]) -> None:
    """Raise vLLM's ValueError where a layout cannot express a grouping."""
    planning_module().validate_kv_cache_layout(layout_by_name(layout), list(groups))


def layer_specs(group: Any) -> dict[str, Any]:
    """Return the spec of every layer of a group, in the order of its block."""
    uniform = kv_cache_interface().UniformTypeKVCacheSpecs
    spec = group.kv_cache_spec
    if isinstance(spec, uniform):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def group_blocks(config: Any, group: Any) -> int:
    """Return the blocks of one group that a request of maximum length may hold."""
    spec = group.kv_cache_spec
    return -(-int(spec.max_memory_usage_bytes(config)) // int(spec.page_size_bytes))


def connector_layout(config: Any) -> str | None:
    """Return the layout that a KV connector asks for, None without one."""
    if config.kv_transfer_config is None:
        return None
    name = importlib.import_module(_LAYOUTS).get_kv_connector_cache_layout(config)
    return None if name is None else {"NHD": "LBNHC", "HND": "LBHNC"}.get(str(name), str(name))


def multiple_of_base(size: Any) -> int | None:
    """Return the base of a ``MultipleOf`` answer, None for an exact size."""
    return None if isinstance(size, int) else int(size.base)


def has_own_preference() -> bool:
    """Whether this vLLM already moves block-outermost layouts first by itself.

    A behaviour probe: vLLM's own resolution gets specs of mixed page sizes that a packed layout
    serves best, and workers that list the layer-compact layout first.

    Returns
    -------
    bool
    """
    layout = _resolve_probe_layout()
    return bool(layout.is_block_outermost)


def _resolve_probe_layout() -> Any:
    interface = kv_cache_interface()
    dtype = importlib.import_module("torch").bfloat16
    specs = [
        interface.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=64, dtype=dtype, sliding_window=None
        )
        for heads in (1, 4)
    ]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=None
    )
    utils = importlib.import_module(_LAYOUTS)
    with quiet(utils), _without_request(utils):
        return utils.resolve_kv_cache_layout(config, [["LBHNC", "BLHNC"]], specs)


@contextmanager
def _without_request(module: ModuleType) -> Iterator[None]:
    """Let a module of vLLM see no ``VLLM_KV_CACHE_LAYOUT`` for a moment."""
    envs = module.envs
    vars(module)["envs"] = SimpleNamespace(VLLM_KV_CACHE_LAYOUT=None)
    try:
        yield
    finally:
        vars(module)["envs"] = envs


class _Silence:
    """Stands in for a logger of vLLM; its ``*_once`` methods remember nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


@contextmanager
def quiet(*modules: ModuleType) -> Iterator[None]:
    """Keep vLLM's planner from logging trial runs, and from counting ``*_once`` lines.

    Parameters
    ----------
    *modules : module
        By default the planner's.
    """
    chosen = modules or tuple({planning_module(), importlib.import_module(_UTILS)})
    loggers = [(module, module.logger) for module in chosen]
    try:
        for module, _ in loggers:
            vars(module)["logger"] = _Silence()
        yield
    finally:
        for module, logger in loggers:
            vars(module)["logger"] = logger


def _builder(config: Any) -> Any:
    return importlib.import_module(_BUILDER).get_kv_cache_config_builder(config)


def _planner_is_known() -> bool:
    module = planning_module()
    functions = (
        "_project_kv_cache_groups_to_worker",
        "_max_memory_usage_bytes_from_groups",
        "unify_kv_cache_spec_page_size",
        "create_kv_cache_group_specs",
        "validate_kv_cache_layout",
    )
    entry = hasattr(module, "get_global_kv_cache_groups") or hasattr(module, "get_kv_cache_groups")
    parameters = inspect.signature(module._max_memory_usage_bytes_from_groups).parameters
    return (
        entry
        and all(callable(getattr(module, name)) for name in functions)
        and list(parameters)[-2:] == ["vllm_config", "kv_cache_groups"]
    )


def _sizes_are_known() -> bool:
    module = planning_module()
    if hasattr(module, "_pool_bytes_per_block_from_builder"):
        per_block = importlib.import_module(_BUILDER).get_kv_cache_config_builder
    else:
        per_block = module._pool_bytes_per_block
    return callable(per_block) and callable(importlib.import_module(_UTILS).get_kv_cache_capacity)


def _executor_hooks() -> bool:
    executor = executor_class()
    return all(
        list(inspect.signature(getattr(executor, name)).parameters) == ["self"]
        for name in ("get_kv_cache_specs", "get_supported_kv_cache_layouts")
    )


def _resolution_is_known() -> bool:
    module = importlib.import_module(_LAYOUTS)
    parameters = list(inspect.signature(module.resolve_kv_cache_layout).parameters)
    return (
        parameters == ["vllm_config", "supported_layouts", "kv_cache_specs"]
        and _resolve_probe_layout() is not None
    )


PROBES: tuple[Probe, ...] = (
    Probe("the KV-cache planner", "comparing layouts before one is chosen", _planner_is_known),
    Probe("the planner's sizes", "comparing bytes and capacity", _sizes_are_known),
    Probe(
        "get_kv_connector_cache_layout",
        "leaving the layout to a KV connector that asks for one",
        lambda: callable(importlib.import_module(_LAYOUTS).get_kv_connector_cache_layout),
    ),
    Probe("Executor", "choosing specs and layouts before vLLM does", _executor_hooks),
    Probe(
        "resolve_kv_cache_layout",
        "seeing whether vLLM prefers packed layouts by itself",
        _resolution_is_known,
    ),
)


def failed_probes() -> list[str]:
    """Check everything that planning and the preference build on, without changing anything.

    Returns
    -------
    list of str
        One line per failure; empty when all is as expected.
    """
    return probes.failed_probes(PROBES)


def unsupported(message: str) -> UnsupportedVllmError:
    """Return the error for a vLLM that fails the probes."""
    return UnsupportedVllmError(f"{message} (REPAGE_STRICT=1 makes this an error)")
