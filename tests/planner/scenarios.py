# SPDX-License-Identifier: Apache-2.0
"""Plans every scenario with the vLLM that this process imports, and prints one JSON object.

``python scenarios.py`` with the folder of all tests on PYTHONPATH; with another vLLM before it, it
is that one's planner that runs.
"""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from repage.cli.report import plan_as_json, result_as_json
from repage.planner import PlanRequest, model_preset, plan_request, prefers_packed_kv_cache
from repage.planner.decision import Decision
from repage.planner.layout_plan import plan_layout
from repage.planner.presets import model_names
from repage.planner.request import offline_config
from repage.planner.specs import ServingOptions, manager_block
from repage.vllm import compat
from repage.vllm.preference import planner_compat
from support.specs import attention, layers, state

HEADLINE = ServingOptions(ssm_dtype="bf16", spec_tokens=7)

# Published block sizes: model, drafter, options, tokens.
PUBLIC_BLOCKS: dict[str, tuple[str, ServingOptions, int]] = {
    "qwen3.6-35b bf16": ("qwen3.6-35b-a3b", replace(HEADLINE, block_size=128), 640),
    "qwen3.6-35b fp8": (
        "qwen3.6-35b-a3b",
        replace(HEADLINE, block_size=128, kv_dtype="fp8"),
        1280,
    ),
    "qwen3.5-397b tp8": (
        "qwen3.5-397b-a17b",
        ServingOptions(tensor_parallel=8, kv_dtype="fp8"),
        1056,
    ),
    "qwen3.5-397b tp1": ("qwen3.5-397b-a17b", ServingOptions(kv_dtype="fp8"), 4176),
    "qwen3.5-9b": ("qwen3.5-9b", ServingOptions(ssm_dtype="fp32"), 528),
    "qwen3-next": ("qwen3-next", ServingOptions(), 544),
    "nemotron-3-nano fp8 tp1": (
        "nemotron-3-nano",
        ServingOptions(kv_dtype="fp8", block_size=32),
        4192,
    ),
    "nemotron-3-nano fp8 tp4": (
        "nemotron-3-nano",
        ServingOptions(kv_dtype="fp8", block_size=32, tensor_parallel=4),
        2112,
    ),
    "nemotron-3.5-lightning": ("nemotron-3.5-lightning", ServingOptions(), 2096),
    "granite-4.0-h": ("granite-4.0-h-small", ServingOptions(), 528),
    "kimi-k3 tp8": ("kimi-k3", ServingOptions(tensor_parallel=8), 768),
    "kimi-k3 tp4": ("kimi-k3", ServingOptions(tensor_parallel=4), 1536),
    "glm-5.3-flash tp2": ("glm-5.3-flash", ServingOptions(tensor_parallel=2), 2176),
    "qwen3.8-27b spec7": ("qwen3.8-27b", HEADLINE, 448),
    "qwen3.8-27b spec15": ("qwen3.8-27b", replace(HEADLINE, spec_tokens=15), 480),
    "qwen3.8-27b int8": ("qwen3.8-27b", replace(HEADLINE, kv_dtype="int8-per-token-head"), 864),
    "qwen3.6-27b fp8": (
        "qwen3.6-27b",
        ServingOptions(kv_dtype="fp8", ssm_dtype="fp32", spec_tokens=3),
        1600,
    ),
    "qwen3.6-27b nvfp4": (
        "qwen3.6-27b",
        ServingOptions(kv_dtype="nvfp4", ssm_dtype="fp32", spec_tokens=3),
        2848,
    ),
}


def decide(ranks: list[dict[str, Any]], length: int) -> tuple[Decision, dict[str, Any]]:
    config = offline_config(length, 8192)
    stock = plan_layout(config, ranks, "LBHNC")
    packed = plan_layout(config, ranks, "BLHNC")
    decision = prefers_packed_kv_cache(stock, [packed])
    return decision, {
        "verdict": decision.verdict,
        "layout": decision.layout,
        "reasons": list(decision.reasons),
        "layouts": {plan.layout: plan_as_json(plan) for plan in (stock, packed)},
    }


def gemma_like() -> dict[str, Any]:
    """25 sliding-window layers of 16 KiB a token, five full ones of 8 KiB, 64-token blocks."""
    specs = layers(
        full=(attention(4, 512, block=64), 5), window=(attention(16, 256, 1024, block=64), 25)
    )
    return decide([specs], 65_536)[1]


def balanced_buckets() -> dict[str, Any]:
    """As many full layers in the drafter as in the target, with larger pages, next to states."""
    target, drafter = attention(1, 128), attention(4, 64)
    states = state(int(target.page_size_bytes))
    specs = layers(state=(states, 6), full=(target, 2), draft=(drafter, 2))
    return decide([specs], 2048)[1]


def pipeline() -> dict[str, Any]:
    """A stage of recurrent layers only, and one with attention and a drafter."""
    target = attention(2, 256)
    states = state(int(target.page_size_bytes))
    first = layers(state=(states, 30))
    second = layers(full=(target, 10), draft=(attention(8, 128), 1))
    return decide([first, second], 262_144)[1]


