# SPDX-License-Identifier: Apache-2.0
"""Choosing the kernel page for a layer: what a kernel accepts against what a geometry allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from repage import _core
from repage.errors import GeometryError, NoValidPageError
from repage.geometry import BlockGeometry

_INT32_MAX = 2**31 - 1
# cuTensorMapEncodeTiled takes strides below 2**40 (CUDA 13.0, cuda.h).
_MAX_TENSOR_MAP_STRIDE = 2**40 - 1


@dataclass(frozen=True)
class KernelPageRules:
    """What an attention kernel accepts as pages.

    The defaults are what every paged kernel of FlashInfer 0.7.2 and FlashAttention 4 asks for:
    16-byte vector loads, int32 page ids, and strides that a tensor map can hold.

    Parameters
    ----------
    name : str, default "kernel"
        Named in errors.
    page_sizes : tuple of int, default ()
        Exact page sizes in tokens.
    multiple_of : int or None, default None
        Any multiple of this many tokens, in addition to `page_sizes`.
    max_page_tokens : int or None, default None
        Largest page in tokens, whatever the other two say.
    stride_alignment : int, default 16
        Bytes of which the page, head and token strides must be multiples.
    base_alignment : int, default 16
        Bytes of which the layer's offset in the allocation must be a multiple.
    max_stride_bytes : int, default 2**40 - 1
        Largest stride in bytes.
    max_stride_elements : int or None, default None
        Largest stride in cache elements, for kernels that keep strides in 32 bits.
    max_page_index : int, default 2**31 - 1
        Largest page id.
    allow_overlapping_pages : bool, default True
        Whether virtual pages may overlap, as they do when the distance of two pages does not
        divide the block stride. Right for kernels that add up addresses; not proven for tensor
        maps.
    requires_dense_pages : bool, default False
        Whether the kernel derives strides from shapes: a page is then one run of bytes and the
        next page begins where it ends.
    """

    name: str = "kernel"
    page_sizes: tuple[int, ...] = ()
    multiple_of: int | None = None
    max_page_tokens: int | None = None
    stride_alignment: int = 16
    base_alignment: int = 16
    max_stride_bytes: int = _MAX_TENSOR_MAP_STRIDE
    max_stride_elements: int | None = None
    max_page_index: int = _INT32_MAX
    allow_overlapping_pages: bool = True
    requires_dense_pages: bool = False

    def __post_init__(self) -> None:
        if not self.page_sizes and self.multiple_of is None:
            raise GeometryError(
                f"{self.name}: page_sizes and multiple_of are both empty; expected at least one"
            )
        for name in ("multiple_of", "max_page_tokens", "max_stride_elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GeometryError(f"{self.name}: {name} must be at least 1, got {value}")
        for name in ("stride_alignment", "base_alignment", "max_stride_bytes"):
            if getattr(self, name) < 1:
                raise GeometryError(
                    f"{self.name}: {name} must be at least 1, got {getattr(self, name)}"
                )
        if any(size < 1 for size in self.page_sizes):
            raise GeometryError(
                f"{self.name}: page_sizes must be at least 1, got {self.page_sizes}"
            )

    def accepts(self, page_tokens: int) -> bool:
        """Whether the kernel has pages of this many tokens, on any geometry."""
        if self.max_page_tokens is not None and page_tokens > self.max_page_tokens:
            return False
        if page_tokens in self.page_sizes:
            return True
        return self.multiple_of is not None and page_tokens % self.multiple_of == 0

    def candidates(self, block_tokens: int) -> tuple[int, ...]:
        """Page sizes worth trying for a manager block, largest first.

        Parameters
        ----------
        block_tokens : int
            Tokens in a manager block.

        Returns
        -------
        tuple of int
            The exact sizes (those that do not divide too, so that an error can name them) and
            the divisors of the block which are a multiple of `multiple_of`.
        """
        sizes = set(self.page_sizes)
        if self.multiple_of is not None:
            sizes.update(_divisors(block_tokens))
        return tuple(sorted((size for size in sizes if self.accepts(size)), reverse=True))


@dataclass(frozen=True)
class PagePlan:
    """Kernel pages of one layer: the result of `plan_pages`.

    Parameters
    ----------
    geometry : BlockGeometry
        The layer's blocks.
    page_tokens : int
        Tokens in a kernel page (P).

    Raises
    ------
    GeometryError
        When no page map exists for them.

    Notes
    -----
    With ``g = page_stride``, virtual page ``v`` begins ``v * g`` bytes after the layer's first
    block, and ``page(b, j) = b * block_step + j * page_step``.
    """

    geometry: BlockGeometry
    page_tokens: int

    def __post_init__(self) -> None:
        _ = self.page_map  # raises where there is none

    @cached_property
    def page_map(self) -> _core.PageMap:
        """The plain-data map that kernels take (``repage/page_map.h``)."""
        return self.geometry.page_map(self.page_tokens)

    @property
    def pages_per_block(self) -> int:
        """Kernel pages in a manager block (r = N / P)."""
        return self.geometry.block_tokens // self.page_tokens

    @property
    def page_unit(self) -> int:
        """Bytes from one page of a block to the next (u)."""
        return self.page_tokens * self.geometry.token_stride

    @cached_property
    def page_stride(self) -> int:
        """Bytes from one virtual page to the next (g = gcd(S, u))."""
        return self.page_map.page_stride

    @cached_property
    def block_step(self) -> int:
        """Virtual pages from one block to the next (S / g)."""
        return self.page_map.block_step

    @cached_property
    def page_step(self) -> int:
        """Virtual pages from one page of a block to the next (u / g); above 1 pages overlap."""
        return self.page_map.page_step

    @cached_property
    def num_virtual_pages(self) -> int:
        """Pages of the virtual view; each lies whole inside the blocks' memory."""
        return self.page_map.num_virtual_pages

    @property
    def max_page_id(self) -> int:
        """The largest id that a page table can hold."""
        return self.page_map.max_page_id()

    def page(self, block: int, index: int) -> int:
        """Return the virtual page id of one kernel page.

        Parameters
        ----------
        block : int
            Manager block id.
        index : int
            Kernel page inside the block, 0 <= index < pages_per_block.

        Returns
        -------
        int

        Raises
        ------
        GeometryError
            When either is out of range.
        """
        if not 0 <= block < self.geometry.num_blocks:
            raise GeometryError(f"block: expected 0 .. {self.geometry.num_blocks - 1}, got {block}")
        if not 0 <= index < self.pages_per_block:
            raise GeometryError(f"index: expected 0 .. {self.pages_per_block - 1}, got {index}")
        return self.page_map.page_id(block, index)

    def locate_token(self, token: int) -> tuple[int, int, int]:
        """Return where a token of a sequence lies.

        Parameters
        ----------
        token : int
            Position in the sequence, 0 <= token < 2**31.

        Returns
        -------
        tuple of int
            Column of the manager block table, kernel page inside that block, token inside that
            page.

        Raises
        ------
        GeometryError
            When the token is out of range.
        """
        if not 0 <= token <= _INT32_MAX:
            raise GeometryError(f"token: expected 0 .. 2**31 - 1, got {token}")
        return self.page_map.locate_token(token)

    def map_slot(self, slot: int) -> int:
        """Return the slot of the virtual view for a manager slot.

        Parameters
        ----------
        slot : int
            ``block * N + token``; negative for padding.

        Returns
        -------
        int
            ``page * P + offset``. Padding stays as it is; a slot past the pool becomes -1.

        Raises
        ------
        GeometryError
            When the slot does not fit 64 bits.
        """
        if not -(2**63) <= slot < 2**63:
            raise GeometryError(f"slot: expected a 64-bit integer, got {slot}")
        return self.page_map.virtual_slot(slot)

    def over_read_tokens(self, seq_len: int) -> int:
        """Count the tokens past a sequence's end that a kernel of whole pages may read.

        Whatever lies there must be finite, so blocks that held something else are zeroed before
        they hold keys and values: 0 * NaN is NaN.

        Parameters
        ----------
        seq_len : int
            Tokens of the sequence.

        Returns
        -------
        int
            The rest of its last page; 0 for an empty sequence.

        Raises
        ------
        GeometryError
            When the length is negative.
        """
        if seq_len < 0:
            raise GeometryError(f"seq_len: expected 0 or more tokens, got {seq_len}")
        return -seq_len % self.page_tokens


