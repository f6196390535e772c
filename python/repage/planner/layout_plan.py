# SPDX-License-Identifier: Apache-2.0
"""One layout as vLLM's planner sees it: groups, blocks, bytes, padding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from repage.errors import RepageError
from repage.vllm import compat
from repage.vllm.preference import planner_compat

LayerType = Literal["full", "sliding", "state", "other"]


class MixedPagesError(RepageError, ValueError):
    """A layout that cannot express the page sizes of a model."""


@dataclass(frozen=True)
class LayerPlan:
    """A layer inside its group's block.

    Parameters
    ----------
    name : str
        Name of the layer.
    kind : str
        Layers of one kind have the same cache; for people.
    type : str
        ``"full"``, ``"sliding"``, ``"state"`` or ``"other"``.
    offset : int
        Bytes from the start of the block, as if the layers of a group lay side by side; on
        layer-compact layouts each has a region of its own.
    page_bytes : int
        Bytes that the layer takes of every block, padding included.
    used_bytes : int
        Bytes of them that it fills.
    """

    name: str
    kind: str
    type: LayerType
    offset: int
    page_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class GroupPlan:
    """A KV-cache group: layers that share a block table.

    Parameters
    ----------
    layers : tuple of LayerPlan
        In the order of the block.
    block_tokens : int
        Tokens in a manager block.
    blocks_per_request : int
        Blocks that one request of maximum length may hold.
    """

    layers: tuple[LayerPlan, ...]
    block_tokens: int
    blocks_per_request: int


@dataclass(frozen=True)
class KernelPage:
    """The page that an attention kernel reads a kind of layer with.

    Parameters
    ----------
    kind : str
        Kind of layer.
    backend : str
        Attention backend.
    block_tokens : int
        Tokens in a manager block (N).
    page_tokens : int or None
        Tokens in a kernel page (P); None where no page fits.
    pages_per_block : int or None
        N / P.
    block_step, page_step : int or None
        Of the virtual page ids; None where the block is read whole.
    problem : str or None
        Why no page fits.
    """

    kind: str
    backend: str
    block_tokens: int
    page_tokens: int | None
    pages_per_block: int | None = None
    block_step: int | None = None
    page_step: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class LayoutPlan:
    """What a layout makes of a model, on the worker that it costs most.

    Parameters
    ----------
    layout : str
        Name, as in ``VLLM_KV_CACHE_LAYOUT``.
    groups : tuple of GroupPlan
        Groups of that worker.
    num_groups : int
        Groups of the whole model; pipeline stages without layers of a group still count it.
    bytes_per_block : int
        Bytes of a pool block; the block stride on packed layouts.
    bytes_per_request : int
        Bytes that a request of maximum length may hold.
    capacity_tokens : int or None
        Tokens that the cache holds as vLLM reports it; None while its memory is not known.
    padding_bytes_per_token : int
        Bytes per cached token of full attention that hold nothing: padding of pages, and slots
        of groups with fewer layers than the widest.
    padded_slots : int
        Empty layer slots in groups of full attention.
    mixed_page_sizes : bool
        Whether the layers' pages differ in size before the planner evens them out.
    kernel_pages : tuple of KernelPage
        Per kind of attention layer; empty where backends are not known.
    max_model_len : int
        Tokens of the request.
    """

    layout: str
    groups: tuple[GroupPlan, ...]
    num_groups: int
    bytes_per_block: int
    bytes_per_request: int
    capacity_tokens: int | None
    padding_bytes_per_token: int
    padded_slots: int
    mixed_page_sizes: bool
    max_model_len: int
    kernel_pages: tuple[KernelPage, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether blocks are outermost, so that layers of different pages share a block."""
        return self.layout.startswith("B")

    @property
    def blocks_per_request(self) -> int:
        """Blocks of all groups that a request of maximum length may hold."""
        return self.bytes_per_request // self.bytes_per_block

    def with_pages(self, pages: Sequence[KernelPage]) -> LayoutPlan:
        """Return the same plan with kernel pages."""
        return replace(self, kernel_pages=tuple(pages))


def plan_layout(
    config: Any,
    specs: Sequence[Mapping[str, Any]],
    layout: str,
    *,
    memory: int | None = None,
    min_group_layers: int = 1,
) -> LayoutPlan:
    """Run vLLM's planner under a layout, on copies.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        Neither it nor anything in it is changed.
    specs : sequence of mapping of str to vllm.v1.kv_cache_interface.KVCacheSpec
        Per worker, as collected for a run on this kind of layout.
    layout : str
        Name of a KV-cache layout.
    memory : int or None, default None
        Bytes for the KV cache on each worker.
    min_group_layers : int, default 1
        What if groups of a layer-compact layout held at least so many layers? 1 is vLLM's rule.

    Returns
    -------
    LayoutPlan

    Raises
    ------
    MixedPagesError
        When the layout cannot express the model's page sizes.
    """
    config = planning_config(config, layout)
    with planner_compat.quiet():
        try:
            groups = planner_compat.global_groups(config, specs)
            if min_group_layers > 1:
                groups = _widen_groups(specs, groups, min_group_layers)
            planner_compat.validate_layout(layout, groups)
        except (NotImplementedError, ValueError) as error:
            raise MixedPagesError(f"layout {layout}: {error}") from error
        workers = [
            (worker, planner_compat.worker_groups(groups, worker)) for worker in specs if worker
        ]
        costs = [planner_compat.bytes_per_request(config, own) for _, own in workers]
        worker, own = workers[costs.index(max(costs))]
        return _describe(config, layout, worker, own, memory, _has_mixed_pages(specs))


