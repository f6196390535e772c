# SPDX-License-Identifier: Apache-2.0
"""The example kernel that walks manager blocks itself, against the table path and plain numpy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import repage
from support.cuda_on_host import COMPILER, REPOSITORY

EXAMPLE = REPOSITORY / "benchmarks" / "in_kernel" / "paged_decode.cu"
HOST_CUDA = REPOSITORY / "tests" / "support" / "cuda_on_host"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM, PAGE = 9, 96, 2, 8, 16
WALKERS = {"blocks": 0, "virtual pages": 1, "page table": 2}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("in_kernel") / "decode.so"
    command = [
        *COMPILER,
        *("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-x", "c++"),
        *("-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
        *("-I", str(REPOSITORY), "-I", str(HOST_CUDA), str(EXAMPLE), "-o", str(library)),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NVCC is None:
        pytest.skip("no nvcc")
    library = tmp_path_factory.mktemp("in_kernel_cuda") / "decode.so"
    major, minor = torch.cuda.get_device_capability()
    command = [
        *(NVCC, "-std=c++20", "-O2", "-shared", "-Xcompiler=-fPIC", f"-arch=sm_{major}{minor}"),
        *("-I", str(REPOSITORY), str(EXAMPLE), "-o", str(library)),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Batch:
    """A packed pool of three layers, of which the middle one is read; the rest is NaN."""

    def __init__(self, interior: str, device: str, block_slack: int = 0) -> None:
        rng = np.random.default_rng(17)
        content = 2 * HEAD_DIM
        layer = BLOCK_TOKENS * HEADS * content
        # Bytes that no live token owns are NaN: whoever reads them shows it.
        pool = torch.full((NUM_BLOCKS, 3 * layer + block_slack), float("nan"))
        self.seq_lens = np.array([1, PAGE, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS - 7, 0], np.int32)
        rows = len(self.seq_lens)
        self.block_table = np.zeros((rows, 3), np.int32)
        self.block_table[:, :] = rng.permutation(np.arange(1, NUM_BLOCKS))[
            rng.integers(0, NUM_BLOCKS - 1, (rows, 3))
        ]
        shape = (NUM_BLOCKS, BLOCK_TOKENS, HEADS, content)
        order = (0, 1, 2, 3) if interior == "NHC" else (0, 2, 1, 3)
        view = pool[:, layer : 2 * layer].unflatten(1, [shape[i] for i in order[1:]])
        self.tokens = view if interior == "NHC" else view.transpose(1, 2)  # [B, N, H, C]
        for row, length in enumerate(self.seq_lens):
            for token in range(length):
                block = self.block_table[row, token // BLOCK_TOKENS]
                self.tokens[block, token % BLOCK_TOKENS] = torch.from_numpy(
                    rng.standard_normal((HEADS, content)).astype(np.float32)
                )
        self.query = rng.standard_normal((rows, HEADS, HEAD_DIM)).astype(np.float32)
        self.pool = pool.to(device)
        stride = self.pool.stride(0)
        strides = (
            (stride, content, HEADS * content)
            if interior == "NHC"
            else (stride, BLOCK_TOKENS * content, content)
        )
        # vLLM's view [B, H, N, C] of the layer.
        block, head, token = strides
        self.kv_cache = self.pool.as_strided(
            (NUM_BLOCKS, HEADS, BLOCK_TOKENS, content), (block, head, token, 1), layer
        )
        self.plan = repage.PagePlan(repage.BlockGeometry.from_tensor(self.kv_cache), PAGE)

    def expected(self) -> np.ndarray:
        tokens = self.tokens.numpy().astype(np.float64)
        out = np.zeros(self.query.shape)
        for row, length in enumerate(self.seq_lens):
            if length == 0:
                continue
            where = np.arange(length)
            blocks = self.block_table[row, where // BLOCK_TOKENS]
            content = tokens[blocks, where % BLOCK_TOKENS]  # [T, H, 2 D]
            keys, values = content[..., :HEAD_DIM], content[..., HEAD_DIM:]
            scores = np.einsum("hd,thd->ht", self.query[row], keys) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[row] = np.einsum("ht,thd->hd", weights, values)
        return out

    def decode(self, library: ctypes.CDLL, walker: str) -> np.ndarray:
        """Run the kernel; the expanded table is built for the walker that needs one only."""
        device = self.pool.device
        table = torch.from_numpy(self.block_table).to(device)
        lengths = torch.from_numpy(self.seq_lens).to(device)
        if walker == "page table":
            table = repage.build_page_table(table, self.plan, seq_lens=lengths)
        query = torch.from_numpy(self.query).to(device)
        out = torch.full_like(query, float("nan"))
        g = self.plan.geometry
        strides = (ctypes.c_int64 * 7)(
            g.num_blocks,
            g.block_tokens,
            g.num_heads,
            g.content_bytes,
            g.block_stride,
            g.head_stride,
            g.token_stride,
        )
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
        status = library.paged_decode(
            WALKERS[walker],
            self.plan.page_map.to_bytes(),
            strides,
            *(ctypes.c_void_p(t.data_ptr()) for t in (query, self.kv_cache, table, lengths, out)),
            *(len(self.seq_lens), table.shape[1], HEAD_DIM),
            ctypes.c_uint(4),
            ctypes.c_void_p(stream),
        )
        assert status == 0
        return out.cpu().numpy()


@pytest.mark.parametrize("interior", ["NHC", "HNC"])
@pytest.mark.parametrize("block_slack", [0, 20], ids=["tiling pages", "overlapping pages"])
class TestWalkers:
    @staticmethod
    def check(library: ctypes.CDLL, batch: Batch) -> None:
        results = {name: batch.decode(library, name) for name in WALKERS}
        np.testing.assert_allclose(results["blocks"], batch.expected(), rtol=2e-5, atol=2e-6)
        for name in ("virtual pages", "page table"):
            assert np.array_equal(results[name], results["blocks"]), name

    def test_on_host(self, on_host: ctypes.CDLL, interior: str, block_slack: int) -> None:
        batch = Batch(interior, "cpu", block_slack)
        assert (batch.plan.page_step > 1) == bool(block_slack)
        self.check(on_host, batch)

    @pytest.mark.gpu
    def test_on_device(self, on_device: ctypes.CDLL, interior: str, block_slack: int) -> None:
        self.check(on_device, Batch(interior, "cuda", block_slack))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_the_example_builds_for_every_architecture(tmp_path: Path) -> None:
    known = subprocess.run(
        [str(NVCC), "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout.split()
    numbers = [n for n in (80, 90, 100, 103, 120) if f"compute_{n}" in known]
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    subprocess.run(
        [
            *(str(NVCC), "-std=c++20", "-Werror=all-warnings", *targets, "-I", str(REPOSITORY)),
            *("-c", str(EXAMPLE), "-o", str(tmp_path / "decode.o")),
        ],
        check=True,
    )
