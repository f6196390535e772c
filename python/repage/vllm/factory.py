# SPDX-License-Identifier: Apache-2.0
"""One factory that re-pages any attention backend of vLLM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from repage.errors import ArgumentError, RepagingRefusedError
from repage.vllm import compat
from repage.vllm.builder import RepagedBuilder
from repage.vllm.impl import RepagedImpl, RepagedWritingImpl
from repage.vllm.layouts import packed_layout
from repage.vllm.policy import (
    BackendPolicy,
    PageContext,
    choose_page,
    is_repageable,
    page_unit_bytes,
    refusal_reason,
    smallest_page,
)

if TYPE_CHECKING:

    class _Parent:
        """The backend class of vLLM that follows the mixin in the bases."""

        @classmethod
        def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]: ...

        @classmethod
        def customize_spec(cls, spec: Any) -> Any: ...

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None: ...
else:
    _Parent = object


class RepagedBackend(_Parent):
    """Mixin before an ``AttentionBackend``: what it answers vLLM about blocks and layouts.

    Attributes
    ----------
    repage_policy : BackendPolicy
        Set by the factory.
    """

    repage_policy: ClassVar[BackendPolicy]

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Answer which blocks the kernels take.

        Parameters
        ----------
        kv_cache_spec : vllm.v1.kv_cache_interface.KVCacheSpec or None, default None
            None at model load. ``block_size == 1`` is vLLM's probe for the block of a
            sliding-window layer (``model_executor/layers/attention/attention.py:642-663``,
            0.32.0).

        Returns
        -------
        list of int or MultipleOf
            The parent's answer at model load, on layer-compact layouts, and for caches that are
            not split; vLLM aligns hybrid blocks to its minimum (``platforms/interface.py:1068``).
            On a packed layout, whole manager blocks: ``[MultipleOf(P)]``. The native sizes would
            give each sliding-window layer its smallest block, which on a packed layout occupies a
            whole pool block.
        """
        native = super().get_supported_kernel_block_sizes(kv_cache_spec)
        layout = packed_layout() if is_repageable(kv_cache_spec) else None
        if layout is None:
            return native
        context = PageContext(kv_cache_spec, layout)
        if kv_cache_spec.block_size == 1:
            # Every block that another layer may have is a multiple of the smallest page, so vLLM
            # takes the primary block, whose page is chosen when the spec comes back with it.
            rules = cls.repage_policy.page_rules(context)
            return native if rules is None else [compat.multiple_of(smallest_page(rules))]
        choice = choose_page(cls.repage_policy, context)
        return native if choice is None else [compat.multiple_of(choice.page_tokens)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Add to the parent's spec that the block stride is a multiple of the page unit.

        Virtual pages then tile the pool. vLLM derives such an alignment itself only from answers
        of fixed sizes (``v1/worker/utils.py:476-486``, 0.32.0).

        Parameters
        ----------
        spec : vllm.v1.kv_cache_interface.AttentionSpec
            As vLLM's attention layer made it.

        Returns
        -------
        vllm.v1.kv_cache_interface.AttentionSpec

        Raises
        ------
        RepagingRefusedError
            For a cache format that must not be split; specs are collected before memory is
            allocated.
        """
        spec = super().customize_spec(spec)
        layout = packed_layout() if is_repageable(spec) and spec.block_size > 1 else None
        choice = (
            None if layout is None else choose_page(cls.repage_policy, PageContext(spec, layout))
        )
        if choice is None:
            return spec
        reason = refusal_reason(cls.repage_policy, spec)
        if reason is not None:
            raise RepagingRefusedError(reason)
        unit = page_unit_bytes(spec, layout, choice.page_tokens)
        alignment = math.lcm(spec.get_block_stride_alignment(), unit)
        return replace(spec, block_stride_alignment=alignment)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        """Return the layouts that the re-paged kernels read, most preferred first.

        Returns
        -------
        tuple of vllm.v1.kv_cache_layout.KVCacheLayout or None
            None for any.
        """
        native = super().supported_kv_cache_layouts()
        names = cls.repage_policy.supported_layouts(
            None if native is None else tuple(layout.name for layout in native)
        )
        if names is None:
            return None
        layouts = (compat.layout_by_name(name) for name in names)
        return tuple(layout for layout in layouts if layout is not None)


def repage_backend(
    parent: type[Any],
    policy: BackendPolicy,
    *,
    module: str,
    builder_mixin: type[RepagedBuilder] = RepagedBuilder,
    impl_mixin: type[RepagedImpl] | None = None,
) -> type[Any]:
    """Derive a backend that reads packed manager blocks as kernel pages.

    Parameters
    ----------
    parent : type
        A concrete ``vllm.v1.attention.backend.AttentionBackend``.
    policy : BackendPolicy
        The family's pages, layouts and table form.
    module : str
        ``__name__`` of the module that keeps the result under its own name: vLLM tells backends
        apart by module and name.
    builder_mixin : type, default RepagedBuilder
        A subclass of it, for families whose builders need more than another table.
    impl_mixin : type or None, default None
        A subclass of `RepagedImpl`, for families that read the cache in other methods than
        ``forward``. None takes `RepagedImpl`, or `RepagedWritingImpl` where the policy writes
        kernel pages.

    Returns
    -------
    type
        ``Repaged<parent's name>``, a subclass of `parent` whose builder and impl are subclasses of
        the parent's. Its ``get_name()`` is the parent's.

    Raises
    ------
    ArgumentError
        When the policy writes through kernel pages, but the parent writes inside ``forward``,
        where the slot mapping cannot be translated.
    """
    if policy.writes_kernel_pages and parent.forward_includes_kv_cache_update:
        raise ArgumentError(
            f"parent: {parent.__name__} writes the cache in forward(); expected a backend with "
            f"do_kv_cache_update for the policy {policy.name}, which writes kernel pages"
        )
    if impl_mixin is None:
        impl_mixin = RepagedWritingImpl if policy.writes_kernel_pages else RepagedImpl
    builder = _derive(parent.get_builder_cls(), builder_mixin, module, {"repage_policy": policy})
    impl = _derive(parent.get_impl_cls(), impl_mixin, module, {})
    return _derive(
        parent,
        RepagedBackend,
        module,
        {
            "repage_policy": policy,
            "get_builder_cls": staticmethod(lambda: builder),
            "get_impl_cls": staticmethod(lambda: impl),
        },
    )


def _derive(
    parent: type[Any], mixin: type[Any], module: str, attributes: dict[str, Any]
) -> type[Any]:
    name = f"Repaged{parent.__name__}"
    return type(name, (mixin, parent), {"__module__": module, "__qualname__": name, **attributes})