def planning_config(config: Any, layout: str, max_model_len: int | None = None) -> Any:
    """Copy a config so that the planner can run on it under a layout.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        Left as it is.
    layout : str
        Becomes the resolved layout of the copy.
    max_model_len : int or None, default None
        Replaces the model's.

    Returns
    -------
    vllm.config.VllmConfig
    """
    config = copy.copy(config)
    for name in ("cache_config", "model_config", "scheduler_config", "parallel_config"):
        object.__setattr__(config, name, copy.copy(getattr(config, name)))
    object.__setattr__(config.cache_config, "kv_cache_layout", layout)
    if max_model_len is not None:
        object.__setattr__(config.model_config, "max_model_len", max_model_len)
    return config


def layer_type(spec: Any) -> LayerType:
    """Return how a layer's cache grows.

    Parameters
    ----------
    spec : vllm.v1.kv_cache_interface.KVCacheSpec
        Of the layer.

    Returns
    -------
    str
        ``"full"``: with every token; ``"sliding"``: up to a window; ``"state"``: not at all.
    """
    interface = compat.kv_cache_interface()
    if isinstance(spec, interface.MambaSpec):
        return "state"
    if isinstance(spec, interface.SlidingWindowSpec | interface.ChunkedLocalAttentionSpec):
        return "sliding"
    return "full" if isinstance(spec, interface.FullAttentionSpec) else "other"


def layer_kind(name: str, spec: Any) -> str:
    """Describe the cache of a layer; layers with equal caches get equal words.

    Parameters
    ----------
    name : str
        Decides between target and drafter where the spec does not say.
    spec : vllm.v1.kv_cache_interface.KVCacheSpec
        Of the layer.

    Returns
    -------
    str
    """
    owner = "drafter " if getattr(spec, "is_draft", False) or name.startswith("draft.") else ""
    kind = layer_type(spec)
    if kind == "state":
        return f"{owner}state"
    if kind == "sliding":
        window = getattr(spec, "sliding_window", None) or spec.attention_chunk_size
        return f"{owner}sliding {window}, {spec.num_heads}x{spec.state_content_size_bytes} B"
    compression = "" if spec.tokens_per_state == 1 else f" per {spec.tokens_per_state} tokens"
    return f"{owner}full, {spec.num_heads}x{spec.state_content_size_bytes} B{compression}"


def used_bytes(spec: Any) -> int:
    """Return the bytes of a layer's page that are not padding."""
    return int(spec.real_page_size_bytes)


def _has_mixed_pages(specs: Sequence[Mapping[str, Any]]) -> bool:
    return len({spec.page_size_bytes for worker in specs for spec in worker.values()}) > 1


def _describe(
    config: Any,
    layout: str,
    worker: Mapping[str, Any],
    groups: Sequence[Any],
    memory: int | None,
    mixed: bool,
) -> LayoutPlan:
    block = planner_compat.bytes_per_block(config, groups)
    plans = tuple(_group_plan(config, group, worker) for group in groups if group.layer_names)
    capacity = (
        None if memory is None else planner_compat.capacity_tokens(config, groups, memory // block)
    )
    growing = [group for group in plans if group.layers[0].type == "full"]
    allocated = sum(block / group.block_tokens for group in growing)
    used = sum(layer.used_bytes / group.block_tokens for group in growing for layer in group.layers)
    return LayoutPlan(
        layout=layout,
        groups=plans,
        num_groups=len(groups),
        bytes_per_block=block,
        bytes_per_request=planner_compat.bytes_per_request(config, groups),
        capacity_tokens=capacity,
        padding_bytes_per_token=round(allocated - used),
        padded_slots=0 if mixed and layout.startswith("B") else _padded_slots(plans),
        mixed_page_sizes=mixed,
        max_model_len=int(config.model_config.max_model_len),
    )


def _group_plan(config: Any, group: Any, worker: Mapping[str, Any]) -> GroupPlan:
    layers = []
    offset = 0
    for name, spec in planner_compat.layer_specs(group).items():
        page = int(spec.page_size_bytes)
        own = worker[name]
        layers.append(
            LayerPlan(name, layer_kind(name, own), layer_type(spec), offset, page, used_bytes(spec))
        )
        offset += page
    first = next(iter(planner_compat.layer_specs(group).values()))
    return GroupPlan(
        tuple(layers), int(first.block_size), planner_compat.group_blocks(config, group)
    )


def _padded_slots(groups: Sequence[GroupPlan]) -> int:
    widest = max((len(group.layers) for group in groups), default=0)
    return sum(widest - len(group.layers) for group in groups if group.layers[0].type == "full")


def _widen_groups(
    specs: Sequence[Mapping[str, Any]], groups: Sequence[Any], min_layers: int
) -> list[Any]:
    """Regroup layers of equal caches so that each group has at least `min_layers` slots."""
    unified = {
        name: spec for group in groups for name, spec in planner_compat.layer_specs(group).items()
    }
    order = [name for worker in specs for name in worker]
    buckets: dict[Any, list[str]] = {}
    for name in dict.fromkeys(order):
        buckets.setdefault(unified[name], []).append(name)
    width = max(min_layers, *(len(group.layer_names) for group in groups))
    names = []
    for bucket in buckets.values():
        count = -(-len(bucket) // width)
        names += [bucket[index::count] for index in range(count)]
    return planner_compat.make_groups(unified, names) if names else []
