# SPDX-License-Identifier: Apache-2.0
"""Builds: with and without CUDA, as a wheel, and what the package says about itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import repage
from repage import _core

REPOSITORY = Path(__file__).parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def configure(build: Path, *options: str, nvcc: str | None = None) -> subprocess.CompletedProcess:
    """Run CMake where no nvcc can be found but the one that CUDACXX names."""
    programs = build / "path"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("ninja", "c++", "gcc", "g++", "as", "ld", "ar", "ranlib", "sh", "which"):
        found = shutil.which(name)
        if found and not (programs / name).exists():
            (programs / name).symlink_to(Path(found).resolve() if name == "ninja" else found)
    environment = {"PATH": str(programs), "HOME": str(build)}
    if nvcc:
        environment["CUDACXX"] = nvcc
        environment["PATH"] += f":{os.environ['PATH']}"
    return subprocess.run(
        [
            str(shutil.which("cmake")),
            *("-S", str(REPOSITORY), "-B", str(build), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_folder()}",
            "-DREPAGE_CUDA_SEARCH_PATHS=",
            "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF",
            *options,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def pybind11_folder() -> str:
    import pybind11

    return pybind11.get_cmake_dir()


def test_asking_for_cuda_without_nvcc_names_what_to_set(tmp_path: Path) -> None:
    result = configure(tmp_path, "-DREPAGE_CUDA=ON")
    assert result.returncode != 0
    for name in ("REPAGE_CUDA=ON", "CUDACXX", "CUDA_HOME", "REPAGE_CUDA=OFF"):
        assert name in " ".join(result.stderr.split())


def test_an_unknown_mode_names_the_known_ones(tmp_path: Path) -> None:
    result = configure(tmp_path, "-DREPAGE_CUDA=MAYBE")
    assert result.returncode != 0
    assert "REPAGE_CUDA is 'MAYBE'; expected AUTO, ON or OFF" in " ".join(result.stderr.split())


def test_automatic_builds_say_in_one_line_that_there_is_no_nvcc(tmp_path: Path) -> None:
    result = configure(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("repage: no nvcc found, building without CUDA kernels") == 1


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_an_nvcc_that_appears_later_is_found_in_the_same_build_folder(tmp_path: Path) -> None:
    assert "no nvcc found" in configure(tmp_path).stdout
    result = configure(tmp_path, nvcc=NVCC)
    assert result.returncode == 0, result.stderr
    assert "repage: CUDA kernels for 80;" in result.stdout


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_with_nvcc_the_build_has_every_architecture_that_it_knows() -> None:
    known = subprocess.run(
        [str(NVCC), "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout.split()
    info = repage.build_info()
    assert info.cuda
    expected = [number for number in (80, 90, 100, 103, 120) if f"compute_{number}" in known]
    assert [int(name.split("-")[0]) for name in info.cuda_architectures] == expected
    assert info.cuda_architectures[0] == "80", "PTX of the oldest serves devices without code"


def test_the_cuda_runtime_is_linked_statically() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    needed = subprocess.run(
        [readelf, "-d", _core.__file__], capture_output=True, text=True, check=True
    )
    assert "libcudart" not in needed.stdout
    assert "libtorch" not in needed.stdout


def test_the_plugin_is_an_entry_point_of_vllm() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="repage")
    assert entry.value == "repage.vllm:register"


def test_the_package_wins_over_the_folder_of_headers() -> None:
    code = "import repage; print(repage.__file__, repage.build_info().version)"
    for folder in (REPOSITORY, REPOSITORY.parent):
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        )
        assert result.stdout.split()[0].endswith("__init__.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"),
            *("-Cbuild-dir=" + str(folder / "build"), "-Ccmake.define.REPAGE_CUDA=OFF"),
            *("--wheel-dir", str(folder), str(REPOSITORY)),
        ],
        check=True,
    )
    (path,) = folder.glob("repage-*.whl")
    return path


def test_a_wheel_carries_module_headers_types_and_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("page_map.h", "block_geometry.h", "fast_divisor.h", "host_device.h"):
        assert f"repage/include/repage/{name}" in names
    assert "repage/py.typed" in names
    assert any(name.startswith("repage/_core.") and name.endswith(".so") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("csrc", "tests", "python"))]


def test_a_wheel_works_on_its_own_and_without_cuda(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import repage, torch
assert not repage.build_info().cuda and repage.build_info().cuda_architectures == ()
geometry = repage.BlockGeometry.dense(
    "NHC", num_blocks=8, block_tokens=64, num_heads=2, content_bytes=32, block_stride=65536)
plan = repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,)))
print(repage.build_page_table(torch.tensor([[2]], dtype=torch.int32), plan).tolist())
print(repage.get_include())
"""
    # Without site, so that an editable install's import hook is not there.
    path = os.pathsep.join([str(tmp_path), str(Path(torch.__file__).parents[1])])
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    table, include = result.stdout.splitlines()
    assert table == "[[128, 129, 130, 131]]"
    assert (Path(include) / "repage" / "page_map.h").is_file()
    assert Path(include).is_relative_to(tmp_path)
