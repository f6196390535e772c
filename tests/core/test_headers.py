# SPDX-License-Identifier: Apache-2.0
"""The header core as other people's code meets it: alone, constexpr, with and without nvcc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import repage
from support.cuda_on_host import COMPILER

INCLUDE = Path(repage.get_include())
HEADERS = sorted(path.name for path in (INCLUDE / "repage").glob("*.h"))
STRICT = ("-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")

# Qwen3.6-35B-A3B + DFlash (blocks of 640 tokens, 15,728,640 bytes apart), at compile time.
CONSTEXPR = """
#include <repage/page_map.h>
using namespace repage;
constexpr BlockGeometry kTarget =
    MakeDenseInterior(Interior::kNHC, 1000, 640, 2, 1024, 15'728'640);
static_assert(CheckPageMap(kTarget, 64) == PageMapStatus::kOk);
static_assert(CheckPageMap(kTarget, 48) == PageMapStatus::kPageDoesNotDivide);
constexpr PageMap kMap = MakePageMap(kTarget, 64);
static_assert(kMap.block_step == 120 && kMap.page_step == 1 && kMap.page_stride == 131'072);
static_assert(PageId(kMap, 3, 9) == 369 && MaxPageId(kMap) == 999 * 120 + 9);
static_assert(VirtualSlot(kMap, 3 * 640 + 65) == 361 * 64 + 1 && VirtualSlot(kMap, -1) == -1);
static_assert(VirtualSlot(kMap, 640'000) == -1);
static_assert(LocateToken(kMap, 1345).block_column == 2);
static_assert(ExtentBytes(kTarget) == 999LL * 15'728'640 + 640 * 2048);
static_assert(TokenByteOffset(kTarget, 137, 0, 0) > INT32_MAX);
static_assert(MakeFastDivisor(640).Quotient(INT32_MAX) == INT32_MAX / 640);
static_assert(MakeFastDivisor64(640).Quotient(INT64_MAX) == INT64_MAX / 640);
static_assert(MakeFastDivisor64(1).Quotient(INT64_MAX) == INT64_MAX);
static_assert(MakeFastDivisor64(INT32_MAX).Quotient(INT64_MAX - 1) == (INT64_MAX - 1) / INT32_MAX);
constexpr BlockGeometry kHeadsOutside =
    MakeDenseInterior(Interior::kHLNC, 9, 64, 2, 32, 65'536, 10);
static_assert(kHeadsOutside.head_stride == 64 * 32 * 10 && kHeadsOutside.token_stride == 32);
"""


def compile_source(source: str, folder: Path, command: list[str], suffix: str) -> None:
    path = folder / f"source{suffix}"
    path.write_text(source)
    result = subprocess.run(
        [*command, "-I", str(INCLUDE), "-c", str(path), "-o", str(folder / "object.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_there_are_headers() -> None:
    assert "page_map.h" in HEADERS


@pytest.mark.parametrize("header", HEADERS)
def test_each_header_compiles_alone_without_cuda(header: str, tmp_path: Path) -> None:
    compile_source(f"#include <repage/{header}>\n", tmp_path, [*COMPILER, *STRICT], ".cc")


def test_the_arithmetic_is_constexpr(tmp_path: Path) -> None:
    compile_source(CONSTEXPR, tmp_path, [*COMPILER, *STRICT], ".cc")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_device_code_takes_a_page_map_by_value(tmp_path: Path) -> None:
    kernel = """
    __global__ void Walk(repage::PageMap map, const int* row, int token, long long* out) {
      const repage::TokenLocation at = repage::LocateToken(map, token);
      *out = repage::PageId(map, row[at.block_column], at.page_index) * map.page_stride;
    }
    """
    nvcc = ["nvcc", "-std=c++20", "-arch=sm_80", "-Werror=all-warnings"]
    compile_source(CONSTEXPR + kernel, tmp_path, nvcc, ".cu")
