# SPDX-License-Identifier: Apache-2.0
"""Layers with caches as vLLM allocates them, and batches in manager terms.

The config is vLLM's, except for the model's, which would need a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from support import kv_pool

__all__ = [
    "CPU",
    "LAYERS",
    "MAX_NUM_SEQS",
    "Batch",
    "World",
    "decode_table",
    "page_list",
    "world_of",
]

CPU = torch.device("cpu")
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 2560


@dataclass
class Batch:
    """A batch in manager terms, with its tensors at fixed addresses, as in the runners.

    Attributes
    ----------
    table : Tensor
        int32 ``[rows, width]``.
    seq_lens : Tensor
        int32 ``[rows]``.
    """

    table: Tensor
    seq_lens: Tensor
    query_lens: Sequence[int]
    causal: bool = True
    dcp_local_seq_lens: Tensor | None = None

    def common(self) -> CommonAttentionMetadata:
        """What runners hand to builders."""
        starts = torch.zeros(len(self.query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(self.query_lens).cumsum(0)
        tokens = int(starts[-1])
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens,
            num_reqs=len(self.query_lens),
            num_actual_tokens=tokens,
            max_query_len=max(self.query_lens),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            causal=self.causal,
            seq_lens_cpu_upper_bound=self.seq_lens.clone(),
            dcp_local_seq_lens=self.dcp_local_seq_lens,
        )


@dataclass
class World:
    """One pool of blocks, the layers in it and the config that describes them.

    Attributes
    ----------
    backend : type
        The re-paged backend class.
    layout : str
        Resolved layout.
    """

    backend: Any
    layout: str = "BLHNC"
    block_tokens: int = 640
    num_blocks: int = 12
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 128
    cache_dtype: str = "auto"
    speculative_tokens: int = 0
    layers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = VllmConfig()
        config.cache_config.kv_cache_layout = self.layout
        config.cache_config.cache_dtype = self.cache_dtype
        config.cache_config.block_size = self.block_tokens
        config.scheduler_config.max_num_seqs = MAX_NUM_SEQS
        config.scheduler_config.max_num_batched_tokens = 1024
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        config.compilation_config.static_forward_context = self.layers
        if self.speculative_tokens:
            config.speculative_config = SimpleNamespace(
                num_speculative_tokens=self.speculative_tokens,
                method="eagle3",
                parallel_drafting=False,
                enable_adaptive_verification=False,
            )
        config.model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            architectures=["Qwen3NextForCausalLM"],
            max_model_len=MAX_MODEL_LEN,
            hf_config=SimpleNamespace(model_type="qwen3_next"),
            hf_text_config=SimpleNamespace(num_hidden_layers=48),
            get_num_attention_heads=lambda _parallel: self.query_heads,
            get_num_kv_heads=lambda _parallel: self.kv_heads,
            get_head_size=lambda: self.head_size,
            rswa_window=None,
            is_mm_prefix_lm=False,
            is_encoder_decoder=False,
        )
        self.config = config

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the config vLLM's current one."""
        with set_current_vllm_config(self.config):
            yield

    def spec(self, **fields: Any) -> FullAttentionSpec:
        """The layers' spec, as the backend customizes it for a packed run."""
        values = {
            "block_size": self.block_tokens,
            "num_kv_heads": self.kv_heads,
            "head_size": self.head_size,
            "dtype": torch.bfloat16,
        }
        return FullAttentionSpec(**{**values, **fields})

    def add_layer(self, name: str, *, query_heads: int | None = None, **options: Any) -> None:
        """A layer with the backend's real impl and no weights."""
        layer = Attention.__new__(Attention)
        torch.nn.Module.__init__(layer)
        with self.current():
            layer.impl = self.backend.get_impl_cls()(
                num_heads=query_heads or self.query_heads,
                head_size=self.head_size,
                scale=self.head_size**-0.5,
                num_kv_heads=self.kv_heads,
                alibi_slopes=None,
                sliding_window=options.pop("sliding_window", None),
                kv_cache_dtype=self.cache_dtype,
                **options,
            )
        layer.layer_name = name
        layer.num_heads = query_heads or self.query_heads
        layer.kv_cache = torch.tensor([])
        self.layers[name] = layer

    def add_mla_layer(self, name: str, impl: Any) -> None:
        """An MLA layer that has what its metadata builder reads."""
        layer = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(layer)
        layer.layer_name = name
        layer.impl = impl
        layer.num_heads = self.query_heads
        layer.q_lora_rank = None
        layer.kv_lora_rank, layer.qk_rope_head_dim = 512, 64
        layer.qk_nope_head_dim = layer.v_head_dim = 128
        layer.prefill_backend = _PrefillBackend()
        layer.kv_cache = torch.tensor([])
        self.layers[name] = layer

    def bind(self, names: Sequence[str] | None = None, spec: Any = None, *, gap: int = 0) -> None:
        """Allocate a pool and bind it: the layers, then `gap` bytes of another group, per block."""
        names = list(self.layers) if names is None else list(names)
        spec = self.spec() if spec is None else spec
        views = kv_pool.views(names, spec, self.layout, self.num_blocks, gap=gap)
        for name, view in views.items():
            layer = self.layers[name]
            layer.kv_cache = view.squeeze(1) if isinstance(layer, MLAAttention) else view

    def builder(self, names: Sequence[str] | None = None, spec: Any = None) -> Any:
        """The backend's metadata builder, made as by vLLM."""
        names = list(self.layers) if names is None else names
        spec = self.spec() if spec is None else spec
        with self.current():
            return self.backend.get_builder_cls()(spec, names, self.config, CPU)

    def batch(
        self,
        rows: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        **options: Any,
    ) -> Batch:
        """Rows of block ids, padded with block 0 to vLLM's table width."""
        width = -(-MAX_MODEL_LEN // self.block_tokens)
        table = kv_pool.block_table(rows, width)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        return Batch(table, lengths, query_lens or [1] * len(rows), **options)

    def build(self, builder: Any, batch: Batch, method: str = "build", **options: Any) -> Any:
        """Call one of the builder's methods with a batch, as the runners do."""
        with self.current():
            if method == "build_for_cudagraph_capture":
                return builder.build_for_cudagraph_capture(batch.common())
            if method == "build_for_drafting":
                return builder.build_for_drafting(
                    common_attn_metadata=batch.common(), draft_index=1, **options
                )
            return builder.build(
                common_prefix_len=0, common_attn_metadata=batch.common(), **options
            )

    def pages(self, batch: Batch, page_tokens: int, name: str, *, lookahead: int = 1) -> Tensor:
        """The table by its definition."""
        return kv_pool.page_table(
            self.layers[name].kv_cache,
            batch.table,
            batch.seq_lens,
            block_tokens=self.block_tokens,
            page_tokens=page_tokens,
            lookahead=lookahead,
        )


class _PrefillBackend:
    """What MLA builders copy per micro-batch."""

    def clone(self) -> _PrefillBackend:
        return self

    def get_name(self) -> str:
        return "FLASH_ATTN"

    def prepare_metadata(self, *_args: Any, **_kwargs: Any) -> None:
        return


def world_of(backend: Any, **options: Any) -> tuple[World, Any]:
    """Two bound layers and their builder."""
    world = World(backend, **options)
    for name in LAYERS:
        world.add_layer(name)
    world.bind()
    return world, world.builder()


def page_list(world: World, batch: Batch, page_tokens: int) -> list[int]:
    """The pages of every row up to its length, row after row."""
    table = world.pages(batch, page_tokens, next(iter(world.layers)))
    rows = zip(table.tolist(), batch.seq_lens.tolist(), strict=True)
    return [page for row, length in rows for page in row[: -(-length // page_tokens)]]


def decode_table(metadata: Any) -> Tensor:
    """The page table of FlashInfer's decode kernels."""
    table: Tensor = metadata.decode.block_tables
    return table
