# SPDX-License-Identifier: Apache-2.0
"""Reads what a running vLLM engine knows about its KV cache, and records what it computes.

Everything here looks at vLLM's own objects from outside, so that a stock engine and a re-paged
one are seen through the same eyes. Attribute names are those of vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

from repage.demo.result import KVGroup

RECORDED_BLOCKS = 3
"""Manager blocks of one request whose table entries are recorded."""


class EngineObserver:
    """Attaches to a ``vllm.LLM`` whose engine core lives in this process.

    Parameters
    ----------
    llm : vllm.LLM
        A started engine.
    in_process : bool
        False where the engine core is another process; then only the resolved layout and what the
        front end was told are known.

    Attributes
    ----------
    drafts : list
        Draft tokens of every drafting call since the observer was attached.
    """

    def __init__(self, llm: Any, *, in_process: bool) -> None:
        self._llm = llm
        self.drafts: list[list[list[int]]] = []
        self._tables: dict[str, TableRow] = {}
        self._attention_blocks: set[int] = set()
        self._state_blocks: set[int] = set()
        self._runner: Any = None
        cache_config = llm.llm_engine.vllm_config.cache_config
        if in_process:
            core = llm.llm_engine.engine_core.engine_core
            cache_config = core.vllm_config.cache_config
            self._runner = core.model_executor.driver_worker.worker.model_runner
            self._watch_drafter()
            self._watch_builders()
        self.layout = str(cache_config.kv_cache_layout or "")
        self.num_blocks = int(cache_config.num_gpu_blocks or 0)
        self.capacity = int(cache_config.kv_cache_size_tokens or 0)
        self.num_groups = len(self._kv_cache_groups())
        self.runner_name = (
            f"{type(self._runner).__module__}.{type(self._runner).__name__}" if self._runner else ""
        )

    def preemptions(self) -> int:
        """Return how many times a request was preempted so far."""
        return sum(
            int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )

    def take_blocks(self) -> tuple[list[int], list[int]]:
        """Return the manager blocks of attention and of recurrent states since the last call."""
        taken = sorted(self._attention_blocks), sorted(self._state_blocks)
        self._attention_blocks.clear()
        self._state_blocks.clear()
        return taken

    def groups(self) -> list[KVGroup]:
        """Return geometry and recorded table rows, one entry per group and distinct spec."""
        return [
            self._describe(index, spec, names)
            for index, group in enumerate(self._kv_cache_groups())
            for spec, names in _layers_by_spec(group)
        ]

    def _kv_cache_groups(self) -> list[Any]:
        return list(self._runner.kv_cache_config.kv_cache_groups) if self._runner else []

    def _describe(self, index: int, spec: Any, names: list[str]) -> KVGroup:
        context = self._runner.vllm_config.compilation_config.static_forward_context
        cache = context[names[0]].kv_cache
        tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
        row = next((self._tables[name] for name in names if name in self._tables), None)
        description = KVGroup(
            group=index,
            spec=type(spec).__name__,
            layers=names,
            manager_block=int(spec.block_size),
            num_kv_heads=int(getattr(spec, "num_kv_heads", 0)),
            page_bytes=int(spec.page_size_bytes),
            block_stride=int(tensor.stride(0) * tensor.element_size()),
        )
        if row is not None:
            description.kernel_page = spec.block_size // row.pages_per_block
            description.manager_row = row.manager
            description.kernel_row = row.kernel
        return description

    def _watch_drafter(self) -> None:
        """Record the tokens that the drafter proposes (V1: ``drafter``, V2: ``speculator``)."""
        drafter = getattr(self._runner, "drafter", None) or getattr(
            self._runner, "speculator", None
        )
        if drafter is None:
            return
        propose = drafter.propose

        def recording_propose(*args: Any, **kwargs: Any) -> Any:
            proposed = propose(*args, **kwargs)
            tokens = proposed[0] if isinstance(proposed, tuple) else proposed
            self.drafts.append(tokens.tolist())
            return proposed

        drafter.propose = recording_propose

    def _watch_builders(self) -> None:
        """Record the block tables that the attention backends are given."""
        groups = [item for items in self._runner.attn_groups for item in items]
        for attention_group in groups:
            for builder in attention_group.metadata_builders:
                self._watch_builder(builder, attention_group)

    def _watch_builder(self, builder: Any, attention_group: Any) -> None:
        build = builder.build
        block_tokens = attention_group.kv_cache_spec.block_size

        def recording_build(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            common = kwargs["common_attn_metadata"] if "common_attn_metadata" in kwargs else args[1]
            kernel_table = getattr(metadata, "block_table", None)
            holder = self._state_blocks if kernel_table is None else self._attention_blocks
            holder.update(live_blocks(common, block_tokens))
            if kernel_table is not None:
                row = TableRow.longest(common, kernel_table, block_tokens)
                for name in attention_group.layer_names:
                    known = self._tables.get(name)
                    if known is None or row.tokens > known.tokens:
                        self._tables[name] = row
            return metadata

        builder.build = recording_build


def live_blocks(common: Any, block_tokens: int) -> set[int]:
    """Return the manager blocks that a batch's sequences reach into, without the null block.

    Parameters
    ----------
    common : vllm.v1.attention.backend.CommonAttentionMetadata
        What the model runner gave a builder.
    block_tokens : int
        Tokens of a manager block.
    """
    found: set[int] = set()
    for row, tokens in zip(common.block_table_tensor, common.seq_lens.tolist(), strict=False):
        found.update(row[: -(-tokens // block_tokens)].tolist())
    return found - {0}


class TableRow:
    """One request's row in the manager's block table and in the attention kernel's.

    Attributes
    ----------
    tokens : int
        Length of the request's sequence.
    pages_per_block : int
        Kernel pages in a manager block, by the widths of the two tables.
    manager, kernel : list of int
        The entries of the first live manager blocks.
    """

    def __init__(
        self, tokens: int, pages_per_block: int, manager: list[int], kernel: list[int]
    ) -> None:
        self.tokens = tokens
        self.pages_per_block = pages_per_block
        self.manager = manager
        self.kernel = kernel

    @classmethod
    def longest(cls, common: Any, kernel_table: Any, block_tokens: int) -> TableRow:
        """Take the row of the longest request of a batch.

        Parameters
        ----------
        common : vllm.v1.attention.backend.CommonAttentionMetadata
            What the model runner gave the builder.
        kernel_table : torch.Tensor
            int32 ``[num_reqs, width]``, what the builder gave the kernel.
        block_tokens : int
            Tokens of a manager block.
        """
        manager_table = common.block_table_tensor
        request = int(common.seq_lens.argmax())
        tokens = int(common.seq_lens[request])
        blocks = min(-(-tokens // block_tokens), RECORDED_BLOCKS)
        pages_per_block = kernel_table.shape[1] // manager_table.shape[1]
        return cls(
            tokens,
            pages_per_block,
            manager_table[request, :blocks].tolist(),
            kernel_table[request, : blocks * pages_per_block].tolist(),
        )


def _layers_by_spec(group: Any) -> list[tuple[Any, list[str]]]:
    """Split a group's layers by their own spec (packed groups hold several)."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is None:
        return [(group.kv_cache_spec, list(group.layer_names))]
    found: list[tuple[Any, list[str]]] = []
    for name in group.layer_names:
        for spec, names in found:
            if spec == specs[name]:
                names.append(name)
                break
        else:
            found.append((specs[name], [name]))
    return found
