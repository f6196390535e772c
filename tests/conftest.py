# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, settings

import repage
from support import cuda_on_host

# Fixtures like `device` do not change between examples; machines differ in speed.
settings.register_profile(
    "repage", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("repage")


def _reason_without_gpu() -> str | None:
    if not repage.build_info().cuda:
        return "repage was built without CUDA kernels"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_without_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the CUDA kernels compiled for the host."""
    return cuda_on_host.compile_kernels(tmp_path_factory.mktemp("cuda_on_host"))


@pytest.fixture(params=["cpu", "cuda-on-host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for the CPU twins, the CUDA kernels on the host, and the CUDA kernels."""
    if request.param == "cuda-on-host":
        library = request.getfixturevalue("host_kernels")
        kernels = cuda_on_host.HostKernels(library, threads=8)
        for module in ("repage.ops", "repage.buffer"):
            monkeypatch.setattr(f"{module}._core", kernels)
        return "cpu"
    return request.param
