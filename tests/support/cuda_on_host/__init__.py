# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel sources, compiled for the host, in place of the compiled core's operations.

This runs the kernels' index logic (rows at any alignment, 16-byte stores, parts of a row, the
barrier around the watermarks) on machines without a GPU. The undefined-behaviour sanitizer is on:
a misaligned 16-byte store or an overflow ends the test.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

from repage import _core

SOURCE = Path(__file__).parent
REPOSITORY = SOURCE.parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


def compile_kernels(folder: Path) -> ctypes.CDLL:
    """Compile the kernels into a shared library in `folder` and load it."""
    library = folder / "kernels.so"
    command = [
        *COMPILER,
        *("-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
        *("-I", str(REPOSITORY), "-I", str(SOURCE)),
        str(SOURCE / "kernels.cc"),
        *("-o", str(library)),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class HostKernels:
    """Has the operations of the compiled core, and runs the kernels for them."""

    CUDA_VERSION = None

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = ctypes.c_uint(threads)

    def row_parts(self, rows: int, columns: int, _device: int) -> int:
        # What the launchers take on a device; device 0 stands for one.
        return _core.row_parts(rows, columns, 0)

    def build_page_table(self, page_map, *arguments) -> None:
        *arguments, _device, _stream = arguments
        table, row_stride, seq_lens, out, watermarks, *sizes = arguments
        self._library.build_page_table(
            page_map.to_bytes(),
            ctypes.c_void_p(table),
            ctypes.c_int64(row_stride),
            *(ctypes.c_void_p(address or None) for address in (seq_lens, out, watermarks)),
            *map(ctypes.c_int32, sizes),
            self._threads,
        )

    def build_kv_indices(self, page_map, *arguments) -> None:
        *arguments, _device, _stream = arguments
        table, row_stride, kv_indptr, out, out_size, *sizes = arguments
        self._library.build_kv_indices(
            page_map.to_bytes(),
            ctypes.c_void_p(table),
            ctypes.c_int64(row_stride),
            ctypes.c_void_p(kv_indptr),
            ctypes.c_void_p(out),
            ctypes.c_int64(out_size),
            *map(ctypes.c_int32, sizes),
            self._threads,
        )

    def build_group_tables(self, page_map, *arguments) -> None:
        *arguments, _device, _stream = arguments
        table, row_stride, *pointers, kv_indices_size = arguments[:8]
        self._library.build_group_tables(
            page_map.to_bytes(),
            ctypes.c_void_p(table),
            ctypes.c_int64(row_stride),
            *(ctypes.c_void_p(address or None) for address in pointers),
            ctypes.c_int64(kv_indices_size),
            *map(ctypes.c_int32, arguments[8:]),
            self._threads,
        )

    def map_slots(self, page_map, slots, out, size, _device, _stream) -> None:
        self._library.map_slots(
            page_map.to_bytes(),
            ctypes.c_void_p(slots),
            ctypes.c_void_p(out),
            ctypes.c_int64(size),
            self._threads,
        )

    def last_page_len(self, page_tokens, seq_lens, out, rows, _device, _stream) -> None:
        self._library.last_page_len(
            ctypes.c_int32(page_tokens),
            ctypes.c_void_p(seq_lens),
            ctypes.c_void_p(out),
            ctypes.c_int64(rows),
            self._threads,
        )
