# SPDX-License-Identifier: Apache-2.0
"""The harness as a vLLM general plugin, for engines in other processes.

vLLM finds plugins through installed distributions. `write_distribution` makes a directory that is
one; on the ``PYTHONPATH`` of an engine, together with the tests' directory, it brings the plugin
along without installing anything.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PLUGIN_NAME", "register", "write_distribution"]

PLUGIN_NAME = "reference_kernels"
"""For ``VLLM_PLUGINS``."""

_METADATA = "Metadata-Version: 2.1\nName: reference-kernels\nVersion: 0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\n{PLUGIN_NAME} = reference_kernels.plugin:register\n"


def register() -> None:
    """Register the selected backend in place of ``CPU_ATTN``; may be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN, "reference_kernels.selected_backend.SelectedBackend"
    )


def write_distribution(directory: Path) -> list[str]:
    """Write the plugin's distribution into ``directory``.

    Returns
    -------
    list[str]
        The entries that the engine's ``PYTHONPATH`` needs.
    """
    info = directory / "reference_kernels-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return [str(directory), str(Path(__file__).resolve().parent.parent)]
