# SPDX-License-Identifier: Apache-2.0
"""The CPU twins with every vector width, not only this machine's widest."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

import repage
from support.cuda_on_host import COMPILER, REPOSITORY

WRAPPER = """
#include <cstring>
#include "csrc/expand_row_cpu.h"
extern "C" void expand(const char* bytes, const int* row, int block_columns, int columns,
                       int past_caches, int* out) {
  repage::PageMap map;
  std::memcpy(&map, bytes, sizeof(map));
  repage::cpu::RowExpander(map, block_columns).Expand(row, columns, past_caches, out);
}
"""
NUM_BLOCKS = 50
GUARD = -77


@pytest.fixture(
    scope="module",
    params=[0, 256, 512],
)
def expand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    bits = request.param
    flags = Path("/proc/cpuinfo")
    needed = {256: " avx2 ", 512: " avx512f "}.get(bits)
    if needed and not (flags.exists() and needed in flags.read_text()):
        pytest.skip(f"the processor has no{needed}")
    folder = tmp_path_factory.mktemp(f"vectors{bits}")
    (folder / "wrapper.cc").write_text(WRAPPER)
    subprocess.run(
        [
            *COMPILER,
            *("-std=c++20", "-O3", "-shared", "-fPIC"),
            *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
            f"-DREPAGE_MAX_VECTOR_BITS={bits}",
            *("-I", str(REPOSITORY), str(REPOSITORY / "csrc" / "expand_row_cpu.cc")),
            *(str(folder / "wrapper.cc"), "-o", str(folder / "expand.so")),
        ],
        check=True,
    )
    return ctypes.CDLL(str(folder / "expand.so")).expand


def plan(pages: int, block_stride: int) -> repage.PagePlan:
    geometry = repage.BlockGeometry.dense(
        "NHC",
        num_blocks=NUM_BLOCKS,
        block_tokens=pages,
        num_heads=1,
        content_bytes=48,
        block_stride=block_stride,
    )
    return repage.PagePlan(geometry, 1)


@pytest.mark.parametrize("pages", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 20, 31, 32, 40, 80, 131])
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("past_caches", [False, True])
def test_rows_of_any_width_cut_anywhere(
    expand, pages: int, overlapping: bool, past_caches: bool
) -> None:
    pages_plan = plan(pages, 48 * pages * 3 + (16 if overlapping else 0))
    assert (pages_plan.page_step > 1) == overlapping
    rng = np.random.default_rng(pages)
    for width in (1, 2, 15, 16, 17, 33, 64, 100):
        # Exactly as long as the row: a read past it is past the allocation.
        row = rng.integers(-2, NUM_BLOCKS + 2, width).astype(np.int32)
        inside = np.where((row >= 0) & (row < NUM_BLOCKS), row, 0)
        ids = inside[:, None] * pages_plan.block_step + np.arange(pages) * pages_plan.page_step
        expected = ids.reshape(-1).astype(np.int32)
        for columns in {width * pages, max(width * pages - 1, 1), (width * pages + 1) // 2}:
            # Rows begin at any alignment.
            for begin in (100, 101, 103, 106):
                memory = np.full(columns + 200, GUARD, dtype=np.int32)
                out = memory[begin : begin + columns]
                expand(
                    pages_plan.page_map.to_bytes(),
                    row.ctypes.data_as(ctypes.c_void_p),
                    width,
                    columns,
                    past_caches,
                    out.ctypes.data_as(ctypes.c_void_p),
                )
                assert np.array_equal(out, expected[:columns])
                out.fill(GUARD)
                assert (memory == GUARD).all()
