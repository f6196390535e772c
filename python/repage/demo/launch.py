# SPDX-License-Identifier: Apache-2.0
"""Starts one engine run in a process of its own and returns its record."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repage.demo import triton_cpu
from repage.demo.processes import run_logged, tail
from repage.demo.result import RunResult
from repage.demo.setups import PACKED_LAYOUT, STOCK_LAYOUT, EngineSetup

STAGE_PREFIX = "repage-stage: "
"""Start of the lines by which a run tells how far it is."""

RUN_TIMEOUT = 900.0
"""Seconds after which a run is given up; on two busy cores the longest takes about 200."""

DECIDED_HERE = frozenset({"REPAGE_CPU_PAGE", "REPAGE_DISABLE", "TRITON_INTERPRET"})
"""Variables that a run takes from its variant and never from the environment around it."""

ENGINE_PROGRAM = ("-m", "repage.demo.engine_run")


@dataclass(frozen=True)
class Variant:
    """How a setup is run.

    Attributes
    ----------
    layout : str
        The layout asked for, as in ``VLLM_KV_CACHE_LAYOUT``.
    page : int, optional
        Tokens of a kernel page (``REPAGE_CPU_PAGE``); None leaves manager blocks whole.
    plugin : bool
        Whether the repage plugin may load.
    multiprocess : bool
        Whether the engine core runs in a process of its own, vLLM's default. It then cannot be
        observed: geometry, tables and draft tokens are missing from the record.
    """

    layout: str
    page: int | None = None
    plugin: bool = True
    multiprocess: bool = False

    def label(self) -> str:
        """Return a short name for file names and tables."""
        parts = [self.layout, f"P{self.page}" if self.page else "whole"]
        if not self.plugin:
            parts.append("stock")
        if self.multiprocess:
            parts.append("mp")
        return "-".join(parts)

    def arguments(self) -> list[str]:
        """Return the variant as arguments of ``repage.demo.engine_run``."""
        arguments = ["--layout", self.layout]
        if self.page is not None:
            arguments += ["--page", str(self.page)]
        if not self.plugin:
            arguments.append("--no-plugin")
        if self.multiprocess:
            arguments.append("--multiprocess")
        return arguments


STOCK = Variant(STOCK_LAYOUT, plugin=False)


def packed(page: int | None) -> Variant:
    """Return the packed layout with kernel pages of ``page`` tokens (None: whole blocks)."""
    return Variant(PACKED_LAYOUT, page=page)


class RunFailedError(RuntimeError):
    """An engine run ended without a record; the message has the end of its log."""


def variant_environment(setup: EngineSetup, variant: Variant) -> dict[str, str]:
    """Return the environment variables that make ``setup`` run as ``variant``.

    They must be set before vLLM is imported, and `OMP_NUM_THREADS` before torch is.
    """
    second_generation = setup.runner == "V2"
    variables = {
        "VLLM_PLUGINS": "repage" if variant.plugin else "",
        "VLLM_KV_CACHE_LAYOUT": variant.layout,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if variant.multiprocess else "0",
        # A fork of a process that has used torch's thread pool can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if second_generation else "0",
        triton_cpu.SWITCH: "1" if second_generation else "0",
        # One thread and no pinning: the same order of additions in every run, and stable times.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if variant.page is not None:
        variables["REPAGE_CPU_PAGE"] = str(variant.page)
    return variables


def child_environment(setup: EngineSetup, variant: Variant) -> dict[str, str]:
    """Return this process's environment, changed so that a child runs ``setup`` as ``variant``."""
    inherited = {name: value for name, value in os.environ.items() if name not in DECIDED_HERE}
    return {**inherited, **variant_environment(setup, variant)}


def run_variant(
    setup: EngineSetup,
    variant: Variant,
    *,
    out: Path,
    cache_dir: Path | None = None,
    on_stage: Callable[[str], None] | None = None,
    program: Sequence[str] = ENGINE_PROGRAM,
    timeout: float = RUN_TIMEOUT,
) -> RunResult:
    """Run ``setup`` as ``variant`` in a process of its own.

    Parameters
    ----------
    setup : EngineSetup
        One of `repage.demo.setups.SETUPS`.
    variant : Variant
        Layout, page, plugin.
    out : Path
        File for the record; the log is written next to it with the suffix ``.log``.
    cache_dir : Path, optional
        Folder of the built checkpoints.
    on_stage : callable, optional
        Called with a few words whenever the run enters its next stage.
    program : sequence of str
        Arguments that select the program; one that takes the same arguments may replace it.
    timeout : float
        Seconds.

    Raises
    ------
    RunFailedError
        If the run did not end well or not in time.
    """

    def watch(line: str) -> None:
        if on_stage is not None and line.startswith(STAGE_PREFIX):
            on_stage(line.removeprefix(STAGE_PREFIX))

    command = [sys.executable, *program, setup.name, *variant.arguments(), "--out", str(out)]
    if cache_dir is not None:
        command += ["--cache-dir", str(cache_dir)]
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    try:
        status = run_logged(
            command, child_environment(setup, variant), log, timeout=timeout, on_line=watch
        )
    except TimeoutError as error:
        raise RunFailedError(f"{setup.name} ({variant.label()}): {error}") from error
    if status != 0 or not out.exists():
        raise RunFailedError(
            f"{setup.name} ({variant.label()}) ended with status {status}; log: {log}\n{tail(log)}"
        )
    return RunResult.load(out)
