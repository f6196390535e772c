# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def output_of(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    seconds: float = 850,
) -> str:
    """Run a program and return what it printed on both streams; fails with it when it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
