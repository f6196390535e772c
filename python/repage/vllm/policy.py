# SPDX-License-Identifier: Apache-2.0
"""What one family of attention backends needs of re-paging, and the choice of its page."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from repage import KernelPageRules
from repage.vllm import compat
from repage.vllm.layouts import is_token_major


@dataclass(frozen=True)
class PageContext:
    """The cache for which a family is asked for its page rules.

    Parameters
    ----------
    spec : vllm.v1.kv_cache_interface.AttentionSpec
        In manager terms: ``block_size`` is N.
    layout : vllm.v1.kv_cache_layout.KVCacheLayout
        Block-outermost.
    vllm_config : vllm.config.VllmConfig or None, default None
        None while specs are collected.
    layer_names : tuple of str, default ()
        The builder's layers; empty while specs are collected. Rules may only become narrower with
        them: the block stride was aligned for the pages allowed without.
    """

    spec: Any
    layout: Any
    vllm_config: Any | None = None
    layer_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageChoice:
    """The page of one builder: made once, then carried by its metadata and pushed to its layers.

    Parameters
    ----------
    page_tokens : int
        Tokens of a kernel page (P), below `block_tokens`.
    block_tokens : int
        Tokens of a manager block (N).
    rules : repage.KernelPageRules
        Allow exactly this page, and carry the family's limits on strides and ids.
    """

    page_tokens: int
    block_tokens: int
    rules: KernelPageRules


class BackendPolicy(ABC):
    """One family of backends; instances are stateless and shared.

    Attributes
    ----------
    name : str
        For log lines and errors.
    writes_kernel_pages : bool
        True where the bytes inside a page depend on the page size, so that writes must use the
        pages that reads use; slot mappings are then translated.
    """

    name: str = "backend"
    writes_kernel_pages: bool = False

    @abstractmethod
    def page_rules(self, context: PageContext) -> KernelPageRules | None:
        """Return the pages that the kernels take for a cache.

        Parameters
        ----------
        context : PageContext
            The cache asked about.

        Returns
        -------
        repage.KernelPageRules or None
            None where the family's own answer needs no re-paging.
        """

    @abstractmethod
    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the layouts of the re-paged backend, most preferred first.

        Parameters
        ----------
        native : tuple of str or None
            The parent's answer; None means any.

        Returns
        -------
        tuple of str or None
        """

    def tensor_map(self, context: PageContext) -> str | None:  # noqa: ARG002
        """Return the tensor map into which a kernel of the family encodes the view's strides.

        Parameters
        ----------
        context : PageContext
            The cache asked about.

        Returns
        -------
        str or None
            A key of `repage.tensor_map.TENSOR_MAP_RULES`; None where no kernel uses TMA.
        """
        return None

    def on_builder_created(self) -> None:
        """Run in the worker whenever one of the family's builders is created; idempotent."""
        return


def is_repageable(spec: Any) -> bool:
    """Whether a spec is a plain token cache: one state per token, allocated by the manager.

    Parameters
    ----------
    spec : vllm.v1.kv_cache_interface.KVCacheSpec or None
        Of one layer.

    Returns
    -------
    bool
        False for encoder-only attention, which keeps no cache, and for compressed or pooled
        caches, which vLLM maps itself (``v1/worker/utils.py``, 0.32.0 and 0.33.0).
    """
    interface = compat.kv_cache_interface()
    return (
        isinstance(spec, interface.AttentionSpec)
        and not isinstance(spec, interface.EncoderOnlyAttentionSpec)
        and bool(spec.tokens_per_state == 1)
    )


def refusal_reason(policy: BackendPolicy, spec: Any) -> str | None:
    """Say why a cache must not be split into kernel pages, if so.

    Parameters
    ----------
    policy : BackendPolicy
        The family.
    spec : vllm.v1.kv_cache_interface.AttentionSpec
        The cache.

    Returns
    -------
    str or None
        A sentence for an error; None where nothing speaks against it.
    """
    if spec.kv_quant_mode.is_nvfp4 and not policy.writes_kernel_pages:
        return (
            f"{policy.name}: an NVFP4 cache keeps its scales apart inside each page, so its bytes "
            "depend on the page size, and they are written by manager block. Use a layer-compact "
            "VLLM_KV_CACHE_LAYOUT (LBNHC or LBHNC) or another --kv-cache-dtype."
        )
    return None


def page_unit_bytes(spec: Any, layout: Any, page_tokens: int) -> int:
    """Return the bytes from one kernel page of a block to the next (u).

    Parameters
    ----------
    spec : vllm.v1.kv_cache_interface.AttentionSpec
        The cache.
    layout : vllm.v1.kv_cache_layout.KVCacheLayout
        Decides whether a token's stride spans one head or all of them.
    page_tokens : int
        Tokens of a kernel page (P).

    Returns
    -------
    int
    """
    heads = spec.num_heads if is_token_major(layout) else 1
    return int(page_tokens * heads * spec.state_content_size_bytes)


def smallest_page(rules: KernelPageRules) -> int:
    """Return the page of which every manager block that the family can use is a multiple.

    Parameters
    ----------
    rules : repage.KernelPageRules
        Of the family.

    Returns
    -------
    int
        The greatest common divisor of all allowed pages, in tokens.
    """
    sizes = (
        rules.page_sizes if rules.multiple_of is None else (*rules.page_sizes, rules.multiple_of)
    )
    return math.gcd(*sizes)


def choose_page(
    policy: BackendPolicy, context: PageContext, *, stride_is_aligned: bool = False
) -> PageChoice | None:
    """Choose the largest page of a family that divides a manager block.

    Parameters
    ----------
    policy : BackendPolicy
        The family.
    context : PageContext
        The cache.
    stride_is_aligned : bool, default False
        The spec comes back from vLLM's planner, so its block stride is a multiple of
        ``spec.block_stride_alignment``. For kernels that cannot take overlapping pages, pages
        with which it is also a multiple of the page unit go first then: the planner may have
        made the block larger than it was when the stride was aligned.

    Returns
    -------
    PageChoice or None
        None where the cache is not split: it is no plain token cache, the block is a page itself,
        or no page divides it (vLLM then reports that in its own words).
    """
    spec = context.spec
    rules = policy.page_rules(context) if is_repageable(spec) else None
    if rules is None:
        return None
    block_tokens = int(spec.block_size)
    pages = [page for page in rules.candidates(block_tokens) if block_tokens % page == 0]
    if stride_is_aligned and not rules.allow_overlapping_pages:
        alignment = spec.get_block_stride_alignment()
        pages.sort(
            key=lambda page: (
                page != block_tokens
                and alignment % page_unit_bytes(spec, context.layout, page) != 0
            )
        )
    if not pages or pages[0] == block_tokens:
        return None
    page_tokens = pages[0]
    exact = replace(rules, page_sizes=(page_tokens,), multiple_of=None, max_page_tokens=None)
    return PageChoice(page_tokens, block_tokens, exact)
