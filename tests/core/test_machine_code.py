# SPDX-License-Identifier: Apache-2.0
"""What the CUDA compiler made of the kernels, read from the built module."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import repage
from repage import _core

# So many leave room for six blocks of 256 threads on every processor (page_table_kernels.cuh).
MAX_REGISTERS = 40
KERNELS = (
    "BuildPageTableKernel",
    "BuildKvIndicesKernel",
    "BuildGroupTablesKernel",
    "MapSlotsKernel",
    "LastPageLenKernel",
)


def find_cuobjdump() -> str | None:
    """Return the toolkit's, or the one that Triton's package carries."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found:
        return found
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        carried = Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if carried.exists():
            return str(carried)
    return None


def dump(option: str) -> dict[tuple[str, str], str]:
    """Return cuobjdump's text per architecture and kernel."""
    if not repage.build_info().cuda:
        pytest.skip("repage was built without CUDA kernels")
    tool = find_cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump, neither on PATH nor in Triton's package")
    output = subprocess.run(
        [tool, option, _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    found: dict[tuple[str, str], str] = {}
    architecture = kernel = None
    for line in output.splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            architecture, kernel = match[1], None
        elif match := re.search(r"Function *:? *(\w+)", line):
            kernel = next((name for name in KERNELS if name in match[1]), None)
        if architecture and kernel:
            key = architecture, kernel
            found[key] = found.get(key, "") + line + "\n"
    return found


@pytest.fixture(scope="module")
def machine_code() -> dict[tuple[str, str], str]:
    return dump("-sass")


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], str]:
    return dump("-res-usage")


def built_architectures() -> set[str]:
    names = repage.build_info().cuda_architectures
    return {f"sm_{name.split('-')[0]}" for name in names if not name.endswith("virtual")}


def test_every_architecture_has_every_kernel(machine_code: dict[tuple[str, str], str]) -> None:
    assert set(machine_code) == {(a, k) for a in built_architectures() for k in KERNELS}


def test_tables_and_slots_are_stored_16_bytes_at_a_time(
    machine_code: dict[tuple[str, str], str],
) -> None:
    for (architecture, kernel), code in machine_code.items():
        if kernel != "LastPageLenKernel":
            assert re.search(r"\bSTG\.E\.(\w+\.)*128\b", code), f"{kernel} on {architecture}"


def test_nothing_goes_through_local_memory(machine_code: dict[tuple[str, str], str]) -> None:
    for (architecture, kernel), code in machine_code.items():
        assert not re.search(r"\b(LDL|STL)\b", code), f"{kernel} on {architecture}"


def test_kernels_divide_by_multiplication_only(
    machine_code: dict[tuple[str, str], str],
) -> None:
    """A division that the compiler has to make starts from a reciprocal."""
    for (architecture, kernel), code in machine_code.items():
        assert not re.search(r"\bMUFU\.RCP|\bI2F", code), f"{kernel} {architecture}"


def test_registers_leave_room_for_six_blocks(resources: dict[tuple[str, str], str]) -> None:
    assert set(resources) == {(a, k) for a in built_architectures() for k in KERNELS}
    for (architecture, kernel), text in resources.items():
        registers = int(re.search(r"REG:(\d+)", text)[1])
        assert registers <= MAX_REGISTERS, f"{kernel} on {architecture} takes {registers}"
        assert "STACK:0 " in text, f"{kernel} on {architecture}: {text}"
        assert "LOCAL:0 " in text, f"{kernel} on {architecture}: {text}"
