# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints that vLLM loads like any other model, made on the fly.

Every builder is a frozen dataclass: its fields are the model's shape, ``build(path)`` writes
``config.json``, weights and (for target models) a byte tokenizer. `materialize` builds one once
into a cache folder; the folder's name contains a digest of the fields and of the generator, so a
changed generator never meets an old checkpoint.

The weights are random with a fan-in scale: at a hidden size of 64 the usual standard deviation of
0.02 makes attention nearly a no-op, and a wrong KV cache would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from repage.demo import checkpoint_files
from repage.demo.checkpoint_files import (
    END_OF_SEQUENCE,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MASK_TOKEN,
    MAX_POSITIONS,
    VOCAB_SIZE,
    drafter_layers,
    save_drafter,
    save_model,
    sliding_config,
    write_byte_tokenizer,
)

TAPPED_TARGET_LAYERS = (1, 4, 6)
"""Target layers whose hidden states the drafters read."""


class Checkpoint(Protocol):
    """Something `materialize` can build: a name, a shape, and a way to write it."""

    @property
    def name(self) -> str:
        """Short name, the first part of the cache folder's name."""

    def build(self, path: Path) -> None:
        """Write the checkpoint into the existing, empty folder ``path``."""


@dataclass(frozen=True)
class GemmaCheckpoint:
    """A Gemma-4-like target: sliding-window and full-attention layers of different head widths.

    Attributes
    ----------
    num_layers : int
        Layers in the pattern sliding, sliding, full.
    num_heads, num_kv_heads, num_global_kv_heads : int
        Query heads, KV heads of the sliding layers, and of the full layers where
        ``attention_k_eq_v`` applies (it does not here, so full layers use ``num_kv_heads``).
    head_dim, global_head_dim : int
        Elements of one head, in the sliding and in the full layers.
    sliding_window : int
        Tokens.
    """

    name: str = "gemma4"
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    num_global_kv_heads: int = 1
    head_dim: int = 64
    global_head_dim: int = 128
    sliding_window: int = 128

    def build(self, path: Path) -> None:
        """Write configuration, weights and tokenizer into ``path``."""
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        write_byte_tokenizer(path)
        config = Gemma4TextConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            num_global_key_value_heads=self.num_global_kv_heads,
            head_dim=self.head_dim,
            global_head_dim=self.global_head_dim,
            layer_types=[
                "full_attention" if layer % 3 == 2 else "sliding_attention"
                for layer in range(self.num_layers)
            ],
            sliding_window=self.sliding_window,
            max_position_embeddings=MAX_POSITIONS,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            attention_k_eq_v=False,
            use_double_wide_mlp=False,
            eos_token_id=END_OF_SEQUENCE,
            bos_token_id=END_OF_SEQUENCE,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
        # With unit-variance tied embeddings this architecture repeats its input and nothing else;
        # with small ones the logits are nearly equal and rounding picks the token, unless the last
        # norm spreads them.
        save_model(Gemma4ForCausalLM, config, path, embedding_std=0.02, final_norm=10.0)


@dataclass(frozen=True)
class HybridCheckpoint:
    """A Qwen3-Next-like target: gated delta net layers, every fourth layer full attention.

    The manager block follows from the recurrent state (float32) and the attention bytes of one
    token: with one KV head of 128 (512 bytes), 2 key and 4 value heads give 640 tokens, 3 and 9
    give 1280.

    Attributes
    ----------
    num_layers, full_attention_interval : int
        Layers, and every how many of them one is full attention.
    num_kv_heads, head_dim : int
        Of the full-attention layers; query heads are twice the KV heads.
    linear_key_heads, linear_value_heads, linear_head_dim : int
        Shape of the gated delta net.
    """

    name: str = "hybrid"
    num_layers: int = 8
    full_attention_interval: int = 4
    num_kv_heads: int = 1
    head_dim: int = 128
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 128

    def build(self, path: Path) -> None:
        """Write configuration, weights and tokenizer into ``path``."""
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        write_byte_tokenizer(path)
        config = Qwen3NextConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            num_hidden_layers=self.num_layers,
            full_attention_interval=self.full_attention_interval,
            num_attention_heads=2 * self.num_kv_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            partial_rotary_factor=0.25,
            linear_num_key_heads=self.linear_key_heads,
            linear_num_value_heads=self.linear_value_heads,
            linear_key_head_dim=self.linear_head_dim,
            linear_value_head_dim=self.linear_head_dim,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            max_position_embeddings=MAX_POSITIONS,
            eos_token_id=END_OF_SEQUENCE,
            bos_token_id=END_OF_SEQUENCE,
        )
        save_model(Qwen3NextForCausalLM, config, path, embedding_std=1.0)