def plan_pages(geometry: BlockGeometry, rules: KernelPageRules) -> PagePlan:
    """Choose the largest page that a kernel accepts on a geometry.

    Parameters
    ----------
    geometry : BlockGeometry
        The layer's packed blocks.
    rules : KernelPageRules
        What the kernel accepts.

    Returns
    -------
    PagePlan
        With the largest page that satisfies every rule. Where pages of two sizes are valid and
        only the smaller one tiles the pool, the larger one is still chosen if the rules allow
        overlapping pages.

    Raises
    ------
    NoValidPageError
        When no candidate is valid. It says which rule failed for which candidate, and names the
        nearest manager block or block stride that would work.
    """
    failures: list[tuple[int, str]] = []
    suggestions: list[str] = []
    for page_tokens in rules.candidates(geometry.block_tokens):
        failure, suggestion = _first_failure(geometry, rules, page_tokens)
        if failure is None:
            return PagePlan(geometry, page_tokens)
        failures.append((page_tokens, failure))
        if suggestion is not None and suggestion not in suggestions:
            suggestions.append(suggestion)
    if not failures:
        suggestions.append(_nearest_block_for_multiple(geometry.block_tokens, rules))
        reasons = "no divisor of it qualifies"
    else:
        reasons = "; ".join(f"{size}: {why}" for size, why in failures)
    message = (
        f"{rules.name}: no kernel page fits manager blocks of {geometry.block_tokens} tokens "
        f"({reasons})."
    )
    if suggestions:
        message += f" Would work: {'; or '.join(suggestions)}."
    raise NoValidPageError(message, tuple(failures), tuple(suggestions))


