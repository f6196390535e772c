# SPDX-License-Identifier: Apache-2.0
"""The CPU twins, built with AddressSanitizer and UBSan, on random arrays of exact size."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import IO

import numpy as np

import repage
from fuzz.geometries import Ids, random_addresses, random_batch, random_indptr, random_pool
from support import oracle
from support.cuda_on_host import COMPILER, REPOSITORY

SOURCE = Path(__file__).with_name("sanitized.cc")
FLAGS = (
    *("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


VECTOR_BITS = (512, 256, 0)


def build(folder: Path, vector_bits: int) -> Path:
    """Compile the CPU twins and the harness into a program, for vectors of at most so many bits."""
    program = folder / f"sanitized{vector_bits}"
    width = f"-DREPAGE_MAX_VECTOR_BITS={vector_bits}"
    sources = [str(SOURCE), *map(str, sorted((REPOSITORY / "csrc").glob("*_cpu.cc")))]
    command = [*COMPILER, *FLAGS, width, "-I", str(REPOSITORY), *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


class SanitizedTwins:
    """A process that runs one operation after the other; a fault ends it with a report."""

    def __init__(self, program: Path) -> None:
        # Leaks are not what is looked for, and the leak checker needs ptrace, which containers
        # may not have.
        options = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0"}
        # vLLM's CPU platform puts its OpenMP there; the sanitizer wants to be loaded first.
        options.pop("LD_PRELOAD", None)
        self._process = subprocess.Popen(
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=options,
        )

    def __enter__(self) -> SanitizedTwins:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.terminate()
        self._process.wait()

    def run(
        self,
        operation: int,
        sizes: tuple[int, ...],
        page_map: bytes,
        arrays: tuple[np.ndarray, ...],
        replies: tuple[tuple[int, type], ...],
    ) -> list[np.ndarray]:
        """Send one request and return the arrays that come back."""
        message = struct.pack(f"<{2 + len(sizes)}q", operation, len(sizes), *sizes) + page_map
        for array in arrays:
            message += struct.pack("<q", array.size) + array.tobytes()
        try:
            _stream(self._process.stdin).write(message)
            _stream(self._process.stdin).flush()
            return [self._read(count, dtype) for count, dtype in replies]
        except (BrokenPipeError, EOFError):
            report = _stream(self._process.stderr).read().decode(errors="replace")
            raise AssertionError(f"the sanitized twins ended:\n{report[:6000]}") from None

    def _read(self, count: int, dtype: type) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        data = _stream(self._process.stdout).read(size)
        if len(data) != size:
            raise EOFError
        return np.frombuffer(data, dtype)


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def check(seed: int, twins: SanitizedTwins) -> None:
    """Run every operation on the pool of one seed.

    Raises
    ------
    AssertionError
        Where a sanitizer has something to say, or a result differs from brute force.
    """
    rng = np.random.default_rng(seed)
    ids: Ids
    if rng.random() < 0.5:
        addresses = random_addresses(rng)
        plan, ids = addresses.plan, addresses
    else:
        pool = random_pool(rng)
        plan, ids = pool.plan, pool.page_ids()
        slots = rng.integers(-3, pool.num_blocks * pool.block_tokens + 5, int(rng.integers(0, 40)))
        (found,) = twins.run(2, (), plan.page_map.to_bytes(), (slots,), ((slots.size, np.int64),))
        assert found.tolist() == oracle.virtual_slots(ids, slots, pool).tolist()
    _check_tables(rng, twins, plan, ids)
    page_map = plan.page_map.to_bytes()
    tokens = rng.integers(-(2**31), 2**31, int(rng.integers(0, 20)), dtype=np.int32)
    page = int(rng.choice([plan.page_tokens, 1, 2**31 - 1]))
    (found,) = twins.run(3, (page,), page_map, (tokens,), ((tokens.size, np.int32),))
    assert found.tolist() == [0 if n <= 0 else (n - 1) % page + 1 for n in tokens.tolist()]


def _check_tables(
    rng: np.random.Generator, twins: SanitizedTwins, plan: repage.PagePlan, ids: Ids
) -> None:
    """Check both table forms, one by one or in the operation that builds them together."""
    batch = random_batch(rng, plan.geometry.num_blocks, plan.geometry.block_tokens)
    rows, columns = batch.rows + int(rng.integers(0, 3)), batch.columns * plan.pages_per_block
    expected = oracle.page_table(
        ids,
        batch.table,
        batch.seq_lens,
        plan.geometry.block_tokens,
        lookahead=batch.lookahead,
        table_rows=max(rows, 1),
    )[:rows]
    # With marks, what they cover is dirty; everything else is 0 already.
    marked, row_parts = rng.random() < 0.5, int(rng.integers(1, 5))
    dirty = rng.integers(0, columns + 1, (rows, row_parts), dtype=np.int32)
    marks = dirty if marked else np.empty(0, np.int32)
    reach = dirty.max(axis=1, initial=0)[:, None]
    old = np.where(np.arange(columns) < reach, -7, 0 if marked else -7).astype(np.int32)
    lengths = np.empty(0, np.int32) if batch.seq_lens is None else batch.seq_lens
    indptr = random_indptr(rng, batch, plan.pages_per_block)
    indices = np.full(max(int(indptr[-1]) - int(rng.integers(-3, 4)), 0), -7, np.int32)
    sizes = (
        *(batch.row_stride, batch.rows, batch.columns, rows, batch.lookahead, row_parts),
        int(batch.seq_lens is not None),
    )
    table, _, found = twins.run(
        int(rng.integers(2)),
        sizes,
        plan.page_map.to_bytes(),
        (batch.memory, lengths, old, marks, indptr, indices),
        ((rows * columns, np.int32), (marks.size, np.int32), (indices.size, np.int32)),
    )
    assert np.array_equal(table.reshape(rows, columns), expected)
    assert np.array_equal(found, oracle.kv_indices(ids, batch.table, indptr, indices))