def leaves_no_trace() -> dict[str, bool]:
    """Whether planning leaves config, specs and vLLM's log alone."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect()
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(handler)
    specs = layers(
        full=(attention(8, 128, block=16), 13), window=(attention(8, 128, 128, block=16), 12)
    )
    before_specs = copy.deepcopy(specs)
    config = offline_config(4096, 8192)
    before = copy.deepcopy(config)
    plan_layout(config, [specs], "LBHNC")
    plan_layout(config, [specs], "BLHNC")
    vllm_logger.removeHandler(handler)
    same = all(
        vars(getattr(config, name)) == vars(getattr(before, name))
        for name in ("cache_config", "model_config", "scheduler_config", "parallel_config")
    )
    return {"config": same, "specs": specs == before_specs, "log": not lines}


def own_preference() -> dict[str, bool]:
    """The probe on this vLLM, and on one that moves packed layouts first."""
    found = planner_compat.has_own_preference()
    module = __import__("importlib").import_module("vllm.v1.attention.backends.utils")
    original = module.resolve_kv_cache_layout
    packed = compat.layout_by_name("BLHNC")
    module.resolve_kv_cache_layout = lambda *_: packed
    preferring = planner_compat.has_own_preference()
    module.resolve_kv_cache_layout = original
    return {"this": found, "preferring": preferring}


def aligned_by_vllm(name: str, options: ServingOptions) -> int:
    """vLLM's own `_align_hybrid_block_size` on a preset."""
    from vllm.platforms.interface import Platform

    from repage.planner.specs import _attention_spec, _layer_rules, _state_spec

    preset = model_preset(name)
    first = preset.attention[0]
    rules = _layer_rules(first, options, options.kv_dtype)
    spec = _attention_spec(first, options, options.kv_dtype, 1)
    shapes = _state_spec(preset, options, 1, None)
    sizes = [*rules.page_sizes]
    if rules.multiple_of is not None:
        sizes.append(compat.multiple_of(rules.multiple_of))

    class Backend:
        get_supported_kernel_block_sizes = staticmethod(lambda: sizes)
        customize_spec = staticmethod(lambda _spec: spec)

    class Model:
        get_mamba_state_shape_from_config = staticmethod(lambda _config: shapes.shapes)
        get_mamba_state_dtype_from_config = staticmethod(lambda _config: shapes.dtypes)

    class CpuLess(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, _config: Any) -> list[Any]:
            return [Backend]

    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            block_size=options.block_size or 16,
            mamba_cache_mode="none",
            kv_cache_dtype_skip_layers=None,
            mamba_page_size_padded=None,
        ),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            architecture="x",
            get_num_kv_heads=lambda _parallel: spec.num_kv_heads,
            get_head_size=lambda: spec.head_size,
        ),
        parallel_config=None,
        compilation_config=SimpleNamespace(),
    )
    models = __import__("importlib").import_module("vllm.model_executor.models")
    settings = __import__("importlib").import_module("vllm.config.vllm")
    registry, current = models.ModelRegistry, settings.set_current_vllm_config
    models.ModelRegistry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (Model, ""))
    settings.set_current_vllm_config = lambda _config: __import__("contextlib").nullcontext()
    try:
        CpuLess._align_hybrid_block_size(config, Backend)
    finally:
        models.ModelRegistry, settings.set_current_vllm_config = registry, current
    return int(config.cache_config.block_size)


def main() -> None:
    def plan(model: str, drafter: str | None = None, **fields: Any) -> dict[str, Any]:
        options = fields.pop("options", ServingOptions())
        return result_as_json(plan_request(PlanRequest(model, drafter, options, **fields)))

    memory = 178 << 30
    mimo = ServingOptions(tensor_parallel=2, block_size=64)
    nano = ServingOptions(architecture="sm90")
    results = {
        "version": compat.vllm_version(),
        "probes": planner_compat.failed_probes(),
        "headline": plan(
            "qwen3.6-35b-a3b",
            "dflash",
            options=HEADLINE,
            memory=memory,
            min_group_layers=(3, 5),
        ),
        "headline fp8": plan(
            "qwen3.6-35b-a3b", "dflash", options=replace(HEADLINE, kv_dtype="fp8"), memory=memory
        ),
        "mimo": plan("mimo-v2.5", "dflash", options=mimo, memory=memory),
        "mimo long": plan("mimo-v2.5", "dflash", options=mimo, max_model_len=262_144),
        "gpt-oss-20b": plan("gpt-oss-20b", "eagle3"),
        "uniform": plan("qwen3.6-35b-a3b"),
        "nano": plan("nemotron-3-nano", "eagle3", options=nano),
        "fa4": plan("qwen3.6-35b-a3b", "dflash", options=replace(HEADLINE, backend="FLASH_ATTN")),
        "gemma-like": gemma_like(),
        "balanced": balanced_buckets(),
        "pipeline": pipeline(),
        "trace": leaves_no_trace(),
        "own preference": own_preference(),
        "blocks": {
            label: manager_block(model_preset(name), None, options)
            for label, (name, options, _) in PUBLIC_BLOCKS.items()
        },
        "vLLM's blocks": {
            label: aligned_by_vllm(name, options)
            for label, (name, options, _) in PUBLIC_BLOCKS.items()
            if not model_preset(name).attention[0].is_latent
        },
        "every model": {name: plan(name)["verdict"] for name in model_names()},
    }
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