@dataclass(frozen=True)
class DFlashCheckpoint:
    """A DFlash drafter: dense Qwen3 layers that draft all tokens at once.

    Attributes
    ----------
    layer_types : tuple of str
        ``"sliding_attention"`` or ``"full_attention"``, one per layer.
    num_heads, num_kv_heads, head_dim : int
        4 KV heads of 64 are 1024 bytes a token in bfloat16, twice the hybrid target's.
    sliding_window : int
        Tokens; used by the sliding layers only.
    """

    name: str = "dflash"
    layer_types: tuple[str, ...] = ("full_attention",)
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    sliding_window: int = 128

    def build(self, path: Path) -> None:
        """Write configuration and weights into ``path``; drafters share the target's tokenizer."""
        weights = drafter_layers(
            len(self.layer_types), self.num_heads, self.num_kv_heads, self.head_dim
        )
        weights["fc.weight"] = (HIDDEN_SIZE, HIDDEN_SIZE * len(TAPPED_TARGET_LAYERS))
        weights["hidden_norm.weight"] = (HIDDEN_SIZE,)
        weights["norm.weight"] = (HIDDEN_SIZE,)
        save_drafter(
            path,
            weights,
            seed=1,
            config={
                "architectures": ["DFlashDraftModel"],
                "num_hidden_layers": len(self.layer_types),
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "block_size": 16,
                "dflash_config": {
                    "mask_token_id": MASK_TOKEN,
                    "target_layer_ids": list(TAPPED_TARGET_LAYERS),
                },
                **sliding_config(self.layer_types, self.sliding_window),
            },
        )


@dataclass(frozen=True)
class Eagle3Checkpoint:
    """An EAGLE-3 drafter of one layer; it drafts token after token.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim : int
        As in `DFlashCheckpoint`.
    """

    name: str = "eagle3"
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64

    def build(self, path: Path) -> None:
        """Write configuration and weights into ``path``; drafters share the target's tokenizer."""
        # The first layer reads the token's embedding next to the target's hidden state.
        weights = drafter_layers(
            1, self.num_heads, self.num_kv_heads, self.head_dim, first_input=2 * HIDDEN_SIZE
        )
        weights["layers.0.hidden_norm.weight"] = (HIDDEN_SIZE,)
        weights["fc.weight"] = (HIDDEN_SIZE, HIDDEN_SIZE * len(TAPPED_TARGET_LAYERS))
        weights["norm.weight"] = (HIDDEN_SIZE,)
        weights["lm_head.weight"] = (VOCAB_SIZE, HIDDEN_SIZE)
        save_drafter(
            path,
            weights,
            seed=2,
            config={
                "architectures": ["Eagle3Qwen3ForCausalLM"],
                "num_hidden_layers": 1,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "draft_vocab_size": VOCAB_SIZE,
                "eagle_aux_hidden_state_layer_ids": list(TAPPED_TARGET_LAYERS),
            },
        )


def default_cache_dir() -> Path:
    """Return the folder of built checkpoints: ``$XDG_CACHE_HOME`` or ``~/.cache``, ``/repage``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "repage"


def materialize(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path:
    """Return the folder of a built checkpoint, building it first where it is missing.

    Parameters
    ----------
    checkpoint : Checkpoint
        One of the dataclasses of this module.
    cache_dir : Path, optional
        Where checkpoints are kept; default `default_cache_dir`.

    Returns
    -------
    Path
        A complete checkpoint. It appears under its name in one step (a rename), so a reader, or a
        second builder at the same time, never sees half of one.
    """
    folder = (cache_dir or default_cache_dir()) / "checkpoints"
    target = folder / f"{checkpoint.name}-{content_version(checkpoint)}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}-", dir=folder))
    try:
        checkpoint.build(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def content_version(checkpoint: Checkpoint) -> str:
    """Return 12 hexadecimal digits that change with the fields and with the generator."""
    fields = json.dumps(asdict(checkpoint), sort_keys=True)  # type: ignore[call-overload]
    digest = hashlib.sha256()
    for source in (__file__, checkpoint_files.__file__):
        digest.update(Path(source).read_bytes())
    digest.update(f"{type(checkpoint).__name__}:{fields}".encode())
    return digest.hexdigest()[:12]
