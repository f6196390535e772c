"""The pages of the GPU families, by device, cache and group; no GPU, no kernel library."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import select_common_block_size

from reference_kernels.capability import CapabilityProxy
from repage import KernelPageRules
from repage.errors import RepagingRefusedError
from repage.vllm import compat
from repage.vllm.factory import repage_backend
from repage.vllm.fixed_pages import FixedPagePolicy
from repage.vllm.flashinfer import FlashInferPolicy
from repage.vllm.kernel_rules import (
    CUTLASS_MLA,
    FA4_FP8_HD512_SM90,
    FA4_HD256,
    FLASHINFER_MLA,
    TURBOQUANT,
)
from repage.vllm.policy import PageContext, choose_page, page_unit_bytes

SM80, SM90, SM100, SM103, SM120 = (8, 0), (9, 0), (10, 0), (10, 3), (12, 0)
BLHNC, BLNHC = KVCacheLayout.BLHNC, KVCacheLayout.BLNHC
TARGET, DRAFTER = "model.layers.3.self_attn.attn", "model.layers.48.self_attn.attn"
CPU = torch.device("cpu")


def full(block: int = 640, **fields: Any) -> FullAttentionSpec:
    values = {"num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16, **fields}
    return FullAttentionSpec(block_size=block, **values)


def model(
    heads: dict[str, tuple[int, int]],
    *,
    method: str | None = None,
    use_non_causal: bool = False,
) -> Any:
    """A config whose layers have these query and KV heads; the target has 48 layers."""
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(num_heads=query, num_kv_heads=kv))
        for name, (query, kv) in heads.items()
    }
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        attention_config=SimpleNamespace(use_non_causal=use_non_causal),
        speculative_config=None if method is None else SimpleNamespace(method=method),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=48)),
    )


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend to a compute capability and to a FlashInfer version."""

    def pretend(
        capability: tuple[int, int],
        *,
        version: tuple[int, int] = (0, 7),
        trtllm: bool = True,
    ) -> None:
        module = SimpleNamespace(
            current_platform=CapabilityProxy.of_current_platform(capability),
            can_use_trtllm_attention=lambda query, kv: trtllm and query % kv == 0,
        )
        monkeypatch.setattr(compat, "flashinfer_backend_module", lambda: module)
        monkeypatch.setattr(compat, "flashinfer_version", lambda: version)

    return pretend


def page(spec: Any, layout: KVCacheLayout = BLHNC, config: Any = None, *names: str) -> int | None:
    """The page that FLASHINFER reads a cache in."""
    context = PageContext(spec, layout, config, names)
    choice = choose_page(FlashInferPolicy(), context)
    return None if choice is None else choice.page_tokens


GQA = model({TARGET: (16, 2)})


@pytest.mark.parametrize("capability", [SM80, SM90, SM120])
@pytest.mark.parametrize("layout", [BLHNC, BLNHC])
@pytest.mark.parametrize(("block", "expected"), [(640, 64), (544, 32), (528, 16), (64, None)])
def test_below_sm100_pages_are_64_at_most(
    on_device: Any, capability: tuple[int, int], layout: Any, block: int, expected: int | None
) -> None:
    on_device(capability)
    assert page(full(block), layout, GQA, TARGET) == expected


@pytest.mark.parametrize("capability", [SM100, SM103])
@pytest.mark.parametrize(
    ("block", "expected"), [(640, 128), (1280, 256), (2048, 1024), (544, 32), (576, 64)]
)
def test_grouped_queries_on_sm100_take_large_pages(
    on_device: Any, capability: tuple[int, int], block: int, expected: int
) -> None:
    on_device(capability)
    assert page(full(block), BLHNC, GQA, TARGET) == expected


def test_older_flashinfer_reads_128_at_most_on_sm100(on_device: Any) -> None:
    on_device(SM100, version=(0, 6))
    assert page(full(1280), BLHNC, GQA, TARGET) == 128


def test_head_dim_256_and_16_token_pages(on_device: Any) -> None:
    on_device(SM100, version=(0, 5))
    assert page(full(528, head_size=256), BLHNC, GQA, TARGET) is None
    on_device(SM100)
    assert page(full(528, head_size=256), BLHNC, GQA, TARGET) == 16
    on_device(SM120)
    assert page(full(544, head_size=256), BLHNC, GQA, TARGET) is None
    assert page(full(544, head_size=128), BLHNC, GQA, TARGET) == 32


def test_sm100_reads_head_major_interiors_only(on_device: Any) -> None:
    on_device(SM100)
    assert FlashInferPolicy().page_rules(PageContext(full(), BLNHC)) is None
    assert page(full(), BLNHC, GQA, TARGET) is None
    native = ("LBHNC", "BLHNC")
    assert FlashInferPolicy().supported_layouts(native) == native


