"""CPU_ATTN's real kernels on packed blocks against the same kernels on dense blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm.v1.attention.backends.cpu_attn as vllm_cpu_attn

from repage.vllm.cpu_attn import RepagedCPUAttentionBackend

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
    reason="this vLLM was built without CPU kernels",
)

CPU = torch.device("cpu")
STOCK = vllm_cpu_attn.CPUAttentionBackend
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
LENGTHS = (300, 1, 129)
BLOCKS = ([3, 1, 8], [5], [7, 2])


@pytest.fixture
def attend(make_world, monkeypatch):
    """Write every token of a batch, then attend from each sequence's last token."""
    monkeypatch.setattr(
        vllm_cpu_attn,
        "get_current_vllm_config",
        lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16)),
    )

    def run(backend, layout: str, block_tokens: int = 128):
        world = make_world(
            layout=layout,
            block_tokens=block_tokens,
            impl=lambda: backend.get_impl_cls()(4, 64, 0.125, 2, None, None, "auto"),
        )
        names = world.add_layers(*LAYERS)
        world.bind(gap=0 if layout == "LBHNC" else 3 * block_tokens * 2 * 64 * 2)
        builder = backend.get_builder_cls()(world.spec(), names, world.config, CPU)
        common = world.batch(list(BLOCKS), list(LENGTHS))
        slots = [
            block * block_tokens + offset
            for blocks, length in zip(BLOCKS, LENGTHS, strict=True)
            for block, offset in (
                (blocks[token // block_tokens], token % block_tokens) for token in range(length)
            )
        ]
        slots = torch.tensor([*slots, -1])  # one token of padding
        generator = torch.Generator().manual_seed(0)
        outputs = []
        for name in names:
            layer = world.layers[name]
            keys, values = (
                torch.randn(len(slots), 2, 64, generator=generator).bfloat16() for _ in range(2)
            )
            queries = torch.randn(len(LENGTHS), 4, 64, generator=generator).bfloat16()
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            metadata = builder.build(0, common)
            output = torch.full_like(queries, float("nan"))
            layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
            outputs.append(output)
        return torch.stack(outputs), world, metadata

    return run


@pytest.mark.parametrize("page", ["32", "64", "128", None])
def test_packed_blocks_give_the_bits_of_dense_ones(attend, monkeypatch, page):
    expected, _, _ = attend(STOCK, "LBHNC")
    assert expected.isfinite().all()
    if page is not None:
        monkeypatch.setenv("REPAGE_CPU_PAGE", page)
    output, world, metadata = attend(RepagedCPUAttentionBackend, "BLHNC")
    assert torch.equal(output, expected)
    columns = 4 * 128 // int(page or 128)
    assert metadata.block_table.shape == (3, columns)
    assert all(not layer.kv_cache.isnan().any() for layer in world.layers.values())


def test_stock_classes_on_the_stock_layout_are_unchanged_by_the_plugin(attend, monkeypatch):
    monkeypatch.setenv("REPAGE_CPU_PAGE", "32")
    expected, _, stock = attend(STOCK, "LBHNC")
    output, _, metadata = attend(RepagedCPUAttentionBackend, "LBHNC")
    assert torch.equal(output, expected)
    assert torch.equal(metadata.block_table, stock.block_table)


def test_manager_ids_read_as_pages_give_something_else(attend, monkeypatch):
    """The check on the check: this comparison sees a wrong step."""
    monkeypatch.setenv("REPAGE_CPU_PAGE", "32")
    expected, _, _ = attend(STOCK, "LBHNC")
    build = RepagedCPUAttentionBackend.get_builder_cls().parent_table

    def dense_ids(self, table, block_table, seq_lens):
        pages = torch.arange(4, dtype=torch.int32)
        wrong = (block_table.unsqueeze(-1) * 4 + pages).flatten(1).contiguous()
        assert wrong.shape == build(self, table, block_table, seq_lens).shape
        return wrong

    monkeypatch.setattr(RepagedCPUAttentionBackend.get_builder_cls(), "parent_table", dense_ids)
    output, _, _ = attend(RepagedCPUAttentionBackend, "BLHNC")
    assert not torch.equal(output, expected)


def test_the_page_is_decided_once(attend, monkeypatch):
    """The environment, like vLLM's current config, may differ by the time of a forward pass."""
    monkeypatch.setenv("REPAGE_CPU_PAGE", "32")
    _, world, metadata = attend(RepagedCPUAttentionBackend, "BLHNC")
    monkeypatch.setenv("REPAGE_CPU_PAGE", "128")
    layer = world.layers[LAYERS[0]]
    queries = torch.ones(len(LENGTHS), 4, 64).bfloat16()
    first, second = torch.empty_like(queries), torch.empty_like(queries)
    layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, first)
    monkeypatch.setenv("REPAGE_CPU_PAGE", "32")
    layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, second)
    assert torch.equal(first, second)
