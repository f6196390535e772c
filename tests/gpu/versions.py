# SPDX-License-Identifier: Apache-2.0
"""Writes what the GPU suite ran on to a JSON file; fails when there is no GPU to run on."""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def output_of(*command: str) -> str | None:
    """What a program prints, or None where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version_of(name: str) -> str:
    """The version of a module, or why it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "installed"))
    except Exception as error:
        return f"not available: {type(error).__name__}: {error}"


def main() -> int:
    """Write the file named on the command line."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "nvidia_smi": output_of(
            "nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv"
        ),
        "nvcc": (output_of("nvcc", "--version") or "").splitlines()[-1:],
        "compute_sanitizer": (output_of("compute-sanitizer", "--version") or "").splitlines()[:1],
        "commit": output_of("git", "rev-parse", "HEAD"),
        "modules": {
            name: version_of(name)
            for name in ("torch", "flashinfer", "tvm_ffi", "cuda.bindings", "numpy", "hypothesis")
        },
    }
    problems = []
    try:
        import torch

        report["torch_cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            report["device"] = torch.cuda.get_device_name()
        else:
            problems.append("no CUDA device")
    except ImportError as error:
        problems.append(str(error))
    try:
        import repage

        report["repage"] = vars(repage.build_info())
        if not repage.build_info().cuda:
            problems.append("repage was built without CUDA kernels")
    except Exception as error:
        problems.append(f"repage cannot be imported: {error}")
    report["problems"] = problems
    text = json.dumps(report, indent=2, default=str)
    Path(sys.argv[1]).write_text(text)
    print(text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
