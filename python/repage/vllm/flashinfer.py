# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER on packed blocks: native fa2/fa3, XQA and trtllm-gen.

Writes go token by token through manager slots (``reshape_and_cache_flash``), so only reads are
re-paged. The native wrappers take a flat list of page ids, which is built straight from the
manager table; XQA and trtllm-gen take the 2-D page table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repage import KernelPageRules
from repage.errors import UnsupportedVllmError
from repage.vllm import compat
from repage.vllm.builder import RepagedBuilder
from repage.vllm.factory import repage_backend
from repage.vllm.kernel_rules import (
    FLASHINFER_NATIVE,
    FLASHINFER_NATIVE_SM120,
    XQA,
    XQA_SM90_FP8,
    both,
    trtllm_gen,
)
from repage.vllm.layouts import is_token_major
from repage.vllm.policy import BackendPolicy, PageContext

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from repage.vllm.table import GroupTable

_SOURCE_ATTRIBUTE = "repage_source"


class _Source:
    """What the page table of a batch is made from; attached to its tensor during the build.

    Parameters
    ----------
    table : GroupTable
        The builder's.
    pages : torch.Tensor
        int32 [R, W * r], the page table.
    block_table : torch.Tensor
        int32 [R, W], manager block ids.
    seq_lens : torch.Tensor or None
        int32 [R].
    unwritten : bool
        Whether the page table is still to be written.
    """

    def __init__(
        self,
        table: GroupTable,
        pages: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | None,
        *,
        unwritten: bool,
    ) -> None:
        self.block_table = block_table
        self._table = table
        self._pages = pages
        self._seq_lens = seq_lens
        self._unwritten = unwritten

    def write_list(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        """Write the page list, and the table where that is still to be done."""
        rows = kv_indptr.shape[0] - 1
        if self._unwritten and rows == self.block_table.shape[0]:
            self._table.fill(self._pages, self.block_table, self._seq_lens, kv_indptr, kv_indices)
            self._unwritten = False
        else:
            self._table.list_pages(self.block_table, kv_indptr, kv_indices)

    def write_table(self) -> None:
        """Write the table where that is still to be done."""
        if self._unwritten:
            self._table.fill(self._pages, self.block_table, self._seq_lens)
            self._unwritten = False


class FlashInferPolicy(BackendPolicy):
    """Pages of FLASHINFER, by the kernels that a group can run on this device."""

    name = "FLASHINFER"

    def page_rules(self, context: PageContext) -> KernelPageRules | None:
        """Return what every kernel accepts that may read the group's cache.

        Parameters
        ----------
        context : PageContext
            Without layers, the widest answer that any group of this spec may get.

        Returns
        -------
        repage.KernelPageRules or None
            None for an interior that a kernel of this device does not read; vLLM does not choose
            such a layout.
        """
        cache = _head_dim_and_element_size(context.spec)
        platform = compat.flashinfer_backend_module().current_platform
        if platform.is_device_capability_family(100):
            path = trtllm_gen(compat.flashinfer_version())
            if path.needs_head_major and is_token_major(context.layout):
                return None
            generated = path.for_cache(*cache)
            if _may_use_large_pages(context):
                return generated
            return both(FLASHINFER_NATIVE.for_cache(*cache), generated)
        if platform.is_device_capability_family(120):
            return both(FLASHINFER_NATIVE_SM120.for_cache(*cache), XQA.for_cache(*cache))
        native = FLASHINFER_NATIVE.for_cache(*cache)
        if platform.is_device_capability(90):
            fp8 = cache[1] == 1
            return both(native, (XQA_SM90_FP8 if fp8 else XQA).for_cache(*cache))
        return native

    def tensor_map(self, context: PageContext) -> str | None:
        """Return the tensor map of the decode kernel that a group may run on this device.

        Parameters
        ----------
        context : PageContext
            The cache asked about.

        Returns
        -------
        str or None
        """
        platform = compat.flashinfer_backend_module().current_platform
        if platform.is_device_capability_family(100):
            return trtllm_gen(compat.flashinfer_version()).tensor_map
        if platform.is_device_capability(90) and _head_dim_and_element_size(context.spec)[1] == 1:
            return XQA_SM90_FP8.tensor_map
        return None

    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return FlashInfer's own answer: packed layouts are in it already.

        Parameters
        ----------
        native : tuple of str or None
            None (any) in general, ``("LBHNC", "BLHNC")`` on SM100
            (``flashinfer.py:729-734``, 0.33.0).

        Returns
        -------
        tuple of str or None
        """
        return native


if TYPE_CHECKING:

    class _Parent:
        """``FlashInferMetadataBuilder``, which follows the mixin in the bases (factory.py)."""

        flashinfer_trtllm_api_decode_kernel: Any

        def _compute_flashinfer_kv_metadata(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Parent = object


class RepagedFlashInferBuilder(RepagedBuilder, _Parent):
    """Mixin before ``FlashInferMetadataBuilder``: page lists come from the manager table."""

    def parent_table(
        self, table: GroupTable, block_table: torch.Tensor, seq_lens: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the page table, marked with the manager table that page lists are built from.

        Parameters
        ----------
        table : GroupTable
            This builder's.
        block_table : torch.Tensor
            int32 [R, W], manager block ids.
        seq_lens : torch.Tensor or None
            int32 [R].

        Returns
        -------
        torch.Tensor
            int32 [R, W * r]. Where no kernel of the group takes a 2-D table it is not filled in,
            and where the parent only passes it on, not yet: one launch then writes the page list
            too, if the batch has one.
        """
        unwritten = False
        if compat.flashinfer_backend_module().current_platform.is_device_capability_family(100):
            # Prefill with trtllm-gen and an fp8 cache copies entries during the build
            # (flashinfer.py:1613-1632, 0.32.0).
            pages = table.build(block_table, seq_lens)
        else:
            pages = table.unfilled(block_table)
            # Below SM100 prefill is native always, decode where XQA was not chosen for the group
            # (utils/flashinfer.py:675-697, 0.33.0).
            unwritten = self.flashinfer_trtllm_api_decode_kernel is not None
        source = _Source(table, pages, block_table, seq_lens, unwritten=unwritten)
        setattr(pages, _SOURCE_ATTRIBUTE, source)
        return pages

    def complete_table(self, pages: torch.Tensor) -> None:
        """Write the table of a batch that had no page list.

        Parameters
        ----------
        pages : torch.Tensor
            From `parent_table`.
        """
        source: _Source = getattr(pages, _SOURCE_ATTRIBUTE)
        delattr(pages, _SOURCE_ATTRIBUTE)  # the tensor may serve the next batch too
        source.write_table()

    def _compute_flashinfer_kv_metadata(
        self,
        num_blocks_np: Any,
        seq_lens_np: Any,
        block_table_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # A copy or a slice of the table has lost its mark, and its own entries may be unfilled.
        if self.group_table is not None and not hasattr(block_table_tensor, _SOURCE_ATTRIBUTE):
            raise UnsupportedVllmError(
                "FlashInferMetadataBuilder: page lists are built from another table than the one "
                "that repage made; expected the tensor of CommonAttentionMetadata. Set "
                "REPAGE_DISABLE=1, or a layer-compact VLLM_KV_CACHE_LAYOUT"
            )
        lists: torch.Tensor = super()._compute_flashinfer_kv_metadata(
            num_blocks_np, seq_lens_np, block_table_tensor, *args, **kwargs
        )
        return lists


class PageListKernel:
    """Stands for vLLM's kernel that copies table rows into ``paged_kv_indices``.

    A page table that repage made carries its manager table: the list is then built from that one,
    in one launch with the table where that is still to be written. Every other table goes to
    vLLM's kernel (``flashinfer.py:1535``, 0.33.0).

    Parameters
    ----------
    stock : Any
        vLLM's kernel.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launch on a grid, as Triton kernels do."""

        def launch(
            page_indices: torch.Tensor,
            block_table: torch.Tensor,
            block_table_stride: int,
            cu_num_blocks: torch.Tensor,
            **options: Any,
        ) -> None:
            source: _Source | None = getattr(block_table, _SOURCE_ATTRIBUTE, None)
            if source is None:
                stock = self._stock[grid]
                stock(page_indices, block_table, block_table_stride, cu_num_blocks, **options)
                return
            source.write_list(cu_num_blocks, page_indices)

        return launch


def _head_dim_and_element_size(spec: Any) -> tuple[int, int]:
    element_size = spec.dtype.itemsize
    return int(spec.head_size), int(element_size)


def _may_use_large_pages(context: PageContext) -> bool:
    """Whether every layer of a group decodes and prefills with trtllm-gen.

    vLLM asks this of the model and asserts it of the group (``flashinfer.py:589`` and ``:1001``,
    0.33.0); pages above 64 tokens have no other kernel.
    """
    config = context.vllm_config
    if config is None:
        return True
    module = compat.flashinfer_backend_module()
    heads = compat.group_heads(config, context.layer_names)
    return (
        heads is not None
        and heads[0] // heads[1] > 1
        and module.can_use_trtllm_attention(*heads)
        and not compat.may_be_non_causal(config, context.layer_names)
    )


def _install_page_list_kernel() -> None:
    module: Any = compat.flashinfer_backend_module()
    stock = module._copy_page_indices_kernel
    if not isinstance(stock, PageListKernel):
        module._copy_page_indices_kernel = PageListKernel(stock)


def repage_flashinfer(parent: type[Any], *, module: str) -> type[Any]:
    """Re-page vLLM's FlashInfer backend class.

    Parameters
    ----------
    parent : type
        ``FlashInferBackend``, or a subclass of it.
    module : str
        As in `repage_backend`.

    Returns
    -------
    type
    """
    _install_page_list_kernel()
    return repage_backend(
        parent, FlashInferPolicy(), module=module, builder_mixin=RepagedFlashInferBuilder
    )
