# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V2-like model on vLLM's own CPU_MLA backend, stock or re-paged.

``python -m reference_kernels.mla_engine --layout BLHNC --block 64 --repaged --out result.json``

CPU_MLA is vLLM's real kernel: pages of exactly 16 tokens, which the CPU platform makes the manager
block of every MLA model. Larger blocks, as hybrid models have them, are set here after it.
repage registers no CPU_MLA; what a run shows is `repage.vllm.mla.RepagedMLAImpl`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import repage
from repage import KernelPageRules
from repage.demo import checkpoint_files, checkpoints
from repage.vllm.factory import repage_backend
from repage.vllm.fixed_pages import FixedPagePolicy
from repage.vllm.kernel_rules import KernelPath
from repage.vllm.mla import RepagedMLAImpl
from repage.vllm.pages import kernel_pages
from repage.vllm.policy import PageChoice

__all__ = ["ENVIRONMENT", "MLACheckpoint"]

ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_BACKEND = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"
_KERNEL = KernelPath(
    KernelPageRules(
        name="CPU MLA",
        page_sizes=(16,),
        stride_alignment=1,
        base_alignment=1,
        max_stride_bytes=2**63 - 1,
    ),
    source="vllm/v1/attention/backends/mla/cpu_mla.py:68 (0.32.0 and 0.33.0)",
)


@dataclass(frozen=True)
class MLACheckpoint:
    """Three dense layers with the latent and rotary widths that the CPU kernel is built for."""

    name: str = "mla"
    num_layers: int = 3
    num_heads: int = 4

    def build(self, path: Path) -> None:
        """Write configuration, weights and tokenizer into ``path``."""
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        checkpoint_files.write_byte_tokenizer(path)
        config = DeepseekV2Config(
            vocab_size=checkpoint_files.VOCAB_SIZE,
            hidden_size=checkpoint_files.HIDDEN_SIZE,
            intermediate_size=checkpoint_files.INTERMEDIATE_SIZE,
            num_hidden_layers=self.num_layers,
            first_k_dense_replace=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            # No layer has experts, but transformers wants numbers.
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            max_position_embeddings=checkpoint_files.MAX_POSITIONS,
            eos_token_id=checkpoint_files.END_OF_SEQUENCE,
            bos_token_id=checkpoint_files.END_OF_SEQUENCE,
        )
        checkpoint_files.save_model(DeepseekV2ForCausalLM, config, path, embedding_std=1.0)


class WritingMLAImpl(RepagedMLAImpl):
    """CPU_MLA writes through a flattened cache, so the bytes of a page must be dense."""

    def do_kv_cache_update(
        self, latent: Tensor, rotary: Tensor, kv_cache: Tensor, slots: Tensor, *rest: Any
    ) -> None:
        """Write at the same tokens, in kernel pages."""
        if kv_cache.numel() and isinstance(self.repage_choice, PageChoice):
            pages = kernel_pages(kv_cache, self.repage_choice)
            kv_cache, slots = pages.view, repage.map_slots(slots, pages.plan)
        super().do_kv_cache_update(latent, rotary, kv_cache, slots, *rest)  # type: ignore[misc]


def _register() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = repage_backend(
        CPUMLABackend,
        FixedPagePolicy("CPU_MLA", _BACKEND, _KERNEL),
        module=__name__,
        impl_mixin=WritingMLAImpl,
    )
    globals()[backend.__name__] = backend
    register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.{backend.__name__}")


def _set_block(tokens: int) -> None:
    """Set the manager block where the CPU platform has just set 16."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.cache_config.block_size = tokens

    CpuPlatform.check_and_update_config = staticmethod(  # type: ignore[method-assign, assignment]
        check_and_update_config
    )


def main(arguments: Sequence[str]) -> None:
    """Run one engine; write its token ids, logprobs and pages."""
    parser = argparse.ArgumentParser(prog="python -m reference_kernels.mla_engine")
    parser.add_argument("--layout", required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--repaged", action="store_true")
    parser.add_argument("--fault", help="a fault of reference_kernels.faults")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.environ.update({**ENVIRONMENT, "VLLM_KV_CACHE_LAYOUT": options.layout})
    _set_block(options.block)
    if options.repaged:
        _register()
    if options.fault is not None:
        from reference_kernels.faults import FAULTS

        FAULTS[options.fault]()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoints.materialize(MLACheckpoint())),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=16,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )
    prompts = ["the cache page of block " * count for count in (2, 9, 17, 30)]
    sampling = SamplingParams(max_tokens=40, temperature=0.0, logprobs=1, ignore_eos=True)
    generations = [
        {
            "token_ids": list(found.outputs[0].token_ids),
            "logprob": found.outputs[0].cumulative_logprob,
        }
        for _ in range(2)
        for found in llm.generate(prompts, sampling, use_tqdm=False)
    ]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    choices = {getattr(layer.impl, "repage_choice", None) for layer in layers.values()}
    (choice,) = choices
    strides = sorted({layer.kv_cache.stride(0) for layer in layers.values()})
    options.out.write_text(
        json.dumps(
            {
                "generations": generations,
                "page": choice.page_tokens if isinstance(choice, PageChoice) else None,
                "block_strides": strides,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    # The registered class is looked up by the name of this module.
    importlib.import_module("reference_kernels.mla_engine").main(sys.argv[1:])
