# SPDX-License-Identifier: Apache-2.0
"""Every private name of vLLM that a probe looks at, and what another vLLM may have instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

Change = Callable[[pytest.MonkeyPatch], None]

_BACKEND = "vllm.v1.attention.backend"
_INTERFACE = "vllm.v1.kv_cache_interface"
_REGISTRY = "vllm.v1.attention.backends.registry"
_BACKENDS = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class ChangedName:
    """A name that is gone or different, and the probe that has to notice.

    Attributes
    ----------
    probe : str
        Name of the probe.
    what : str
        For the test's id.
    change : callable
        Makes the running vLLM such a one.
    """

    probe: str
    what: str
    change: Change


def gone(probe: str, owner: str, name: str) -> ChangedName:
    """The attribute `name` of a module or class is missing."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.delattr(f"{owner}.{name}")

    return ChangedName(probe, f"no {name}", change)


def renamed(probe: str, owner: str, name: str) -> ChangedName:
    """The method `name` takes other arguments."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(f"{owner}.{name}", lambda self, other: None)  # noqa: ARG005

    return ChangedName(probe, f"other arguments of {name}", change)


def returning(probe: str, owner: str, name: str, value: Any) -> ChangedName:
    """The attribute `name` has another value."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(f"{owner}.{name}", value)

    return ChangedName(probe, f"{name} is {value!r}", change)


def without_fields(probe: str, module: str, cls: str, *fields: str) -> ChangedName:
    """A dataclass has no such fields."""

    def change(patch: pytest.MonkeyPatch) -> None:
        known = getattr(importlib.import_module(module), cls).__dataclass_fields__
        for field in fields:
            patch.delitem(known, field)

    return ChangedName(probe, f"no {cls}.{', '.join(fields)}", change)


def source_without(probe: str, module: str, text: str, other: str = "renamed") -> ChangedName:
    """The source of a module, which is not imported, has another text."""

    def change(patch: pytest.MonkeyPatch) -> None:
        from repage.vllm import probes

        source_of = probes._source_of
        assert text in source_of(module)
        patch.setattr(
            probes,
            "_source_of",
            lambda name: (
                source_of(name).replace(text, other) if name == module else source_of(name)
            ),
        )

    return ChangedName(probe, f"no {text!r}", change)


def _other_order(patch: pytest.MonkeyPatch) -> None:
    from repage.vllm import probes

    changed = SimpleNamespace(is_block_outermost=True, stride_order=(1, 0, 3, 2, 4))
    known = probes.layout_by_name
    patch.setattr(
        probes, "layout_by_name", lambda name: changed if name == "BLHNC" else known(name)
    )


def _compressed(patch: pytest.MonkeyPatch) -> None:
    interface = importlib.import_module(_INTERFACE)
    known = interface.FullAttentionSpec
    patch.setattr(
        interface, "FullAttentionSpec", lambda **fields: known(**fields, tokens_per_state=4)
    )


def _no_layout(patch: pytest.MonkeyPatch) -> None:
    from repage.vllm import probes

    patch.setattr(probes, "layout_by_name", lambda _name: None)


def _no_variable(patch: pytest.MonkeyPatch) -> None:
    envs = importlib.import_module("vllm.envs")
    patch.delitem(envs.environment_variables, "VLLM_KV_CACHE_LAYOUT")


