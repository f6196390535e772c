# SPDX-License-Identifier: Apache-2.0
"""Real spec objects of vLLM for a preset, and the manager block by vLLM's rule."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from repage.errors import ArgumentError
from repage.planner.backends import BackendRules, backend_for_layer, backend_rules
from repage.planner.presets import AttentionLayers, Preset
from repage.vllm import compat
from repage.vllm.policy import page_unit_bytes
from repage.vllm.preference import planner_compat

KV_DTYPES = ("bf16", "fp16", "fp32", "fp8", "int8-per-token-head", "nvfp4")
STATE_DTYPES = ("auto", "bf16", "fp16", "fp32")

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8-per-token-head": 1}
_DEFAULT_BLOCK = 16  # CacheConfig.DEFAULT_BLOCK_SIZE, 0.32.0 and 0.33.0
_MLA_HYBRID_ALIGNMENT = 128  # platforms/interface.py, _align_hybrid_block_size


@dataclass(frozen=True)
class ServingOptions:
    """How a model is served, as far as its cache depends on it.

    Parameters
    ----------
    tensor_parallel : int, default 1
        Ranks that share the KV heads.
    kv_dtype, drafter_kv_dtype : str
        Of `KV_DTYPES`.
    ssm_dtype : str, default "auto"
        Of `STATE_DTYPES`.
    spec_tokens : int, default 0
        Drafted tokens per step.
    backend : str, default "FLASHINFER"
        Attention backend.
    architecture : str, default "sm100"
        Of `repage.planner.backends.ARCHITECTURES`.
    block_size : int or None, default None
        ``--block-size``; None lets the backend choose.
    mamba_cache_mode : str, default "none"
        ``"align"`` with prefix caching.
    """

    tensor_parallel: int = 1
    kv_dtype: str = "bf16"
    drafter_kv_dtype: str = "bf16"
    ssm_dtype: str = "auto"
    spec_tokens: int = 0
    backend: str = "FLASHINFER"
    architecture: str = "sm100"
    block_size: int | None = None
    mamba_cache_mode: str = "none"


@dataclass(frozen=True)
class ModelSpecs:
    """Specs of a target and its drafter, each layer with its backend.

    Parameters
    ----------
    specs : mapping of str to vllm.v1.kv_cache_interface.KVCacheSpec
        By layer name.
    rules : mapping of str to BackendRules
        Of the attention layers.
    manager_block : int
        Tokens in a block of the target's attention (N).
    """

    specs: Mapping[str, Any]
    rules: Mapping[str, BackendRules]
    manager_block: int


def build_specs(
    target: Preset, drafter: Preset | None, options: ServingOptions, layout: str
) -> ModelSpecs:
    """Build the specs that vLLM's workers would return for a layout.

    Parameters
    ----------
    target : Preset
        The served model.
    drafter : Preset or None
        Its drafter.
    options : ServingOptions
        How both are served.
    layout : str
        Decides what re-paged backends answer: their blocks stay whole on packed layouts.

    Returns
    -------
    ModelSpecs

    Raises
    ------
    ArgumentError
        When heads or states cannot be shared by so many ranks, or a dtype is unknown.
    """
    builder = _SpecBuilder(target, drafter, options, layout)
    return builder.build()


def manager_block(target: Preset, drafter: Preset | None, options: ServingOptions) -> int:
    """Return the tokens of a manager block, by vLLM's rule.

    Parameters
    ----------
    target : Preset
        Its first attention layers and its recurrent states decide.
    drafter : Preset or None
        Decides only through the block size of its published setup.
    options : ServingOptions
        Dtypes, backend, ranks and drafted tokens.

    Returns
    -------
    int

    Notes
    -----
    ``platforms/interface.py``, `update_block_size_for_backend` and `_align_hybrid_block_size`
    (0.32.0 and 0.33.0): the smallest multiple of the kernel's smallest block, or of
    ``--block-size`` where that is larger, whose page holds a recurrent state.
    """
    layers = target.attention[0]
    rules = _layer_rules(layers, options, options.kv_dtype)
    published = None if drafter is None else drafter.block_size
    block = options.block_size or published or target.block_size
    if block is None:
        block = max(_DEFAULT_BLOCK, rules.min_block)
    if target.state is None:
        return block
    alignment = max(rules.min_block, block)
    if layers.is_latent:
        alignment = max(alignment, _MLA_HYBRID_ALIGNMENT)
    token = _token_bytes(layers, options, options.kv_dtype)
    state = int(_state_spec(target, options, block=1, padded=None).page_size_bytes)
    tokens = alignment * math.ceil(state / (alignment * token))
    return rules.min_block * math.ceil(tokens / rules.min_block)


class _SpecBuilder:
    def __init__(
        self, target: Preset, drafter: Preset | None, options: ServingOptions, layout: str
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.layout: Any = compat.layout_by_name(layout)
        self.block = manager_block(target, drafter, options)
        self.specs: dict[str, Any] = {}
        self.rules: dict[str, BackendRules] = {}

    def build(self) -> ModelSpecs:
        if self.target.state is not None:
            token = _token_bytes(self.target.attention[0], self.options, self.options.kv_dtype)
            spec = _state_spec(self.target, self.options, self.block, padded=self.block * token)
            kind = self.target.state["kind"]
            for index in range(self.target.state["layers"]):
                self.specs[f"{kind}.{index}"] = spec
        for layers in self.target.attention:
            self._add("", layers, self.options.kv_dtype)
        for layers in () if self.drafter is None else self.drafter.attention:
            own = self._full_attention() if layers.as_target else layers
            dtype = self.options.kv_dtype if layers.as_target else self.options.drafter_kv_dtype
            self._add("draft.", own, dtype)
        return ModelSpecs(self.specs, self.rules, self.block)

    def _full_attention(self) -> AttentionLayers:
        source = next(layers for layers in self.target.attention if layers.window is None)
        values = {**vars(source), "layers": 1}
        return AttentionLayers(**values)

    def _add(self, prefix: str, layers: AttentionLayers, dtype: str) -> None:
        rules = _layer_rules(layers, self.options, dtype)
        block = layers.block or self.block
        if layers.window is not None and layers.block is None:
            block = rules.window_block(block, packed=self.layout.is_block_outermost)
        spec = self._with_alignment(_attention_spec(layers, self.options, dtype, block), rules)
        label = layers.label or ("latent" if layers.is_latent else "attn")
        kind = f"window{layers.window}" if layers.window else label
        if layers.tokens_per_state > 1:
            kind += f"_c{layers.tokens_per_state}"
        for index in range(layers.layers):
            name = f"{prefix}{kind}.{index}"
            self.specs[name] = spec
            self.rules[name] = rules

    def _with_alignment(self, spec: Any, rules: BackendRules) -> Any:
        """Ask for a block stride that kernel pages tile, as re-paged backends do."""
        page = rules.page_for(spec.block_size)
        if not self.layout.is_block_outermost or page in (None, spec.block_size):
            return spec
        if spec.tokens_per_state != 1:
            return spec
        unit = page_unit_bytes(spec, self.layout, page)
        return replace(spec, block_stride_alignment=unit)


def _layer_rules(layers: AttentionLayers, options: ServingOptions, dtype: str) -> BackendRules:
    name = backend_for_layer(options.backend, options.architecture, latent=layers.is_latent)
    return backend_rules(name, options.architecture, head_dim=layers.head_dim, fp8=dtype == "fp8")


def _local_heads(layers: AttentionLayers, options: ServingOptions) -> int:
    if layers.is_latent:
        return 1
    ranks = options.tensor_parallel
    if layers.kv_heads >= ranks and layers.kv_heads % ranks:
        raise ArgumentError(
            f"tensor_parallel: {layers.kv_heads} KV heads cannot be shared by {ranks} ranks"
        )
    return max(1, layers.kv_heads // ranks)


def _head_bytes(layers: AttentionLayers, dtype: str) -> int:
    """Return the bytes of K and V, or of the latent vector, of one token and head."""
    if layers.bytes_per_state is not None:
        if layers.fixed or dtype in ("bf16", "fp16"):
            return layers.bytes_per_state
        return layers.bytes_per_state * _element_bytes(dtype) // 2
    elements = layers.head_dim + layers.head_dim_v
    if dtype == "nvfp4":  # four bits and an FP8 scale for every 16 elements
        return elements // 2 + elements // 16
    scales = 8 if dtype == "int8-per-token-head" else 0  # two fp32
    return elements * _element_bytes(dtype) + scales


def _element_bytes(dtype: str) -> int:
    if dtype not in _ELEMENT_BYTES:
        known = ", ".join(KV_DTYPES)
        raise ArgumentError(f"kv_dtype: expected {known} (nvfp4 not for MLA), got {dtype!r}")
    return _ELEMENT_BYTES[dtype]


def _token_bytes(layers: AttentionLayers, options: ServingOptions, dtype: str) -> int:
    return _local_heads(layers, options) * _head_bytes(layers, dtype) // layers.tokens_per_state


def _torch_dtype(dtype: str) -> Any:
    torch = importlib.import_module("torch")
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return getattr(torch, names.get(dtype, "uint8"))


def _attention_spec(
    layers: AttentionLayers, options: ServingOptions, dtype: str, block: int
) -> Any:
    interface = compat.kv_cache_interface()
    values: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": _local_heads(layers, options),
        "head_size": layers.head_dim or _head_bytes(layers, dtype),
        "dtype": _torch_dtype(dtype),
        "state_content_bytes": _head_bytes(layers, dtype),
    }
    if layers.tokens_per_state != 1:
        values["tokens_per_state"] = layers.tokens_per_state
    if layers.is_latent:
        values["alignment"] = layers.alignment
        if layers.window is None:
            return interface.MLAAttentionSpec(**values)
        return interface.SlidingWindowMLASpec(sliding_window=layers.window, **values)
    values["head_size_v"] = layers.head_dim_v
    if layers.window is None:
        return interface.FullAttentionSpec(**values)
    return interface.SlidingWindowSpec(sliding_window=layers.window, **values)


def _state_spec(target: Preset, options: ServingOptions, block: int, padded: int | None) -> Any:
    state = target.state
    if state is None:
        raise ArgumentError(f"model: {target.name} keeps no recurrent state")
    shapes = _state_shapes(state, options)
    name = target.ssm_dtype if options.ssm_dtype == "auto" else options.ssm_dtype
    recurrent, conv = _torch_dtype(name), _torch_dtype("bf16")
    kind = state["kind"]
    dtypes = {"linear": (recurrent,), "short_conv": (conv,)}.get(kind, (conv, recurrent))
    return compat.kv_cache_interface().MambaSpec(
        block_size=block,
        shapes=tuple(tuple(shape) for shape in shapes),
        dtypes=dtypes,
        page_size_padded=padded,
        mamba_cache_mode=options.mamba_cache_mode,
        num_speculative_blocks=options.spec_tokens,
    )


def _state_shapes(state: Mapping[str, Any], options: ServingOptions) -> Any:
    """Return vLLM's state shapes on one rank."""
    shapes = planner_compat.state_shapes()
    ranks, spec, kind = options.tensor_parallel, options.spec_tokens, state["kind"]
    try:
        if kind == "gdn":
            heads = (state["k_heads"], state["v_heads"], state["k_dim"], state["v_dim"])
            return shapes.gated_delta_net_state_shape(ranks, *heads, state["conv_kernel"], spec)
        if kind == "mamba2":
            return shapes.mamba2_state_shape(
                tp_world_size=ranks,
                intermediate_size=state["intermediate"],
                n_groups=state["groups"],
                num_heads=state["heads"],
                head_dim=state["head_dim"],
                state_size=state["state"],
                conv_kernel=state["conv_kernel"],
                num_spec=spec,
            )
        if kind == "kda":
            return shapes.kda_state_shape(
                ranks,
                state["heads"],
                state["head_dim"],
                conv_kernel_size=state["conv_kernel"],
                num_spec=spec,
            )
        if kind == "mamba1":
            return shapes.mamba1_state_shape(
                ranks, state["intermediate"], state["state"], state["conv_kernel"]
            )
        if kind == "short_conv":
            return shapes.short_conv_state_shape(
                ranks, state["intermediate"], state["conv_kernel"], spec
            )
        return shapes.linear_attention_state_shape(state["heads"], ranks, state["head_dim"])
    except AssertionError as error:
        raise ArgumentError(
            f"tensor_parallel: the states of {kind} layers cannot be shared by {ranks} ranks "
            f"({error})"
        ) from error