def _first_failure(
    geometry: BlockGeometry, rules: KernelPageRules, page_tokens: int
) -> tuple[str | None, str | None]:
    """Return the first rule that a page size breaks, and what would mend it."""
    if geometry.block_tokens % page_tokens:
        nearest = math.ceil(geometry.block_tokens / page_tokens) * page_tokens
        return (
            f"does not divide the block ({geometry.block_tokens} % {page_tokens} = "
            f"{geometry.block_tokens % page_tokens})",
            f"manager blocks of {nearest} tokens",
        )
    plan = PagePlan(geometry, page_tokens)
    if plan.page_step != 1 and not rules.allow_overlapping_pages:
        padded = math.ceil(geometry.block_stride / plan.page_unit) * plan.page_unit
        return (
            f"block stride {geometry.block_stride} is not a multiple of the page unit "
            f"{plan.page_unit} (ratio {geometry.block_stride / plan.page_unit:.2f})",
            f"a block stride of {padded} bytes (+{padded - geometry.block_stride})",
        )
    page_bytes = page_tokens * geometry.num_heads * geometry.content_bytes
    if rules.requires_dense_pages and (
        plan.page_stride != page_bytes or not _is_dense_page(geometry, page_tokens)
    ):
        return (
            f"the kernel takes dense pages of {page_bytes} bytes, one after the other; these are "
            f"{plan.page_stride} bytes apart with token stride {geometry.token_stride} and head "
            f"stride {geometry.head_stride}",
            None,
        )
    strides = {"page stride": plan.page_stride, "token stride": geometry.token_stride}
    if geometry.num_heads > 1:
        strides["head stride"] = geometry.head_stride
    for name, stride in strides.items():
        if stride % rules.stride_alignment:
            return f"{name} {stride} is not a multiple of {rules.stride_alignment} bytes", None
        if stride > rules.max_stride_bytes:
            return f"{name} {stride} is above {rules.max_stride_bytes} bytes", None
        elements = stride // geometry.element_size
        if rules.max_stride_elements is not None and elements > rules.max_stride_elements:
            return f"{name} of {elements} elements is above {rules.max_stride_elements}", None
    if geometry.base_offset % rules.base_alignment:
        return (
            f"base offset {geometry.base_offset} is not a multiple of {rules.base_alignment} bytes",
            None,
        )
    if plan.max_page_id > rules.max_page_index:
        return f"largest page id {plan.max_page_id} is above {rules.max_page_index}", None
    return None, None


def _is_dense_page(geometry: BlockGeometry, page_tokens: int) -> bool:
    content, heads = geometry.content_bytes, geometry.num_heads
    tokens_first = geometry.token_stride == heads * content and (
        heads == 1 or geometry.head_stride == content
    )
    heads_first = geometry.token_stride == content and (
        heads == 1 or geometry.head_stride == page_tokens * content
    )
    return tokens_first or heads_first


def _nearest_block_for_multiple(block_tokens: int, rules: KernelPageRules) -> str:
    step = rules.multiple_of or 1
    return f"manager blocks of {math.ceil(block_tokens / step) * step} tokens"


def _divisors(number: int) -> Iterable[int]:
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            yield small
            yield number // small