DRAFTER_HEADS = {TARGET: (16, 2), DRAFTER: (16, 8)}


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (model({TARGET: (8, 8)}), TARGET, 64),  # an MHA group
        (model({TARGET: (6, 4)}), TARGET, 64),  # 6 // 4 is 1
        (model(DRAFTER_HEADS, method="eagle3"), DRAFTER, 128),
        (model(DRAFTER_HEADS, method="dflash"), TARGET, 128),
        (model(DRAFTER_HEADS, method="dflash"), DRAFTER, 64),
        (model(DRAFTER_HEADS, method="dspark"), DRAFTER, 64),
        (model({TARGET: (16, 2)}, use_non_causal=True), TARGET, 64),
        (model({"drafter.attn": (16, 2)}, method="dflash"), "drafter.attn", 64),
        (model({}), TARGET, 64),  # a layer that is not there yet
    ],
)
def test_large_pages_are_decided_by_the_group(
    on_device: Any, config: Any, name: str, expected: int
) -> None:
    """vLLM asks the model and asserts by the group."""
    on_device(SM100)
    assert page(full(), BLHNC, config, name) == expected


def test_layers_of_different_head_counts_in_a_group_take_small_pages(on_device: Any) -> None:
    on_device(SM100)
    assert page(full(), BLHNC, model(DRAFTER_HEADS), TARGET, DRAFTER) == 64


def test_without_trtllm_gen_pages_are_small(on_device: Any) -> None:
    on_device(SM100, trtllm=False)
    assert page(full(), BLHNC, GQA, TARGET) == 64


CONFIGS = {
    "gqa": (GQA, TARGET),
    "mha": (model({TARGET: (8, 8)}), TARGET),
    "drafter": (model(DRAFTER_HEADS, method="dflash"), DRAFTER),
}


@pytest.mark.parametrize("capability", [SM80, SM90, SM100, SM120])
@pytest.mark.parametrize("group", CONFIGS)
def test_rules_without_layers_contain_those_with_layers(
    on_device: Any, capability: tuple[int, int], group: str
) -> None:
    """The stride is aligned for the former and read by the latter."""
    on_device(capability)
    config, name = CONFIGS[group]
    policy = FlashInferPolicy()
    for head_size, dtype, heads, layout in itertools.product(
        (64, 128, 256, 512), (torch.bfloat16, torch.uint8), (1, 2, 8), (BLHNC, BLNHC)
    ):
        for block in (64, 128, 192, 528, 544, 640, 1280, 2096):
            spec = full(block, head_size=head_size, dtype=dtype, num_kv_heads=heads)
            wide = policy.page_rules(PageContext(spec, layout))
            narrow = policy.page_rules(PageContext(spec, layout, config, (name,)))
            if wide is None:
                assert narrow is None
                continue
            assert narrow is not None
            assert set(narrow.candidates(block)) <= set(wide.candidates(block))
            planned = choose_page(policy, PageContext(spec, layout))
            if planned is None:
                continue
            unit = page_unit_bytes(spec, layout, planned.page_tokens)
            aligned = replace(spec, block_stride_alignment=unit)
            context = PageContext(aligned, layout, config, (name,))
            chosen = choose_page(policy, context, stride_is_aligned=True)
            assert chosen is not None
            assert unit % page_unit_bytes(spec, layout, chosen.page_tokens) == 0


@pytest.mark.parametrize("capability", [SM80, SM90, SM120])
def test_overlap_is_off_where_a_tensor_map_is_encoded(
    on_device: Any, capability: tuple[int, int]
) -> None:
    on_device(capability)
    policy = FlashInferPolicy()

    def overlaps(spec: Any) -> bool:
        found = policy.page_rules(PageContext(spec, BLHNC, GQA, (TARGET,)))
        assert found is not None
        return found.allow_overlapping_pages

    fp8 = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert overlaps(full())
    assert overlaps(fp8) == (capability != SM90)


def test_overlap_is_off_on_sm100(on_device: Any) -> None:
    on_device(SM100)
    for config, name in CONFIGS.values():
        found = FlashInferPolicy().page_rules(PageContext(full(), BLHNC, config, (name,)))
        assert found is not None
        assert not found.allow_overlapping_pages


