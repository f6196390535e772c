# SPDX-License-Identifier: Apache-2.0
"""One real vLLM engine on the reference kernels, in one process.

``python -m reference_kernels.engine_run SETUP --kernels xqa --layout BLHNC --out result.json``
runs a setup like ``repage.demo.engine_run`` does, but with the chosen kernels' real backend in
place of ``CPU_ATTN``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reference_kernels.engine_setups import ENGINE_SETUPS
from reference_kernels.harness import KERNEL_PATHS, HarnessSettings
from reference_kernels.plugin import PLUGIN_NAME, write_distribution
from repage.demo import triton_cpu
from repage.demo.engine_run import run
from repage.demo.launch import Variant, child_environment, variant_environment
from repage.demo.processes import run_logged
from repage.demo.result import RunResult

__all__ = ["EngineRun", "launch"]

_TIMEOUT = 900


@dataclass(frozen=True)
class EngineRun:
    """One run: the setup, the layout, and what is under the backend.

    Attributes
    ----------
    setup : str
        A key of ``ENGINE_SETUPS``.
    layout : str
        ``VLLM_KV_CACHE_LAYOUT``.
    harness : HarnessSettings | None
        The kernels; ``None`` runs vLLM's own CPU attention.
    multiprocess : bool
        Whether the engine core has a process of its own, vLLM's default.
    """

    setup: str
    layout: str
    harness: HarnessSettings | None = None
    multiprocess: bool = False

    def environment(self, plugin_dir: Path) -> dict[str, str]:
        """The environment of the engine's process."""
        variant = Variant(self.layout, plugin=False, multiprocess=self.multiprocess)
        environment = child_environment(ENGINE_SETUPS[self.setup], variant)
        search = [*write_distribution(plugin_dir), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
        if self.harness is not None:
            environment |= self.harness.to_environment() | {"VLLM_PLUGINS": PLUGIN_NAME}
        return environment


def launch(engine_run: EngineRun, out: Path) -> RunResult:
    """Run in a process of its own; the log is next to ``out``.

    Raises
    ------
    RuntimeError
        If the run fails; the message holds the end of its log.
    TimeoutError
        If it does not end; its processes are gone then.
    """
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "reference_kernels.engine_run",
        engine_run.setup,
        "--layout",
        engine_run.layout,
        "--out",
        str(out),
        "--in-this-process",
    ]
    if engine_run.multiprocess:
        command.append("--multiprocess")
    environment = engine_run.environment(out.parent / "plugin")
    status = run_logged(command, environment, log, timeout=_TIMEOUT)
    if status != 0 or not out.exists():
        raise RuntimeError(f"{engine_run} ended with {status}\n{log.read_text()[-6000:]}")
    return RunResult.load(out)


def main(arguments: Sequence[str]) -> None:
    """Run one setup as the command line and the environment say; write its record."""
    parser = argparse.ArgumentParser(prog="python -m reference_kernels.engine_run")
    parser.add_argument("setup", choices=sorted(ENGINE_SETUPS))
    parser.add_argument("--layout", required=True)
    parser.add_argument("--kernels", choices=sorted(KERNEL_PATHS), help="default: CPU_ATTN")
    parser.add_argument("--factory", help="module:function from backend class to backend class")
    parser.add_argument("--page", type=int, help="page for reference_kernels.paged_factory")
    parser.add_argument("--fault", help="a fault of reference_kernels.faults")
    parser.add_argument("--vllm-033", type=Path, help="directory with an unpacked vLLM 0.33.0")
    parser.add_argument("--multiprocess", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.in_this_process:
        harness = options.kernels and HarnessSettings(
            options.kernels,
            options.factory,
            vllm_033=options.vllm_033,
            float32=options.setup.endswith("float32"),
            page_tokens=options.page,
            fault=options.fault,
            report=options.out.with_suffix(".calls"),
        )
        chosen = EngineRun(options.setup, options.layout, harness, options.multiprocess)
        launch(chosen, options.out)
        return
    setup = ENGINE_SETUPS[options.setup]
    variant = Variant(options.layout, plugin=False, multiprocess=options.multiprocess)
    plugins = os.environ["VLLM_PLUGINS"]
    os.environ.update(variant_environment(setup, variant) | {"VLLM_PLUGINS": plugins})
    triton_cpu.install_if_asked()
    run(setup, variant).save(options.out)


if __name__ == "__mp_main__":
    triton_cpu.install_if_asked()

if __name__ == "__main__":
    main(sys.argv[1:])
