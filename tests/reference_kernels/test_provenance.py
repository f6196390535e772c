# SPDX-License-Identifier: Apache-2.0
"""What shape and range checks let through, and the provenance map does not."""

from __future__ import annotations

import pytest
import torch

from reference_kernels.calls import table_call
from reference_kernels.context import KernelContext
from reference_kernels.errors import ProvenanceError
from reference_kernels.paging import PagedCache
from reference_kernels.synthetic import PackedLayers
from reference_kernels.xqa import XqaDecode

LENGTHS = (300, 5, 128)


def make(layout: str = "HND") -> PackedLayers:
    return PackedLayers(KernelContext((9, 0), float32=True), LENGTHS, layout=layout)  # type: ignore[arg-type]


def run(layers: PackedLayers, **changes: object) -> None:
    XqaDecode(layers.context)(**table_call(layers) | changes)


def filled(layers: PackedLayers) -> None:
    """Leave no element unwritten, so that only provenance can tell."""
    layers.storage.nan_to_num_(nan=0.5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_right_tables_pass_and_are_counted(layout: str) -> None:
    layers = make(layout)
    run(layers)
    provenance = layers.context.provenance
    assert provenance is not None
    assert provenance.checked_tokens == 2 * sum(LENGTHS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_wrong_step(layout: str) -> None:
    layers = make(layout)
    filled(layers)
    with pytest.raises(ProvenanceError, match="K of token"):
        run(layers, block_tables=layers.page_table(block_step=layers.pages_per_block))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_wrong_offset_in_the_block(layout: str) -> None:
    layers = make(layout)
    filled(layers)
    table = layers.page_table()
    table[0, [0, 1]] = table[0, [1, 0]]
    with pytest.raises(ProvenanceError, match="offset 0 of a 128-token manager block"):
        run(layers, block_tables=table)


def test_another_layer() -> None:
    layers = make()
    # The second layer's view, taken from where the first one begins.
    first, second = layers.pages(0), layers.pages(1)
    pages_between = layers.layer_elements // layers.page_unit
    table = layers.page_table() + pages_between
    # Same bytes as the second layer's pages, and still inside the first layer's view.
    table = table.clamp(max=first.num_pages - 1)
    assert torch.equal(first.key[int(table[0, 0])], second.key[int(layers.page_table()[0, 0])])
    with pytest.raises(ProvenanceError, match="expected K of the layer at element 0") as caught:
        run(layers, block_tables=table)
    assert str(layers.layer_elements) in caught.value.got


def test_keys_taken_for_values() -> None:
    layers = make()
    cache = layers.pages()
    with pytest.raises(ProvenanceError, match="V of token 0"):
        run(layers, kv_cache=(cache.key, cache.key))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_half_a_unit(layout: str) -> None:
    layers = make(layout)
    filled(layers)
    cache = layers.pages()
    # What a geometry makes of a page unit that is half of what it is.
    step = 2 * layers.block_step
    shape = ((layers.num_blocks - 1) * step + layers.pages_per_block, *cache.key.shape[1:])
    stride = (layers.page_unit // 2, *cache.key.stride()[1:])

    def halved(side: torch.Tensor) -> torch.Tensor:
        return side.as_strided(shape, stride, side.storage_offset())

    half = (halved(cache.key), halved(cache.value))
    with pytest.raises(ProvenanceError):
        run(layers, kv_cache=half, block_tables=layers.page_table(block_step=step))


def test_manager_slots_written_through_the_kernel_view() -> None:
    layers = make("NHD")
    assert layers.context.provenance is not None
    layers.context.provenance.clear()
    view = layers.pages()
    for row, length in enumerate(LENGTHS):
        key, value = layers.dense[0, row]
        positions = torch.arange(length)
        blocks = torch.tensor(layers.blocks[row])[positions // 128]
        layers.write_slots((view.key, view.value), key, value, blocks * 128 + positions % 128)
    filled(layers)
    with pytest.raises(ProvenanceError):
        run(layers)


def test_bytes_that_nobody_wrote() -> None:
    layers = make()
    filled(layers)
    longer = torch.tensor([301, 5, 128], dtype=torch.int32)
    with pytest.raises(ProvenanceError, match="no cache writer has written"):
        run(layers, seq_lens=longer, block_tables=layers.page_table(width=12))


def test_another_sequence_at_the_same_offset_is_beyond_the_map() -> None:
    layers = make()
    table = layers.page_table()
    table[1, 0] = table[0, 0]
    run(layers, block_tables=table)


def test_blocks_of_a_half_sized_manager_are_told_apart() -> None:
    layers = make("NHD")
    assert layers.context.provenance is not None
    cache = layers.pages()
    small = PagedCache(cache.key[:, :16], cache.value[:, :16], "NHD")
    tokens = torch.arange(16)
    with pytest.raises(ProvenanceError, match="offset 5 of a 128-token"):
        layers.context.provenance.check_read(
            "reader",
            "K",
            small.key,
            torch.full((16,), layers.blocks[0][0] * layers.block_step),
            tokens,
            tokens + 5,
            token_dim=1,
            head_dim=2,
        )


def test_clearing_forgets_writers() -> None:
    layers = make()
    assert layers.context.provenance is not None
    layers.context.provenance.clear()
    with pytest.raises(ProvenanceError, match="no cache writer has written"):
        run(layers)