def test_xqa_strides_are_multiples_of_the_head(on_device: Any) -> None:
    fp8 = full(head_size=80, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    for capability, alignment in ((SM80, 16), (SM90, 80), (SM120, 80)):
        on_device(capability)
        found = FlashInferPolicy().page_rules(PageContext(fp8, BLHNC))
        assert found is not None
        assert found.stride_alignment == alignment


# The moments at which vLLM asks


@pytest.fixture
def backend(recording: Any) -> Any:
    """The policy over a stock class that answers as FLASHINFER does on SM100."""

    class Stock(recording.Backend):  # type: ignore[misc, name-defined]
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
            del kv_cache_spec
            return [16, 32, 64, 128, 256, 512, 1024]

    return repage_backend(Stock, FlashInferPolicy(), module=__name__)


@pytest.mark.parametrize("capability", [SM80, SM90, SM100, SM120])
def test_model_load_gets_the_native_minimum(
    on_device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, capability: Any
) -> None:
    on_device(capability)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert min(backend.get_supported_kernel_block_sizes()) == 16


@pytest.mark.parametrize(
    ("capability", "answer"), [(SM80, 64), (SM90, 64), (SM100, 128), (SM120, 64)]
)
def test_a_packed_run_takes_the_block_whole(
    on_device: Any,
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    capability: Any,
    answer: int,
) -> None:
    on_device(capability)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    spec = full(640)
    assert backend.get_supported_kernel_block_sizes(spec) == [MultipleOf(answer)]
    assert select_common_block_size(640, [backend], [spec]) == 640
    customized = backend.customize_spec(spec)
    assert customized.get_block_stride_alignment() == answer * 512
    probe = SlidingWindowSpec(
        block_size=1, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, sliding_window=128
    )
    budget = probe.real_page_size_bytes * 640
    per_token = probe.real_page_size_bytes
    assert _largest_kernel_block_within(backend, per_token, budget, 640, probe) == 640


def test_a_layer_compact_run_gets_the_native_list(
    on_device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(SM100)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert backend.get_supported_kernel_block_sizes(full()) == [16, 32, 64, 128, 256, 512, 1024]
    assert backend.customize_spec(full()) == full()


def test_nvfp4_is_refused_while_specs_are_collected(
    on_device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(SM100)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    spec = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)
    with pytest.raises(RepagingRefusedError, match="FLASHINFER: an NVFP4 cache"):
        backend.customize_spec(spec)


# Families of fixed pages


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FixedPagePolicy]:
    """A policy over a stock class that gives one answer."""

    def make(answer: list[Any], *paths: Any, **options: Any) -> FixedPagePolicy:
        stock = SimpleNamespace(get_supported_kernel_block_sizes=lambda _spec: answer)
        monkeypatch.setattr(compat, "backend_class", lambda _path: stock)
        return FixedPagePolicy("FIXED", "vllm.Fixed", *paths, **options)

    return make


def fixed_page(policy: FixedPagePolicy, spec: Any, layout: Any = BLHNC) -> int | None:
    choice = choose_page(policy, PageContext(spec, layout))
    return None if choice is None else choice.page_tokens


FA4 = (FA4_HD256, FA4_FP8_HD512_SM90)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [([128], 128), ([64], 64), ([MultipleOf(16)], None), ([MultipleOf(64)], None), ([256], None)],
)
def test_flash_attention_is_repaged_only_where_its_page_is_fixed(
    fixed: Any, answer: list[Any], expected: int | None
) -> None:
    assert fixed_page(fixed(answer, *FA4), full(640, head_size=256)) == expected


def test_flash_attention_keeps_blocks_that_128_does_not_divide(fixed: Any) -> None:
    assert fixed_page(fixed([128], *FA4), full(544, head_size=256)) is None
    assert fixed_page(fixed([128], *FA4), full(128, head_size=256)) is None


def mla(block: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def test_flashinfer_mla_needs_rows_of_128_tokens(fixed: Any) -> None:
    policy = fixed([32, 64], FLASHINFER_MLA)
    assert fixed_page(policy, mla(640)) == 64
    assert fixed_page(policy, mla(256)) == 64
    assert fixed_page(policy, mla(192)) is None
    # The probe for a sliding-window block names no block yet.
    assert policy.page_rules(PageContext(mla(1), BLHNC)) is not None


def test_cutlass_mla(fixed: Any) -> None:
    policy = fixed([128], CUTLASS_MLA)
    assert fixed_page(policy, mla(1280)) == 128
    choice = choose_page(policy, PageContext(mla(1280), BLHNC))
    assert choice is not None
    assert choice.rules.requires_dense_pages


def test_turboquant_adds_the_packed_layout_of_its_interior(
    fixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fixed([16, 32, 64, 128], TURBOQUANT, token_major_layouts=True)
    assert fixed_page(policy, full(640), BLNHC) == 128
    assert policy.supported_layouts(("LBNHC",)) == ("LBNHC", "BLNHC")
    assert policy.supported_layouts(("LBNHC", "BLNHC")) == ("LBNHC", "BLNHC")
    monkeypatch.setattr(compat, "is_rocm", lambda: True)
    assert policy.supported_layouts(("LBNHC",)) == ("LBNHC",)


def test_layouts_of_the_others_are_their_own(fixed: Any) -> None:
    policy = fixed([64], FA4_FP8_HD512_SM90)
    assert policy.supported_layouts(None) is None
    assert policy.supported_layouts(("LBHNC",)) == ("LBHNC",)


def test_a_choice_allows_exactly_its_page(on_device: Any) -> None:
    on_device(SM100)
    choice = choose_page(FlashInferPolicy(), PageContext(full(), BLHNC, GQA, (TARGET,)))
    assert choice is not None
    rules: KernelPageRules = choice.rules
    assert rules.page_sizes == (128,)
    assert (choice.page_tokens, choice.block_tokens) == (128, 640)
    assert rules.max_page_index == 2**30 - 1
