# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel sources, compiled for the host, in place of the compiled core's operations.

This runs the kernels' index logic (rows at any alignment, 16-byte stores, parts of a row, the
barrier around the watermarks) on machines without a GPU. The undefined-behaviour sanitizer is on:
a misaligned 16-byte store or an overflow ends the test.
"""

from __future__ import annotations

import ctypes
import functools
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

    def TableBuilder(self, *arguments) -> TableBuilder:  # noqa: N802
        return TableBuilder(self, *arguments)

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


class TableBuilder:
    """Reads no tensors itself, so that the caller checks them and launches."""

    def __init__(
        self,
        kernels: HostKernels,
        page_map: _core.PageMap,
        *fixed: int,
    ) -> None:
        *addresses, max_rows, block_columns, lookahead, row_parts, _device, _type = fixed
        self._addresses = addresses
        self._sizes = (max_rows, block_columns, lookahead, row_parts)
        self._build_page_table = functools.partial(kernels.build_page_table, page_map)
        self._build_group_tables = functools.partial(kernels.build_group_tables, page_map)

    def build(self, *_tensors) -> int:
        return -1

    def build_list(self, *_tensors) -> int:
        return -1

    def launch(
        self, table, row_stride, seq_lens, kv_indptr, kv_indices, kv_indices_size, rows, stream
    ) -> None:
        forms = (table, row_stride, seq_lens, *self._addresses)
        sizes = (rows, *self._sizes, 0, stream)
        if kv_indptr:
            lists = (kv_indptr, kv_indices, kv_indices_size)
            self._build_group_tables(*forms, *lists, *sizes)
        else:
            self._build_page_table(*forms, *sizes)
