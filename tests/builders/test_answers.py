# SPDX-License-Identifier: Apache-2.0
"""What the backend classes answer vLLM, and that its registry has them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

from builders.world import World
from repage.vllm import backends, probes, registration


def test_every_probe_holds() -> None:
    assert probes.failed_probes() == []


def test_the_registry_has_every_backend_under_the_class_that_is_derived() -> None:
    for name, path in registration.BACKENDS.items():
        family = backends.FAMILIES.get(path.rpartition(".")[2])
        if family is not None:
            assert AttentionBackendEnum[name].value == family.class_path


@pytest.mark.parametrize(
    ("path", "head_size", "native", "page", "layouts"),
    [
        ("fi-native", 128, [16, 32, 64], 64, None),
        ("xqa", 128, [16, 32, 64], 64, None),
        ("trtllm-gen", 128, [16, 32, 64, 128, 256, 512, 1024], 128, ["LBHNC", "BLHNC"]),
        ("fa4", 256, [128], 128, None),
    ],
)
def test_answers_by_moment(
    on_path: Any, path: str, head_size: int, native: list[int], page: int, layouts: Any
) -> None:
    backend = on_path(path)
    world = World(backend, head_size=head_size)
    config = world.config.cache_config
    spec = world.spec()
    config.kv_cache_layout = None
    with world.current():
        # Model load: hybrid blocks are aligned to the smallest of these.
        assert backend.get_supported_kernel_block_sizes() == native
        found = backend.supported_kv_cache_layouts()
        assert (found and [layout.name for layout in found]) == layouts
        config.kv_cache_layout = "LBHNC"
        assert backend.get_supported_kernel_block_sizes(spec) == native
        # vLLM aligns the stride itself, and splits blocks in this layout.
        assert customize_attention_spec(backend, spec).page_size_bytes == spec.page_size_bytes
        assert select_common_block_size(640, [backend], [spec]) == page
        config.kv_cache_layout = "BLHNC"
        assert backend.get_supported_kernel_block_sizes(spec) == [MultipleOf(page)]
        assert select_common_block_size(640, [backend], [spec]) == 640
        aligned = customize_attention_spec(backend, spec)
        assert aligned.get_block_stride_alignment() == page * 4 * head_size


def test_specs_are_collected_without_a_config(
    on_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sets no config while workers collect specs; the environment decides then."""
    backend = on_path("trtllm-gen")
    spec = World(backend).spec()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert backend.get_supported_kernel_block_sizes(spec) == [MultipleOf(128)]
    assert backend.customize_spec(spec).get_block_stride_alignment() == 128 * 512
    # Without a config vLLM's own answer has no large pages.
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert backend.get_supported_kernel_block_sizes(spec) == [16, 32, 64]