PLUGIN = (
    gone("AttentionBackendEnum, register_backend", _REGISTRY, "register_backend"),
    gone("AttentionBackendEnum, register_backend", _REGISTRY, "AttentionBackendEnum"),
    *(
        gone("AttentionBackend", f"{_BACKEND}.AttentionBackend", name)
        for name in (
            "get_supported_kernel_block_sizes",
            "customize_spec",
            "supported_kv_cache_layouts",
            "get_builder_cls",
            "get_impl_cls",
        )
    ),
    gone("AttentionBackend", _BACKEND, "MultipleOf"),
    *(
        renamed("AttentionMetadataBuilder", f"{_BACKEND}.AttentionMetadataBuilder", name)
        for name in ("__init__", "build", "update_block_table", "update_draft_decode_metadata")
    ),
    gone(
        "AttentionBackend.forward_includes_kv_cache_update",
        f"{_BACKEND}.AttentionBackend",
        "forward_includes_kv_cache_update",
    ),
    gone("AttentionImpl.get_impl_variants", f"{_BACKEND}.AttentionImplBase", "get_impl_variants"),
    gone("CommonAttentionMetadata", f"{_BACKEND}.CommonAttentionMetadata", "replace"),
    renamed("AttentionImpl.forward", f"{_BACKEND}.AttentionImpl", "forward"),
    without_fields(
        "CommonAttentionMetadata", _BACKEND, "CommonAttentionMetadata", "block_table_tensor"
    ),
    without_fields("CommonAttentionMetadata", _BACKEND, "CommonAttentionMetadata", "seq_lens"),
    gone("AttentionSpec", f"{_INTERFACE}.KVCacheSpec", "copy_with_new_block_size"),
    ChangedName("AttentionSpec", "compressed by default", _compressed),
    returning(
        "AttentionSpec", f"{_INTERFACE}.FullAttentionSpec", "get_block_stride_alignment", None
    ),
    returning("AttentionSpec", f"{_INTERFACE}.FullAttentionSpec", "state_content_size_bytes", 0),
    returning("AttentionSpec", f"{_INTERFACE}.FullAttentionSpec", "num_heads", 0),
    gone("AttentionSpec", _INTERFACE, "FullAttentionSpec"),
    ChangedName("KVCacheLayout", "no BLHNC", _no_layout),
    ChangedName("KVCacheLayout", "another order of BLHNC", _other_order),
    gone("UniformTypeKVCacheSpecs", _INTERFACE, "UniformTypeKVCacheSpecs"),
    gone("UniformTypeKVCacheSpecs", _INTERFACE, "EncoderOnlyAttentionSpec"),
    gone("UniformTypeKVCacheSpecs", _INTERFACE, "ChunkedLocalAttentionSpec"),
    gone("VllmConfig", "vllm.config", "get_current_vllm_config_or_none"),
    without_fields("VllmConfig", "vllm.config", "CacheConfig", "kv_cache_layout"),
    without_fields("VllmConfig", "vllm.config", "CompilationConfig", "static_forward_context"),
    ChangedName("envs.VLLM_KV_CACHE_LAYOUT", "no such variable", _no_variable),
    source_without(
        "CPUAttentionBackend", f"{_BACKENDS}.cpu_attn", "def supported_kv_cache_layouts"
    ),
    source_without(
        "CPUAttentionBackendImpl.do_kv_cache_update",
        f"{_BACKENDS}.cpu_attn",
        "def do_kv_cache_update",
        "def write_cache",
    ),
    *(
        source_without("FlashInferMetadataBuilder", f"{_BACKENDS}.flashinfer", text)
        for text in (
            "def _compute_flashinfer_kv_metadata",
            "_copy_page_indices_kernel[(num_reqs,)](",
            "self.flashinfer_trtllm_api_decode_kernel",
            "can_use_trtllm_attention",
        )
    ),
    *(
        source_without(
            "MLACommonImpl", "vllm.model_executor.layers.attention.mla_attention", f"def {name}"
        )
        for name in ("forward_mqa", "forward_mha")
    ),
    source_without(
        "CPUModelRunner._zero_block_ids",
        "vllm.v1.worker.cpu_model_runner",
        "def _zero_block_ids",
    ),
)


def planner_names() -> tuple[ChangedName, ...]:
    """Return the changes that the preference has to notice, for the running vLLM."""
    from repage.vllm.preference import planner_compat

    module = planner_compat.planning_module()
    entries = ("get_global_kv_cache_groups", "get_kv_cache_groups")
    present = [name for name in entries if hasattr(module, name)]

    def no_entry(patch: pytest.MonkeyPatch) -> None:
        for name in present:
            patch.delattr(module, name)

    def no_bytes(patch: pytest.MonkeyPatch) -> None:
        for name in ("_pool_bytes_per_block_from_builder", "_pool_bytes_per_block"):
            if hasattr(module, name):
                patch.delattr(module, name)

    executor = "vllm.v1.executor.abstract.Executor"
    utils = "vllm.v1.attention.backends.utils"
    return (
        *(
            gone("the KV-cache planner", module.__name__, name)
            for name in (
                "_project_kv_cache_groups_to_worker",
                "_max_memory_usage_bytes_from_groups",
                "unify_kv_cache_spec_page_size",
                "create_kv_cache_group_specs",
                "validate_kv_cache_layout",
            )
        ),
        ChangedName("the KV-cache planner", "no entry point", no_entry),
        renamed("the KV-cache planner", module.__name__, "_max_memory_usage_bytes_from_groups"),
        gone("the planner's sizes", "vllm.v1.core.kv_cache_utils", "get_kv_cache_capacity"),
        ChangedName("the planner's sizes", "no bytes per block", no_bytes),
        gone("get_kv_connector_cache_layout", utils, "get_kv_connector_cache_layout"),
        renamed("Executor", executor, "get_kv_cache_specs"),
        renamed("Executor", executor, "get_supported_kv_cache_layouts"),
        gone("Executor", executor, "get_kv_cache_specs"),
        gone("Executor", "vllm.v1.executor.abstract", "Executor"),
        renamed("resolve_kv_cache_layout", utils, "resolve_kv_cache_layout"),
        gone("resolve_kv_cache_layout", utils, "resolve_kv_cache_layout"),
    )
