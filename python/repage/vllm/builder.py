# SPDX-License-Identifier: Apache-2.0
"""Metadata builders whose parent sees kernel pages where vLLM manages blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from repage.errors import RepagingRefusedError
from repage.vllm import compat
from repage.vllm.impl import CHOICE_ATTRIBUTE, push_choice
from repage.vllm.layouts import packed_layout
from repage.vllm.logs import log_once
from repage.vllm.policy import BackendPolicy, PageContext, choose_page
from repage.vllm.refusals import page_refusal
from repage.vllm.table import GroupTable

if TYPE_CHECKING:
    import torch

    class _Parent:
        """The builder class of vLLM that follows the mixin in the bases (factory.py)."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def build(self, *args: Any, **kwargs: Any) -> Any: ...

        def update_block_table(self, *args: Any, **kwargs: Any) -> Any: ...

        def update_draft_decode_metadata(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Parent = object


class RepagedBuilder(_Parent):
    """Mixin before an ``AttentionMetadataBuilder``.

    The parent is made with a spec of P-token blocks and gets page ids for block ids; everything
    else in its metadata stays as vLLM made it. ``build_for_cudagraph_capture`` and
    ``build_for_drafting`` come down to `build` in every backend, so they need nothing here.

    Where the run is not packed, or a block is a page itself, every method passes its arguments on
    as they came.

    Attributes
    ----------
    repage_policy : BackendPolicy
        Of the backend; set by the factory.
    group_table : GroupTable or None
        None where nothing is re-paged.
    """

    repage_policy: ClassVar[BackendPolicy]

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Decide on the page, once, and make the parent with it.

        Parameters
        ----------
        kv_cache_spec : vllm.v1.kv_cache_interface.AttentionSpec
            In manager terms. The attribute of that name keeps it: vLLM's chunked-local and
            cross-attention wrappers use its block size with the manager table
            (``model_executor/layers/attention/chunked_local_attention.py:58``, 0.32.0).
        layer_names : list of str
            Kept by reference; may grow.
        vllm_config : vllm.config.VllmConfig
            Its cache config names the resolved layout.
        device : torch.device
            Of the metadata.
        *args, **kwargs
            Passed on; a ``block_table_width`` is turned into pages.

        Raises
        ------
        RepagingRefusedError
            When the model or the cache must not be re-paged. vLLM makes builders before it
            allocates the KV cache.
        """
        self.group_table: GroupTable | None = None
        layout = packed_layout(vllm_config)
        choice = None
        if layout is not None:
            context = PageContext(kv_cache_spec, layout, vllm_config, tuple(layer_names))
            choice = choose_page(self.repage_policy, context, stride_is_aligned=True)
        parent_spec = kv_cache_spec
        if choice is not None:
            reason = page_refusal(self.repage_policy, context, choice)
            if reason is not None:
                raise RepagingRefusedError(reason)
            parent_spec = kv_cache_spec.copy_with_new_block_size(choice.page_tokens)
            if "block_table_width" in kwargs:
                kwargs["block_table_width"] *= choice.block_tokens // choice.page_tokens
        super().__init__(parent_spec, layer_names, vllm_config, device, *args, **kwargs)
        self.kv_cache_spec = kv_cache_spec
        if choice is not None and layout is not None:
            chunked = compat.kv_cache_interface().ChunkedLocalAttentionSpec
            self.group_table = GroupTable(
                choice,
                layer_names,
                vllm_config,
                device,
                # Each batch of virtual chunks has its own width, and no CUDA graph
                # (chunked_local_attention.py:43-53, 0.32.0).
                persistent=not isinstance(kv_cache_spec, chunked),
            )
            log_once(
                logging.INFO,
                f"repage: {self.repage_policy.name} reads {layout.name} blocks of "
                f"{choice.block_tokens} tokens as {choice.page_tokens}-token kernel pages",
            )
        push_choice(vllm_config.compilation_config.static_forward_context, layer_names, choice)
        self.repage_policy.on_builder_created()

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Build the parent's metadata on kernel pages.

        Parameters
        ----------
        common_prefix_len, *args, **kwargs
            As in the parent.
        common_attn_metadata : vllm.v1.attention.backend.CommonAttentionMetadata
            In manager terms; not changed.

        Returns
        -------
        Any
            The parent's metadata. It carries the page choice, so that the impl need not ask the
            config of the moment, which at forward time may be another one.

        Raises
        ------
        GeometryError, NoValidPageError
            When the layers' caches cannot be read so; see `GroupTable.plan`.
        """
        table = self.group_table
        if table is None:
            return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        common = common_attn_metadata.replace(
            block_table_tensor=self.parent_table(
                table, common_attn_metadata.block_table_tensor, common_attn_metadata.seq_lens
            )
        )
        metadata = super().build(common_prefix_len, common, *args, **kwargs)
        self.complete_table(common.block_table_tensor)
        setattr(metadata, CHOICE_ATTRIBUTE, table.choice)
        return metadata

    def update_block_table(
        self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        """Give another group's metadata this group's table.

        Parameters
        ----------
        metadata : Any
            Built by a builder of the same class and spec, for another group.
        blk_table : torch.Tensor
            int32 [R, W], manager block ids of this group.
        slot_mapping : torch.Tensor
            int64 [T], manager slots of this group.

        Returns
        -------
        Any
            The parent's result, with this builder's choice in place of a copied one.
        """
        table = self.group_table
        if table is None:
            return super().update_block_table(metadata, blk_table, slot_mapping)
        pages = self.parent_table(table, blk_table, getattr(metadata, "seq_lens", None))
        updated = super().update_block_table(metadata, pages, slot_mapping)
        self.complete_table(pages)
        setattr(updated, CHOICE_ATTRIBUTE, table.choice)
        return updated

    def update_draft_decode_metadata(self, metadata: Any) -> Any:
        """Refresh the page table, then what the parent refreshes.

        Speculators record this in their draft graphs and replay it for later batches without a
        build. The table goes first: FlashAttention's method returns early
        (``v1/attention/backends/flash_attn.py:1030-1032``, 0.32.0).

        Parameters
        ----------
        metadata : Any
            Of the last `build`.

        Returns
        -------
        Any
            The parent's result.
        """
        if self.group_table is not None:
            self.group_table.refresh()
        return super().update_draft_decode_metadata(metadata)

    def parent_table(
        self, table: GroupTable, block_table: torch.Tensor, seq_lens: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the parent gets as its block table; families may override it.

        Parameters
        ----------
        table : GroupTable
            This builder's.
        block_table : torch.Tensor
            int32 [R, W], manager block ids.
        seq_lens : torch.Tensor or None
            int32 [R], tokens per row.

        Returns
        -------
        torch.Tensor
            int32 [R, W * r], page ids.
        """
        return table.build(block_table, seq_lens)

    def complete_table(self, pages: torch.Tensor) -> None:
        """Finish what `parent_table` gave the parent, which is done with its build.

        Parameters
        ----------
        pages : torch.Tensor
            From `parent_table`.
        """
