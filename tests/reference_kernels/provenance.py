# SPDX-License-Identifier: Apache-2.0
"""Who wrote the bytes that a kernel reads.

Shapes and ranges do not show a wrong page: a wrong step, half a page unit or manager slots pushed
through a kernel view all stay inside the storage. So the cache writer records, for every 16
elements it writes, whether they are K or V of which layer (the element offset at which the layer's
K or V starts), which manager slot, and how many tokens a manager block has. A reader that wants
token ``t`` of a layer then proves that the bytes are K (or V) of that layer and that
``slot % N == t % N``.

A wrong block of the right layer at the same offset is beyond the map; comparing generated tokens
shows that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference_kernels.errors import ProvenanceError
from reference_kernels.sources import PROVENANCE

__all__ = ["GRANULE", "ProvenanceMap"]

GRANULE = 16
"""Elements that share one record."""

_NOBODY = -1


@dataclass
class _StorageRecord:
    """Records of one storage: per granule an index into ``writers``, and a manager slot."""

    writer: Tensor
    slot: Tensor


@dataclass(frozen=True)
class _Writer:
    side: str
    base: int
    block_tokens: int


@dataclass
class ProvenanceMap:
    """Records of every storage that a cache writer has touched.

    Attributes
    ----------
    checked_tokens : int
        Tokens whose K or V was proven so far; a test asserts that it grows.
    """

    checked_tokens: int = 0
    _storages: dict[tuple[int, int], _StorageRecord] = field(default_factory=dict)
    _writers: list[_Writer] = field(default_factory=list)
    _writer_ids: dict[_Writer, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything, for instance because the storages were freed."""
        self.checked_tokens = 0
        self._storages.clear()
        self._writers.clear()
        self._writer_ids.clear()

    def record_write(
        self, side: str, cache: Tensor, blocks: Tensor, offsets: Tensor, slots: Tensor
    ) -> None:
        """Record that ``cache[blocks, offsets]`` now holds the tokens of ``slots``.

        Parameters
        ----------
        side : str
            ``"K"`` or ``"V"``.
        cache : Tensor
            K or V cache of one layer, ``[num_blocks, block_tokens, heads, head_dim]``, any strides.
        blocks, offsets, slots : Tensor
            int64, ``[tokens]``.
        """
        writer = _Writer(side, int(cache.storage_offset()), cache.shape[1])
        writer_id = self._writer_ids.get(writer)
        if writer_id is None:
            writer_id = self._writer_ids[writer] = len(self._writers)
            self._writers.append(writer)
        record = self._record(cache)
        granules = _granules(cache, blocks, offsets, token_dim=1, head_dim=2)
        record.writer[granules] = writer_id
        record.slot[granules] = slots.to(torch.int32).view(-1, 1, 1)

    def check_read(
        self,
        kernel: str,
        side: str,
        cache: Tensor,
        pages: Tensor,
        offsets: Tensor,
        tokens: Tensor,
        *,
        token_dim: int,
        head_dim: int,
    ) -> None:
        """Prove that the bytes at ``pages``, ``offsets`` are the layer's ``tokens``.

        Parameters
        ----------
        kernel, side : str
            Who reads, and whether it reads ``"K"`` or ``"V"``.
        cache : Tensor
            K or V pages, 4-D, ``cache[page]`` holds ``token_dim`` and ``head_dim``.
        pages, offsets, tokens : Tensor
            int64, ``[count]``: page id, position in the page, position in the sequence.

        Raises
        ------
        ProvenanceError
            The bytes were never written, belong to another layer, or to another token.
        """
        record = self._record(cache)
        granules = _granules(cache, pages, offsets, token_dim=token_dim, head_dim=head_dim)
        writer_ids = record.writer[granules].flatten(1).to(torch.int64)
        slots = record.slot[granules].flatten(1)
        wanted = (side, cache.storage_offset())

        def fail(bad: Tensor, expected: str) -> None:
            row = int(bad.any(1).nonzero()[0])
            column = int(bad[row].nonzero()[0])
            got = self._describe(int(writer_ids[row, column]), int(slots[row, column]))
            raise ProvenanceError(
                kernel,
                f"{side} of token {int(tokens[row])} (page {int(pages[row])}, position "
                f"{int(offsets[row])}; {int(bad.any(1).sum())} of {len(tokens)} tokens are wrong)",
                expected,
                got,
                PROVENANCE,
            )

        owners = torch.tensor(
            [(writer.side, writer.base) == wanted for writer in self._writers] + [False]
        )
        foreign = ~owners[writer_ids]
        if bool(foreign.any()):
            fail(foreign, f"{side} of the layer at element {cache.storage_offset()}")
        block_tokens = torch.tensor([writer.block_tokens for writer in self._writers])[writer_ids]
        misplaced = slots % block_tokens != tokens.view(-1, 1) % block_tokens
        if bool(misplaced.any()):
            row = int(misplaced.any(1).nonzero()[0])
            size = int(block_tokens[row, 0])
            fail(misplaced, f"offset {int(tokens[row]) % size} of a {size}-token manager block")
        self.checked_tokens += len(tokens)

    def _record(self, cache: Tensor) -> _StorageRecord:
        storage = cache.untyped_storage()
        count = -(-storage.nbytes() // (cache.element_size() * GRANULE))
        key = (storage.data_ptr(), count)
        record = self._storages.get(key)
        if record is None:
            record = self._storages[key] = _StorageRecord(
                torch.full((count,), _NOBODY, dtype=torch.int16),
                torch.zeros(count, dtype=torch.int32),
            )
        return record

    def _describe(self, writer_id: int, slot: int) -> str:
        if writer_id == _NOBODY:
            return "bytes that no cache writer has written"
        writer = self._writers[writer_id]
        block, offset = divmod(slot, writer.block_tokens)
        return (
            f"{writer.side} of the layer at element {writer.base}, manager slot {slot} "
            f"(block {block}, offset {offset})"
        )


def _granules(
    cache: Tensor, outer: Tensor, offsets: Tensor, *, token_dim: int, head_dim: int
) -> Tensor:
    """Granules of ``cache[outer, offsets]``, int64 ``[tokens, heads, head_dim / 16]``."""
    starts = (
        int(cache.storage_offset()) + outer * cache.stride(0) + offsets * cache.stride(token_dim)
    ).view(-1, 1, 1)
    heads = (torch.arange(cache.shape[head_dim]) * cache.stride(head_dim)).view(1, -1, 1)
    elements = torch.arange(0, cache.shape[3], GRANULE).view(1, 1, -1)
    return (starts + heads + elements) // GRANULE
