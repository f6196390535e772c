# SPDX-License-Identifier: Apache-2.0
"""What the plugin builds on in vLLM, checked before it changes anything.

Modules that cost time to import are looked at in source, because the plugin registers in every
process, also in those that never run a model.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from repage.vllm.compat import (
    attention_backend_module,
    kv_cache_interface,
    layout_by_name,
    multiple_of,
    registry,
)

_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
_FLASHINFER = "vllm.v1.attention.backends.flashinfer"
_MLA = "vllm.model_executor.layers.attention.mla_attention"


@dataclass(frozen=True)
class Probe:
    """One private fact about vLLM that the plugin builds on.

    Parameters
    ----------
    name : str
        The name in vLLM.
    reason : str
        What the plugin needs it for.
    holds : callable
        Takes nothing and returns whether the fact holds; an exception counts as no.
    """

    name: str
    reason: str
    holds: Callable[[], bool]


def failed_probes(probes: Iterable[Probe] | None = None) -> list[str]:
    """Check what the plugin builds on, without changing anything.

    Parameters
    ----------
    probes : iterable of Probe or None, default None
        None takes `PROBES`.

    Returns
    -------
    list of str
        One line per failure; empty when all is as expected.
    """
    failures = []
    for probe in PROBES if probes is None else probes:
        try:
            holds, cause = probe.holds(), ""
        except Exception as error:  # whatever vLLM became, the answer is no
            holds, cause = False, f" ({type(error).__name__}: {error})"
        if not holds:
            failures.append(f"{probe.name}, needed for {probe.reason}{cause}")
    return failures


def _has_fields(cls: Any, *names: str) -> bool:
    return set(names) <= {field.name for field in fields(cls)}


def _has_parameters(function: Any, *names: str) -> bool:
    """Whether the first parameters after self have these names."""
    return list(inspect.signature(function).parameters)[1 : len(names) + 1] == list(names)


def _source_mentions(module: str, *texts: str) -> bool:
    """Whether a module's source contains every text; does not run the module."""
    source = _source_of(module)
    return all(text in source for text in texts)


@cache
def _source_of(module: str) -> str:
    """Return a module's source without importing it or the packages around it, "" if missing."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _source_has(module: str, cls: str, methods: dict[str, tuple[str, ...]]) -> bool:
    """Whether a module's source defines a class with these methods; does not run the module."""
    found = _classes_in(_source_of(module)).get(cls)
    return found is not None and all(
        name in found and found[name][1 : len(parameters) + 1] == list(parameters)
        for name, parameters in methods.items()
    )


