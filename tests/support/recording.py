# SPDX-License-Identifier: Apache-2.0
"""Caches as vLLM allocates them, and backends of vLLM's own base classes that record calls.

Everything here is vLLM's real code except the layers' weights and the config, which only carries
the fields that builders read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    # vLLM's imports use what torch deprecates; repage's own code still runs with errors on.
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.worker.cpu_model_runner  # noqa: F401

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from repage import KernelPageRules
from repage.vllm.policy import BackendPolicy, PageContext
from support import kv_pool

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


@dataclass
class RecordedMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    common: Any


class RecordingBuilder(AttentionMetadataBuilder[RecordedMetadata]):
    """Keeps what a real builder would read."""

    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, block_table_width=None):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.parent_spec = kv_cache_spec
        self.block_table_width = block_table_width
        self.tables_at_draft_update = []

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False, extra=None):
        del common_prefix_len, fast_build
        self.extra = extra
        return RecordedMetadata(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.seq_lens,
            common_attn_metadata.slot_mapping,
            common_attn_metadata,
        )

    def update_block_table(self, metadata, blk_table, slot_mapping):
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table, slot_mapping
        return updated

    def update_draft_decode_metadata(self, metadata):
        self.tables_at_draft_update.append(metadata.block_table.clone())


class RecordingImpl(AttentionImpl[RecordedMetadata]):
    def __init__(self):
        self.reads = []
        self.writes = []

    def forward(self, _layer, _query, _key, _value, kv_cache, _metadata, output, *_scales):
        self.reads.append(kv_cache)
        return output

    def do_kv_cache_update(self, _layer, _key, _value, kv_cache, slot_mapping):
        self.writes.append((kv_cache, slot_mapping))


class RecordingBackend(AttentionBackend):
    """Like FlashInfer: fixed pages, separate cache writes, any layout."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        del kv_cache_spec
        return [16, 32, 64]

    @staticmethod
    def get_name():
        return "RECORDING"

    @staticmethod
    def get_impl_cls():
        return RecordingImpl

    @staticmethod
    def get_builder_cls():
        return RecordingBuilder


class AlignedRecordingBackend(RecordingBackend):
    """A parent that already asks for an alignment of its own."""

    @classmethod
    def customize_spec(cls, spec):
        return replace(spec, block_stride_alignment=96)


class FixedPages(BackendPolicy):
    name = "RECORDING"

    def __init__(self, *sizes: int, writes: bool = False, overlap: bool = True) -> None:
        self.sizes = sizes
        self.writes_kernel_pages = writes
        self.overlap = overlap
        self.builders_created = 0

    def page_rules(self, context: PageContext) -> KernelPageRules:
        del context
        return KernelPageRules(
            name=self.name, page_sizes=self.sizes, allow_overlapping_pages=self.overlap
        )

    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return native

    def on_builder_created(self) -> None:
        self.builders_created += 1


class Layer(Attention):
    """An attention layer without weights: what builders and impls look at, no more."""

    def __init__(self, name: str, impl: Any, num_heads: int) -> None:
        torch.nn.Module.__init__(self)
        self.layer_name = name
        self.impl = impl
        self.num_heads = num_heads
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])
        self._k_scale_float = self._v_scale_float = 1.0


@dataclass
class World:
    """One pool of packed or layer-compact blocks and the config that describes it."""

    layout: str = "BLHNC"
    block_tokens: int = 128
    num_blocks: int = 9
    max_num_seqs: int = 4
    num_speculative_tokens: int = 0
    heads: int = 2
    head_size: int = 64
    impl: Callable[[], Any] = RecordingImpl
    layers: dict[str, Layer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speculative = (
            SimpleNamespace(num_speculative_tokens=self.num_speculative_tokens)
            if self.num_speculative_tokens
            else None
        )
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            cache_config=SimpleNamespace(kv_cache_layout=self.layout, cache_dtype="auto"),
            scheduler_config=SimpleNamespace(max_num_seqs=self.max_num_seqs),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            speculative_config=speculative,
            model_config=SimpleNamespace(
                dtype=torch.bfloat16,
                architectures=["Qwen3NextForCausalLM"],
                get_num_attention_heads=lambda _parallel: 4,
            ),
        )

    def spec(self, kind: type = FullAttentionSpec, **fields: Any) -> Any:
        values = {
            "block_size": self.block_tokens,
            "num_kv_heads": self.heads,
            "head_size": self.head_size,
            "dtype": torch.bfloat16,
        }
        return kind(**{**values, **fields})

    def add_layers(self, *names: str) -> list[str]:
        for name in names:
            self.layers[name] = Layer(name, self.impl(), 4)
        return list(names)

    def bind(self, names: list[str] | None = None, *, spec: Any = None, gap: int = 0) -> None:
        """Allocate a pool and bind it, as vLLM does: all layers side by side in each block.

        `gap` bytes follow the layers in each block, as the pages of a larger group would.
        """
        names = list(self.layers) if names is None else names
        spec = self.spec() if spec is None else spec
        views = kv_pool.views(names, spec, self.layout, self.num_blocks, gap=gap)
        for name, view in views.items():
            self.layers[name].kv_cache = view

    def batch(self, rows: list[list[int]], seq_lens: list[int], width: int = 4) -> Any:
        """Metadata of a batch in manager terms; rows are padded with block 0."""
        starts = torch.arange(len(rows) + 1, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(rows),
            num_actual_tokens=len(rows),
            max_query_len=1,
            max_seq_len=max(seq_lens),
            block_table_tensor=kv_pool.block_table(rows, width),
            slot_mapping=torch.zeros(len(rows), dtype=torch.int64),
        )

    def expected_table(self, common: Any, page_tokens: int, name: str, lookahead: int) -> Any:
        """The table by its definition, for the cache that a layer has now."""
        return kv_pool.page_table(
            self.layers[name].kv_cache,
            common.block_table_tensor,
            common.seq_lens,
            block_tokens=self.block_tokens,
            page_tokens=page_tokens,
            lookahead=lookahead,
        )
