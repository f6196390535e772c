# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a tiny checkpoint: byte tokenizer, random weights, configuration."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 257
"""256 byte tokens and one end-of-sequence token."""

END_OF_SEQUENCE = VOCAB_SIZE - 1
MASK_TOKEN = VOCAB_SIZE - 2
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
MAX_POSITIONS = 8192
FAN_IN_GAIN = 1.5


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer with one token per byte and an end-of-sequence token into ``path``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<eos>"] = END_OF_SEQUENCE
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)


def random_matrix(name: str, shape: tuple[int, ...], seed: int, std: float) -> torch.Tensor:
    """Return normal values that depend on the parameter's name, not on its place in the model."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(shape, generator=generator) * std


def save_model(
    model_class: Any, config: Any, path: Path, *, embedding_std: float, final_norm: float = 1.0
) -> None:
    """Build a Transformers model, replace its matrices by random ones, save it as bfloat16."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # vectors keep the model's own initialisation, part of it random
        model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                parameter.mul_(final_norm)
            if parameter.dim() < 2:
                continue
            fan_in_std = FAN_IN_GAIN / math.sqrt(parameter.shape[-1])
            std = embedding_std if "embed" in name else fan_in_std
            parameter.copy_(random_matrix(name, tuple(parameter.shape), 0, std))
    model.to(torch.bfloat16).save_pretrained(path)


def drafter_layers(
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    first_input: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of dense Qwen3 layers."""
    weights: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers):
        fan_in = first_input if layer == 0 and first_input else HIDDEN_SIZE
        prefix = f"layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = (num_heads * head_dim, fan_in)
        weights[prefix + "self_attn.k_proj.weight"] = (num_kv_heads * head_dim, fan_in)
        weights[prefix + "self_attn.v_proj.weight"] = (num_kv_heads * head_dim, fan_in)
        weights[prefix + "self_attn.o_proj.weight"] = (HIDDEN_SIZE, num_heads * head_dim)
        weights[prefix + "self_attn.q_norm.weight"] = (head_dim,)
        weights[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        weights[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
        weights[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
        weights[prefix + "mlp.down_proj.weight"] = (HIDDEN_SIZE, INTERMEDIATE_SIZE)
        weights[prefix + "input_layernorm.weight"] = (HIDDEN_SIZE,)
        weights[prefix + "post_attention_layernorm.weight"] = (HIDDEN_SIZE,)
    return weights


def sliding_config(layer_types: tuple[str, ...], sliding_window: int) -> dict[str, Any]:
    """Return the configuration entries of layers with a window, nothing where none has one."""
    if all(kind == "full_attention" for kind in layer_types):
        return {}
    return {
        "layer_types": list(layer_types),
        "sliding_window": sliding_window,
        "use_sliding_window": True,
    }


def save_drafter(
    path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, config: dict[str, Any]
) -> None:
    """Write a drafter's weights (norms are ones) and its configuration."""
    import torch
    from safetensors.torch import save_file

    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else random_matrix(name, shape, seed, FAN_IN_GAIN / math.sqrt(shape[-1])).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    common = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": END_OF_SEQUENCE,
        "eos_token_id": END_OF_SEQUENCE,
    }
    (path / "config.json").write_text(json.dumps({**common, **config}, indent=1) + "\n")