@cache
def _classes_in(source: str) -> dict[str, dict[str, list[str]]]:
    """Return the parameters of every class's methods; a source is parsed once for all probes."""
    return {
        node.name: {
            item.name: [argument.arg for argument in item.args.args]
            for item in node.body
            if isinstance(item, ast.FunctionDef)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _registry_takes_overrides() -> bool:
    module = registry()
    member = module.AttentionBackendEnum.CPU_ATTN
    return callable(module.register_backend) and isinstance(member.is_overridden(), bool)


def _spec_keeps_its_kind() -> bool:
    interface = kv_cache_interface()
    dtype = importlib.import_module("torch").bfloat16
    spec = interface.FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=dtype)
    small = spec.copy_with_new_block_size(32)
    return (
        type(small) is type(spec)
        and small.block_size == 32
        and spec.tokens_per_state == 1
        and spec.get_block_stride_alignment() == 1
        and spec.state_content_size_bytes == 256
        and spec.num_heads == 1
        and not spec.kv_quant_mode.is_nvfp4
        and _has_fields(interface.AttentionSpec, "block_size", "block_stride_alignment")
    )


def _layouts_are_permutations() -> bool:
    layout = layout_by_name("BLHNC")
    compact = layout_by_name("LBHNC")
    return (
        layout is not None
        and compact is not None
        and layout.is_block_outermost
        and not compact.is_block_outermost
        and tuple(layout.stride_order) == (1, 0, 2, 3, 4)
    )


def _groups_wrap_specs() -> bool:
    interface = kv_cache_interface()
    return (
        _has_fields(interface.UniformTypeKVCacheSpecs, "kv_cache_specs")
        and isinstance(interface.EncoderOnlyAttentionSpec, type)
        and isinstance(interface.ChunkedLocalAttentionSpec, type)
    )


def _backend_answers() -> bool:
    backend = attention_backend_module().AttentionBackend
    names = (
        "get_supported_kernel_block_sizes",
        "customize_spec",
        "supported_kv_cache_layouts",
        "get_builder_cls",
        "get_impl_cls",
    )
    return all(callable(getattr(backend, name)) for name in names) and multiple_of(32).base == 32


def _builder_methods() -> bool:
    builder = attention_backend_module().AttentionMetadataBuilder
    return (
        _has_parameters(builder.__init__, "kv_cache_spec", "layer_names", "vllm_config", "device")
        and _has_parameters(builder.build, "common_prefix_len", "common_attn_metadata")
        and _has_parameters(builder.update_block_table, "metadata", "blk_table", "slot_mapping")
        and _has_parameters(builder.update_draft_decode_metadata, "metadata")
    )


def _config_fields() -> bool:
    config = importlib.import_module("vllm.config")
    return (
        _has_fields(config.CacheConfig, "kv_cache_layout")
        and _has_fields(config.CompilationConfig, "static_forward_context")
        and callable(config.get_current_vllm_config_or_none)
    )


PROBES: tuple[Probe, ...] = (
    Probe(
        "AttentionBackendEnum, register_backend",
        "registering re-paged backends and seeing another plugin's",
        _registry_takes_overrides,
    ),
    Probe(
        "AttentionBackend",
        "answering block sizes, layouts and specs in its stead",
        _backend_answers,
    ),
    Probe(
        "AttentionMetadataBuilder",
        "rewriting block tables wherever metadata is built or updated",
        _builder_methods,
    ),
    Probe(
        "AttentionBackend.forward_includes_kv_cache_update",
        "refusing to write kernel pages where slots cannot be translated",
        lambda: isinstance(
            attention_backend_module().AttentionBackend.forward_includes_kv_cache_update, bool
        ),
    ),
    Probe(
        "AttentionImpl.get_impl_variants",
        "telling every impl of a layer how its cache is read",
        lambda: callable(attention_backend_module().AttentionImpl.get_impl_variants),
    ),
    Probe(
        "AttentionImpl.forward",
        "reading the cache as kernel pages",
        lambda: _has_parameters(
            attention_backend_module().AttentionImpl.forward,
            *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        ),
    ),
    Probe(
        "CommonAttentionMetadata",
        "handing builders another block table",
        lambda: (
            _has_fields(
                attention_backend_module().CommonAttentionMetadata,
                *("block_table_tensor", "seq_lens"),
            )
            and callable(attention_backend_module().CommonAttentionMetadata.replace)
        ),
    ),
    Probe("AttentionSpec", "giving builders a spec of page-sized blocks", _spec_keeps_its_kind),
    Probe("KVCacheLayout", "telling packed from layer-compact layouts", _layouts_are_permutations),
    Probe("UniformTypeKVCacheSpecs", "finding the layers of packed groups", _groups_wrap_specs),
    Probe("VllmConfig", "the resolved layout and the layers' caches", _config_fields),
    Probe(
        "envs.VLLM_KV_CACHE_LAYOUT",
        "knowing a packed run before specs are collected",
        lambda: (
            "VLLM_KV_CACHE_LAYOUT" in importlib.import_module("vllm.envs").environment_variables
        ),
    ),
    Probe(
        "CPUAttentionBackend",
        "re-paging CPU_ATTN",
        lambda: _source_has(_CPU_ATTN, "CPUAttentionBackend", {"supported_kv_cache_layouts": ()}),
    ),
    Probe(
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "writing through kernel pages on CPU",
        lambda: _source_has(
            _CPU_ATTN,
            "CPUAttentionBackendImpl",
            {"do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping")},
        ),
    ),
    Probe(
        "FlashInferMetadataBuilder",
        "building FlashInfer's page lists from manager blocks",
        lambda: (
            _source_has(
                _FLASHINFER,
                "FlashInferMetadataBuilder",
                {
                    "_compute_flashinfer_kv_metadata": (
                        *("num_blocks_np", "seq_lens_np", "block_table_tensor"),
                        *("num_reqs", "page_size"),
                    )
                },
            )
            and _source_mentions(
                _FLASHINFER,
                "_copy_page_indices_kernel[(num_reqs,)](",
                "self.flashinfer_trtllm_api_decode_kernel",
                "can_use_trtllm_attention",
            )
        ),
    ),
    Probe(
        "MLACommonImpl",
        "reading MLA caches as kernel pages",
        lambda: (
            _source_has(
                _MLA,
                "MLACommonImpl",
                {"forward_mqa": ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")},
            )
            and _source_has(
                _MLA,
                "MLACommonBaseImpl",
                {
                    "forward_mha": (
                        *("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata"),
                    )
                },
            )
        ),
    ),
    Probe(
        "CPUModelRunner._zero_block_ids",
        "zeroing new blocks of packed groups on CPU",
        lambda: _source_has(_CPU_RUNNER, "CPUModelRunner", {"_zero_block_ids": ("block_ids",)}),
    ),
)
