# SPDX-License-Identifier: Apache-2.0
"""Profiler ranges, seen by a profiler: a small NVTX tool that prints what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import repage
from repage import _core, nvtx
from support.cuda_on_host import COMPILER

TOOL = r"""
#include <cstdio>
#include <nvtx3/nvToolsExt.h>

static nvtxDomainHandle_t NVTX_API Create(const char* name) {
  std::printf("domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(1);
}
static nvtxStringHandle_t NVTX_API Register(nvtxDomainHandle_t, const char* name) {
  char* kept = new char[256];
  std::snprintf(kept, 256, "%s", name);
  return reinterpret_cast<nvtxStringHandle_t>(kept);
}
static int NVTX_API Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  std::printf("push %s\n", reinterpret_cast<const char*>(event->message.registered));
  return 0;
}
static int NVTX_API Pop(nvtxDomainHandle_t) {
  std::printf("pop\n");
  std::fflush(stdout);
  return 0;
}
extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&Create);
  *table[NVTX_CBID_CORE2_DomainRegisterStringA] = reinterpret_cast<NvtxFunctionPointer>(&Register);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&Push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&Pop);
  return 1;
}
"""

PROGRAM = """
import torch, repage, repage.errors
geometry = repage.BlockGeometry.dense(
    "NHC", num_blocks=8, block_tokens=64, num_heads=2, content_bytes=32, block_stride=65536)
plan = repage.plan_pages(geometry, repage.KernelPageRules(page_sizes=(16,)))
table = torch.tensor([[2]], dtype=torch.int32)
repage.build_page_table(table, plan)
named = repage.PageTableBuffer(plan, 1, 1, torch.device("cpu"), name="full attention")
named.build(table)
lists = {"kv_indptr": torch.tensor([0, 4], dtype=torch.int32),
         "kv_indices": torch.zeros(4, dtype=torch.int32)}
named.build_kv_indices(table, **lists)
repage.PageTableBuffer(plan, 1, 1, torch.device("cpu")).build(table, **lists)
try:
    repage.map_slots(table, plan)
except repage.errors.DtypeError:
    repage.map_slots(torch.zeros(1, dtype=torch.int64), plan)
"""

RANGES = [
    "push build_page_table",
    "pop",
    "push build_page_table[full attention]",
    "pop",
    "push build_kv_indices[full attention]",
    "pop",
    "push build_group_tables",
    "pop",
    "push map_slots",
    "pop",  # after the error too
    "push map_slots",
    "pop",
]


def nvtx_headers() -> Path | None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc:
        roots.append(str(Path(nvcc).resolve().parents[1]))
    folders = [Path(root) / "include" for root in roots if root]
    return next((f for f in folders if (f / "nvtx3" / "nvToolsExt.h").exists()), None)


def run(**variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "REPAGE_NVTX"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> str:
    headers = nvtx_headers()
    if headers is None:
        pytest.skip("no NVTX headers (they come with the CUDA toolkit)")
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "tool.cc").write_text(TOOL)
    library = folder / "tool.so"
    subprocess.run(
        [
            *(*COMPILER, "-std=c++20", "-shared", "-fPIC", "-isystem", str(headers)),
            *(str(folder / "tool.cc"), "-o", str(library)),
        ],
        check=True,
    )
    return str(library)


@pytest.mark.skipif(_core.CUDA_VERSION is None, reason="ranges come from the CUDA build")
def test_a_profiler_sees_each_operation_by_name_in_the_domain(tool: str) -> None:
    output = run(REPAGE_NVTX="1", NVTX_INJECTION64_PATH=tool).stdout.splitlines()
    assert "domain repage" in output
    assert [line for line in output if not line.startswith("domain")] == RANGES


def test_a_profiler_sees_nothing_unless_asked(tool: str) -> None:
    assert "push" not in run(NVTX_INJECTION64_PATH=tool).stdout


def test_ranges_need_no_profiler() -> None:
    assert run(REPAGE_NVTX="1").returncode == 0


def test_off_means_the_very_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cost when off: no wrapper, not even one that asks."""
    monkeypatch.delenv("REPAGE_NVTX", raising=False)
    assert nvtx.ranged(_core.build_page_table, "build_page_table") is _core.build_page_table


def test_without_cuda_and_without_the_package_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REPAGE_NVTX", "1")
    monkeypatch.setattr(_core, "CUDA_VERSION", None)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    nvtx._backend.cache_clear()
    try:
        for _ in range(2):
            assert nvtx.ranged(repage.map_slots, "map_slots") is repage.map_slots
    finally:
        nvtx._backend.cache_clear()
    # Once vLLM's logging is set up a record may reach more than one handler.
    (record,) = {id(record): record for record in caplog.records}.values()
    assert "pip install nvtx" in record.message


def test_without_cuda_the_nvtx_package_makes_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Domain:
        def get_event_attributes(self, message: str) -> str:
            return message

        def push_range(self, attributes: str) -> None:
            calls.append(attributes)

        def pop_range(self) -> None:
            calls.append("pop")

    package = type(sys)("nvtx")
    package.get_domain = lambda name: Domain() if name == "repage" else None
    monkeypatch.setenv("REPAGE_NVTX", "1")
    monkeypatch.setattr(_core, "CUDA_VERSION", None)
    monkeypatch.setitem(sys.modules, "nvtx", package)
    nvtx._backend.cache_clear()
    try:
        assert nvtx.ranged(len, "count", "some layers")([1, 2]) == 2
    finally:
        nvtx._backend.cache_clear()
    assert calls == ["count[some layers]", "pop"]
