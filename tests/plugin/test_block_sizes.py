"""What a re-paged backend answers, at each moment at which vLLM asks."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

from repage.errors import RepagingRefusedError, UnsupportedLayoutError
from repage.vllm import compat, set_packed_mode
from repage.vllm.cpu_attn import RepagedCPUAttentionBackend


def full(block_size: int, **fields) -> FullAttentionSpec:
    values = {"num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16, **fields}
    return FullAttentionSpec(block_size=block_size, **values)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch):
    """Set the layout that vLLM's current config carries, as from set_kv_cache_layout on."""

    def resolve(layout: str | None) -> None:
        config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=layout))
        monkeypatch.setattr(compat, "current_vllm_config", lambda: config)

    return resolve


NATIVE = [16, 32, 64]


def test_model_load_gets_the_native_answer_even_when_packed(repaged, monkeypatch):
    """vLLM aligns the blocks of hybrid models to the smallest size it hears then."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    backend = repaged(*NATIVE)
    assert backend.get_supported_kernel_block_sizes() == NATIVE
    assert backend.get_preferred_block_size(16) == 16


def test_nothing_asked_for_is_native(repaged):
    assert repaged(*NATIVE).get_supported_kernel_block_sizes(full(640)) == NATIVE


@pytest.mark.parametrize(("block", "page"), [(640, 64), (544, 32), (528, 16)])
@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC"])
def test_collecting_specs_for_a_packed_run_takes_the_manager_block_whole(
    repaged, monkeypatch, block, page, layout
):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    backend = repaged(*NATIVE)
    assert backend.get_supported_kernel_block_sizes(full(block)) == [MultipleOf(page)]
    assert select_common_block_size(block, [backend], [full(block)]) == block


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "HND", "NHD"])
def test_other_layouts_are_native(repaged, monkeypatch, layout):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    assert repaged(*NATIVE).get_supported_kernel_block_sizes(full(640)) == NATIVE


@pytest.mark.parametrize("block", [640, 544, 528, 1280, 2096])
def test_the_sliding_window_probe_ends_at_the_primary_block(repaged, monkeypatch, block):
    """Native sizes would give such a layer 16-token blocks, one packed block each."""
    backend = repaged(*NATIVE)
    probe = SlidingWindowSpec(
        block_size=1, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, sliding_window=128
    )
    per_token = probe.real_page_size_bytes

    def window_block() -> int:
        return _largest_kernel_block_within(backend, per_token, per_token * block, block, probe)

    assert window_block() == 64 if block % 64 == 0 else window_block() <= 64
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert window_block() == block


def test_the_resolved_layout_outranks_what_was_asked_for(repaged, monkeypatch, resolved):
    backend = repaged(*NATIVE)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    resolved("LBHNC")
    assert backend.get_supported_kernel_block_sizes(full(640)) == NATIVE
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    resolved("BLNHC")
    assert backend.get_supported_kernel_block_sizes(full(640)) == [MultipleOf(64)]


def test_an_unresolved_config_falls_back_to_what_was_asked_for(repaged, monkeypatch, resolved):
    resolved(None)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert repaged(*NATIVE).get_supported_kernel_block_sizes(full(640)) == [MultipleOf(64)]


def test_a_planned_layout_counts_unless_the_user_asked_for_another(repaged, monkeypatch):
    backend = repaged(*NATIVE)
    set_packed_mode("BLHNC")
    assert backend.get_supported_kernel_block_sizes(full(640)) == [MultipleOf(64)]
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert backend.get_supported_kernel_block_sizes(full(640)) == NATIVE
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    set_packed_mode(None)
    assert backend.get_supported_kernel_block_sizes(full(640)) == NATIVE


@pytest.mark.parametrize("name", ["LBHNC", "blhnc", "", "HND"])
def test_only_block_outermost_layouts_can_be_planned(name):
    with pytest.raises(UnsupportedLayoutError, match="block-outermost"):
        set_packed_mode(name)


def test_a_block_that_is_a_page_and_one_that_no_page_divides_are_native(repaged, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    backend = repaged(*NATIVE)
    assert backend.get_supported_kernel_block_sizes(full(64)) == NATIVE
    assert backend.get_supported_kernel_block_sizes(full(24)) == NATIVE


def test_caches_that_are_no_plain_token_caches_are_left_to_vllm(repaged, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    backend = repaged(*NATIVE)
    encoder = EncoderOnlyAttentionSpec(
        block_size=640, num_kv_heads=2, head_size=128, dtype=torch.bfloat16
    )
    specs = [encoder, full(640, tokens_per_state=4), full(640, tokens_per_state=Fraction(1, 2))]
    for spec in specs:
        assert backend.get_supported_kernel_block_sizes(spec) == NATIVE
        assert backend.customize_spec(spec) is spec


# customize_spec


@pytest.mark.parametrize(
    ("layout", "unit"),
    # E = 2 * 128 * 2 bytes of K and V per token and head, P = 64, H = 2.
    [("BLHNC", 64 * 512), ("BHLNC", 64 * 512), ("BLNHC", 64 * 2 * 512)],
)
def test_the_block_stride_is_aligned_to_the_page_unit(repaged, monkeypatch, layout, unit):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    spec = customize_attention_spec(repaged(*NATIVE), full(640))
    assert spec.get_block_stride_alignment() == unit
    assert replace(spec, block_stride_alignment=None) == full(640)


def test_an_alignment_of_the_parents_is_kept(repaged, monkeypatch, recording):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    backend = repaged(*NATIVE, parent=recording.AlignedBackend)
    alignment = backend.customize_spec(full(640)).get_block_stride_alignment()
    assert alignment % 96 == 0
    assert alignment % (64 * 512) == 0
    assert alignment == 3 * 64 * 512


def test_without_packing_the_spec_is_the_parents(repaged, recording):
    spec = full(640)
    assert repaged(*NATIVE).customize_spec(spec) is spec
    aligned = repaged(*NATIVE, parent=recording.AlignedBackend)
    assert aligned.customize_spec(spec) == recording.AlignedBackend.customize_spec(spec)


def test_the_probe_spec_is_not_aligned(repaged, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert repaged(*NATIVE).customize_spec(full(1)) == full(1)


def test_nvfp4_is_refused_while_specs_are_collected(repaged, monkeypatch):
    spec = full(640, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)
    backend = repaged(*NATIVE)
    assert backend.customize_spec(spec) is spec  # layer-compact: nothing to refuse
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    with pytest.raises(RepagingRefusedError, match=r"NVFP4.*VLLM_KV_CACHE_LAYOUT"):
        backend.customize_spec(spec)
    whole = replace(spec, block_size=64)
    assert backend.customize_spec(whole) is whole  # not split


# CPU_ATTN


@pytest.mark.parametrize(
    ("block", "setting", "answer"),
    [
        (640, "32", 32),
        (640, "64", 64),
        (640, "128", 128),
        (1280, "128", 128),
        (544, "128", 32),
        (96, "64", 32),
        (288, "128", 96),
    ],
)
def test_the_cpu_page_is_the_largest_that_divides_the_block(monkeypatch, block, setting, answer):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    monkeypatch.setenv("REPAGE_CPU_PAGE", setting)
    sizes = RepagedCPUAttentionBackend.get_supported_kernel_block_sizes(full(block))
    assert sizes == [MultipleOf(answer)]


def test_cpu_blocks_stay_whole_unless_a_page_is_set(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    backend = RepagedCPUAttentionBackend
    assert backend.get_supported_kernel_block_sizes(full(640)) == [MultipleOf(32)]
    assert backend.customize_spec(full(640)) == full(640)


def test_cpu_attn_adds_the_packed_layout_behind_its_own():
    names = [layout.name for layout in RepagedCPUAttentionBackend.supported_kv_cache_layouts()]
    assert names == ["LBHNC", "BLHNC"]


def test_layouts_that_a_parent_leaves_open_stay_open(repaged):
    assert repaged(*NATIVE).supported_kv_cache_layouts() is None
