# SPDX-License-Identifier: Apache-2.0
"""The backend class that the environment asks for; importing the module installs the kernels.

vLLM resolves a registered backend by path, when a model asks for it; only then are the modules
that the harness patches ready to be imported.
"""

from __future__ import annotations

import atexit
import json

from reference_kernels.harness import HarnessSettings, install

__all__ = ["CONTEXT", "SelectedBackend"]

_SETTINGS = HarnessSettings.from_environment()

CONTEXT = _SETTINGS.context()
"""Counters and provenance of this process."""

if _SETTINGS.fault is not None:
    from reference_kernels.faults import FAULTS

    FAULTS[_SETTINGS.fault]()

SelectedBackend = install(_SETTINGS, CONTEXT)


def _write_report() -> None:
    assert _SETTINGS.report is not None
    provenance = CONTEXT.provenance
    _SETTINGS.report.write_text(
        json.dumps(
            {
                "backend": f"{SelectedBackend.__module__}.{SelectedBackend.__qualname__}",
                "calls": dict(CONTEXT.calls),
                "checked_tokens": provenance.checked_tokens if provenance is not None else 0,
            }
        )
    )


if _SETTINGS.report is not None:
    atexit.register(_write_report)
