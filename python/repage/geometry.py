# SPDX-License-Identifier: Apache-2.0
"""Packed manager blocks and the kernel pages that lie in them.

The arithmetic itself lives in the C++ header ``repage/page_map.h``, which CPU and CUDA kernels
use as well; this module describes geometries to it and checks what comes from outside.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from repage import _core
from repage.errors import GeometryError, ShapeError, UnsupportedLayoutError

if TYPE_CHECKING:
    import torch

Interior = Literal["NHC", "HNC", "HLNC"]

_STATUS_TEXT = {
    _core.PageMapStatus.NON_POSITIVE_SIZE: "every count and size must be at least 1",
    _core.PageMapStatus.NEGATIVE_STRIDE: (
        "block_stride and token_stride must be at least 1 byte, head_stride at least 0"
    ),
    _core.PageMapStatus.TOO_MANY_TOKENS: "block_tokens must be below 2**31",
    _core.PageMapStatus.PAGE_DOES_NOT_DIVIDE: "page_tokens must divide block_tokens",
    _core.PageMapStatus.ADDRESS_OVERFLOW: "an address of this geometry does not fit 63 bits",
}
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class BlockGeometry:
    """Where one layer's tokens lie inside packed manager blocks.

    The byte address of (block b, token t, head h) is
    ``base + b * block_stride + h * head_stride + t * token_stride``.

    Parameters
    ----------
    num_blocks : int
        Manager blocks in the pool (B).
    block_tokens : int
        Tokens in a manager block (N).
    num_heads : int
        KV heads of the layer on this rank (H).
    content_bytes : int
        Bytes of K and V of one token and head (E).
    block_stride : int
        Bytes from a block to the next (S): the whole packed block.
    head_stride : int
        Bytes from a head to the next.
    token_stride : int
        Bytes from a token to the next.
    element_size : int, default 1
        Bytes of one cache element. Kernels count strides in elements.
    base_offset : int, default 0
        Bytes from the start of the allocation to the layer's first block. It needs to be
        aligned, and nothing else: in particular it need not be a multiple of any page.
    storage_bytes : int or None, default None
        Size of the allocation. None leaves it unchecked.

    Raises
    ------
    GeometryError
        When a field is out of range, an address overflows, two tokens share bytes, or the last
        block ends after the allocation does.
    """

    num_blocks: int
    block_tokens: int
    num_heads: int
    content_bytes: int
    block_stride: int
    head_stride: int
    token_stride: int
    element_size: int = 1
    base_offset: int = 0
    storage_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "storage_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise GeometryError(f"{field.name}: expected an int, got {value!r}")
            if not 0 <= value <= _INT64_MAX:
                raise GeometryError(f"{field.name}: expected 0 .. 2**63 - 1, got {value}")
        # A page of one token divides every block: this checks the geometry alone.
        self._raise_for(self._core_geometry.check(1), page_tokens=1)
        if self.element_size < 1:
            raise GeometryError(f"element_size: expected at least 1 byte, got {self.element_size}")
        for name in ("content_bytes", "block_stride", "head_stride", "token_stride", "base_offset"):
            if getattr(self, name) % self.element_size:
                raise GeometryError(
                    f"{name}: expected a multiple of element_size {self.element_size}, "
                    f"got {getattr(self, name)}"
                )
        self._raise_for_overlap()
        end = self.base_offset + self._core_geometry.extent_bytes()
        if self.storage_bytes is not None and end > self.storage_bytes:
            raise GeometryError(
                f"storage_bytes: the last of {self.num_blocks} blocks ends at byte {end}, "
                f"but the allocation has {self.storage_bytes} bytes"
            )

    @classmethod
    def dense(
        cls,
        interior: Interior,
        *,
        num_blocks: int,
        block_tokens: int,
        num_heads: int,
        content_bytes: int,
        block_stride: int,
        layers_in_block: int = 1,
        element_size: int = 1,
        base_offset: int = 0,
        storage_bytes: int | None = None,
    ) -> BlockGeometry:
        """Describe a layer whose block interior is dense.

        Parameters
        ----------
        interior : {"NHC", "HNC", "HLNC"}
            Memory order inside a block: NHC for vLLM's BLNHC layout, HNC for BLHNC, HLNC for
            BHLNC, where the pages of all layers lie between two heads.
        num_blocks, block_tokens, num_heads, content_bytes, block_stride
            As in the class.
        layers_in_block : int, default 1
            Layers between two heads; only HLNC looks at it.
        element_size, base_offset, storage_bytes
            As in the class.

        Returns
        -------
        BlockGeometry

        Raises
        ------
        GeometryError
            As the class, and for an unknown interior.
        """
        order = getattr(_core.Interior, interior, None)
        if order is None:
            raise GeometryError(f"interior: expected NHC, HNC or HLNC, got {interior!r}")
        sizes = {
            "num_blocks": num_blocks,
            "block_tokens": block_tokens,
            "num_heads": num_heads,
            "content_bytes": content_bytes,
            "block_stride": block_stride,
            "layers_in_block": layers_in_block,
        }
        for name, value in sizes.items():
            if not isinstance(value, int) or not 1 <= value <= _INT64_MAX:
                raise GeometryError(f"{name}: expected an int from 1 to 2**63 - 1, got {value!r}")
        if block_tokens * content_bytes * max(num_heads, layers_in_block) > _INT64_MAX:
            raise GeometryError(
                f"block_tokens * content_bytes * heads or layers: expected below 2**63, got "
                f"{block_tokens} * {content_bytes} * {max(num_heads, layers_in_block)}"
            )
        core = _core.BlockGeometry.dense(order, *sizes.values())
        return cls(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_heads=num_heads,
            content_bytes=content_bytes,
            block_stride=block_stride,
            head_stride=core.head_stride,
            token_stride=core.token_stride,
            element_size=element_size,
            base_offset=base_offset,
            storage_bytes=storage_bytes,
        )

    @classmethod
    def from_tensor(cls, kv_cache: torch.Tensor) -> BlockGeometry:
        """Read the geometry off vLLM's view of a layer.

        Parameters
        ----------
        kv_cache : torch.Tensor
            Shape [B, H, N, C], any dtype, any device, C = D_k + D_v contiguous. Owned by the
            caller; only its shape, strides and storage size are read.

        Returns
        -------
        BlockGeometry

        Raises
        ------
        ShapeError
            When the tensor does not have four dimensions, or one is empty.
        UnsupportedLayoutError
            When the content dimension is not contiguous or a dimension is broadcast (stride 0).
        GeometryError
            As the class.
        """
        if kv_cache.dim() != 4 or kv_cache.numel() == 0:
            raise ShapeError(
                "kv_cache: expected a non-empty [B, H, N, C] tensor, "
                f"got shape {tuple(kv_cache.shape)}"
            )
        num_blocks, num_heads, block_tokens, content = kv_cache.shape
        size = kv_cache.element_size()
        block_stride, head_stride, token_stride, content_stride = kv_cache.stride()
        if content > 1 and content_stride != 1:
            raise UnsupportedLayoutError(
                "kv_cache: expected a contiguous content dimension (stride 1), "
                f"got strides {kv_cache.stride()}"
            )
        # The stride of a size-1 dimension addresses nothing and may be anything: torch keeps
        # whatever the view was made with. Kernels put it into tensor maps all the same.
        if block_tokens == 1:
            token_stride = content
        if num_heads == 1 and head_stride != content:
            head_stride = block_tokens * token_stride
        if num_blocks == 1:
            block_stride = max(num_heads * head_stride, block_tokens * token_stride)
        if 0 in (block_stride, head_stride, token_stride):
            raise UnsupportedLayoutError(
                f"kv_cache: expected distinct memory per block, head and token, got strides "
                f"{kv_cache.stride()} for shape {tuple(kv_cache.shape)}"
            )
        return cls(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_heads=num_heads,
            content_bytes=content * size,
            block_stride=block_stride * size,
            head_stride=head_stride * size,
            token_stride=token_stride * size,
            element_size=size,
            base_offset=int(kv_cache.storage_offset()) * size,
            storage_bytes=kv_cache.untyped_storage().nbytes(),
        )

    @property
    def interior(self) -> Literal["NHC", "HNC"]:
        """Whether tokens or heads come first inside a block (HLNC counts as HNC).

        One head lies in memory the same way in both; its stride then tells which was meant.
        """
        if self.num_heads == 1:
            return "NHC" if self.head_stride == self.content_bytes else "HNC"
        return "NHC" if self.head_stride < self.token_stride else "HNC"

    def page_map(self, page_tokens: int) -> _core.PageMap:
        """Build the map from (block, page) to virtual page ids.

        Parameters
        ----------
        page_tokens : int
            Tokens of a kernel page (P).

        Returns
        -------
        repage._core.PageMap

        Raises
        ------
        GeometryError
            When no map exists, with the reason.
        """
        if not isinstance(page_tokens, int) or not 0 <= page_tokens <= _INT64_MAX:
            raise GeometryError(f"page_tokens: expected a positive int, got {page_tokens!r}")
        self._raise_for(self._core_geometry.check(page_tokens), page_tokens)
        return self._core_geometry.page_map(page_tokens)

    @cached_property
    def _core_geometry(self) -> _core.BlockGeometry:
        return _core.BlockGeometry(
            self.num_blocks,
            self.block_tokens,
            self.num_heads,
            self.content_bytes,
            self.block_stride,
            self.head_stride,
            self.token_stride,
        )

    def _raise_for_overlap(self) -> None:
        """Raise where two tokens would share bytes: one write would destroy the other."""
        dimensions = [
            (self.block_stride, "block_stride", self.num_blocks),
            (self.head_stride, "head_stride", self.num_heads),
            (self.token_stride, "token_stride", self.block_tokens),
        ]
        span = self.content_bytes
        for stride, name, count in sorted(item for item in dimensions if item[2] > 1):
            if stride < span:
                raise GeometryError(
                    f"{name}: tokens overlap; expected at least the {span} bytes that lie "
                    f"between two of its steps, got {stride} on {self}"
                )
            span += (count - 1) * stride

    def _raise_for(self, status: _core.PageMapStatus, page_tokens: int) -> None:
        if status != _core.PageMapStatus.OK:
            raise GeometryError(f"{_STATUS_TEXT[status]}; got page_tokens {page_tokens} on {self}")
