# SPDX-License-Identifier: Apache-2.0
"""Engine runs, each done once per test session and shared by the tests that look at it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from repage.demo.launch import ENGINE_PROGRAM, RunFailedError, Variant, run_variant
from repage.demo.result import RunResult
from repage.demo.setups import SETUPS

BROKEN_ENGINE = Path(__file__).with_name("broken_engine.py")


class Duration(NamedTuple):
    """Seconds of one run: the whole process, and the generation in it."""

    name: str
    total: float
    generating: float


@dataclass
class EngineRuns:
    """Runs setups in processes of their own and keeps the records.

    ``fault`` names one of the deliberate faults of ``broken_engine.py``; None is the product.
    """

    folder: Path
    cache_dir: Path
    durations: list[Duration] = field(default_factory=list)
    done: dict[tuple[str, Variant, str | None], RunResult | RunFailedError] = field(
        default_factory=dict
    )

    def get(self, setup: str, variant: Variant, fault: str | None = None) -> RunResult:
        key = (setup, variant, fault)
        if key not in self.done:
            self.done[key] = self._run(*key)
        outcome = self.done[key]
        if isinstance(outcome, RunFailedError):
            raise outcome
        return outcome

    def log_of(self, setup: str, variant: Variant, fault: str | None = None) -> str:
        return self._out(setup, variant, fault).with_suffix(".log").read_text(errors="replace")

    def _run(self, setup: str, variant: Variant, fault: str | None) -> RunResult | RunFailedError:
        out = self._out(setup, variant, fault)
        began = time.perf_counter()
        program = ENGINE_PROGRAM if fault is None else (str(BROKEN_ENGINE), fault)
        try:
            result = run_variant(
                SETUPS[setup], variant, out=out, cache_dir=self.cache_dir, program=program
            )
        except RunFailedError as error:
            self.durations.append(Duration(out.stem, time.perf_counter() - began, 0.0))
            return error
        seconds = time.perf_counter() - began
        self.durations.append(Duration(out.stem, seconds, result.seconds["generate"]))
        return result

    def _out(self, setup: str, variant: Variant, fault: str | None) -> Path:
        suffix = f"-{fault}" if fault else ""
        return self.folder / f"{setup}-{variant.label()}{suffix}.json"
