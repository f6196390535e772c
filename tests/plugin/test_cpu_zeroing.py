"""Zeroing of new blocks on the V1 CPU runner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from repage.vllm import cpu_zeroing

NUM_BLOCKS = 5
POISON = 0x7F  # 0x7f7f is a NaN-free pattern that no zeroing leaves behind


def full(heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=64, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=32
    )


@pytest.fixture(autouse=True)
def stock(monkeypatch):
    """The runner as vLLM ships it; whatever `install` does is undone."""
    method = CPUModelRunner._zero_block_ids
    method = getattr(method, "__wrapped__", method)
    monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", method)
    return method


class Pool:
    """A packed pool: `groups` of (name, spec) overlay each other, layers lie side by side."""

    def __init__(self, groups, layout: str = "BLHNC") -> None:
        sizes = [sum(spec.page_size_bytes for _, spec in group) for group in groups]
        self.block_stride = max(sizes) + 512  # and a tail that belongs to no layer
        self.raw = torch.full((self.block_stride * NUM_BLOCKS,), POISON, dtype=torch.int8)
        self.layers = {}
        self.spans = {}
        config_groups = []
        for group in groups:
            offset = 0
            for name, spec in group:
                tensor = KVCacheTensor(
                    size=self.raw.numel(),
                    layers=[name],
                    layer_stride=spec.page_size_bytes,
                    block_stride=self.block_stride,
                    offset=offset,
                )
                if isinstance(spec, MambaSpec):
                    cache = [self.raw]
                else:
                    (cache,) = create_kv_cache_views(
                        self.raw, spec, NUM_BLOCKS, KVCacheLayout[layout], tensor
                    )
                self.layers[name] = SimpleNamespace(kv_cache=cache)
                self.spans[name] = (offset, spec.page_size_bytes)
                offset += spec.page_size_bytes
            specs = dict(group)
            first = group[0][1]
            uniform = all(spec == first for spec in specs.values())
            group_spec = first if uniform else UniformTypeKVCacheSpecs(64, specs)
            config_groups.append(KVCacheGroupSpec(list(specs), group_spec))
        self.runner = SimpleNamespace(
            kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], config_groups),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=layout)),
        )

    def zero(self, block_ids: list[int]) -> None:
        CPUModelRunner._zero_block_ids(self.runner, block_ids)

    def zeroed(self) -> set[int]:
        return set(torch.nonzero(self.raw == 0).flatten().tolist())

    def bytes_of(self, names: list[str], blocks: list[int]) -> set[int]:
        return {
            block * self.block_stride + self.spans[name][0] + byte
            for name in names
            for block in blocks
            for byte in range(self.spans[name][1])
        }


def mamba() -> MambaSpec:
    return MambaSpec(block_size=64, shapes=((64, 64),), dtypes=(torch.float32,))


def test_stock_skips_packed_groups():
    """The mistake that the plugin repairs; when vLLM repairs it, this module can go."""
    pool = Pool([[("a.0", full()), ("a.1", full(heads=2))]])
    pool.zero([2])
    assert pool.zeroed() == set()


def test_exactly_the_layers_bytes_of_the_new_blocks_are_zeroed():
    pool = Pool(
        [
            [("a.0", full()), ("a.1", full(heads=2))],
            [("m.2", mamba())],
        ]
    )
    cpu_zeroing.install()
    pool.zero([1, 3])
    assert pool.zeroed() == pool.bytes_of(["a.0", "a.1"], [1, 3])


def test_groups_of_sliding_windows_are_zeroed():
    pool = Pool([[("a.0", full())], [("w.1", sliding())]])
    pool.zero([2])
    assert pool.zeroed() == pool.bytes_of(["a.0"], [2])
    wide = Pool([[("m.0", mamba())], [("w.1", sliding())]])
    cpu_zeroing.install()
    wide.zero([2])
    assert wide.zeroed() == wide.bytes_of(["w.1"], [2])


def test_groups_that_the_stock_method_zeroes_are_left_to_it():
    pool = Pool([[("a.0", full()), ("a.1", full())]])
    cpu_zeroing.zero_skipped_groups(pool.runner.kv_cache_config, pool.layers, [1])
    assert pool.zeroed() == set()
    cpu_zeroing.install()
    pool.zero([1])
    assert pool.zeroed() == pool.bytes_of(["a.0", "a.1"], [1])


def test_recurrent_states_are_left_alone():
    pool = Pool([[("m.0", mamba())]])
    cpu_zeroing.install()
    pool.zero([0, 1])
    assert pool.zeroed() == set()


def test_overlaid_layers_of_different_sizes_are_all_zeroed():
    """They begin at one address, and only the larger one's bytes cover both."""
    pool = Pool(
        [
            [("a.0", full()), ("w.9", sliding())],
            [("b.0", full(heads=4)), ("w.8", sliding())],
        ]
    )
    cpu_zeroing.install()
    pool.zero([4])
    assert pool.zeroed() == pool.bytes_of(["a.0", "w.9", "b.0", "w.8"], [4])


def test_no_new_blocks_change_nothing():
    pool = Pool([[("a.0", full()), ("a.1", full(heads=2))]])
    cpu_zeroing.install()
    pool.zero([])
    assert pool.zeroed() == set()


def test_on_layer_compact_layouts_only_the_stock_method_runs():
    pool = Pool([[("a.0", full()), ("a.1", full(heads=2))]], layout="LBHNC")
    cpu_zeroing.install()
    pool.zero([2])
    assert pool.zeroed() == set()


def test_a_layer_that_shares_a_cache_and_one_without_are_passed_over():
    pool = Pool([[("a.0", full()), ("a.1", full(heads=2))]])
    group = pool.runner.kv_cache_config.kv_cache_groups[0]
    group.layer_names.extend(["shares.2", "unbound.3"])
    pool.layers["shares.2"] = pool.layers["a.0"]
    group.kv_cache_spec.kv_cache_specs["unbound.3"] = full()
    pool.layers["unbound.3"] = SimpleNamespace(kv_cache=torch.tensor([]))
    cpu_zeroing.install()
    pool.zero([1])
    assert pool.zeroed() == pool.bytes_of(["a.0", "a.1"], [1])


def test_installing_twice_wraps_once(stock):
    cpu_zeroing.install()
    once = CPUModelRunner._zero_block_ids
    cpu_zeroing.install()
    assert CPUModelRunner._zero_block_ids is once
    assert once.__wrapped__ is stock
