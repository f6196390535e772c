# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive their parent's interest in them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

GRACE_SECONDS = 15.0
"""Seconds that a process group gets for each signal before the next, stronger one."""


@contextlib.contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: int
) -> Iterator[subprocess.Popen[str]]:
    """Start ``command`` in a process group of its own; stop the whole group on every way out.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    environment : mapping
        The complete environment of the child.
    stdout : int
        File descriptor or ``subprocess.PIPE``; standard error goes to the same place.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        stop_group(process)
        if process.stdout is not None:
            process.stdout.close()


def stop_group(process: subprocess.Popen[str]) -> None:
    """End the process group led by ``process``: interrupt, terminate, kill, each after a grace.

    Does nothing where the group is gone already. Workers left behind by a leader that died are
    ended too: the group exists as long as one member does.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process, number):
            break
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            process.poll()
            if not _signal_group(process, 0):
                break
            time.sleep(0.05)
    process.wait()


def _signal_group(process: subprocess.Popen[str], number: int) -> bool:
    """Send a signal (0: only ask) and return whether the group still exists."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def run_logged(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    timeout: float,
    on_line: Callable[[str], None] | None = None,
) -> int:
    """Run ``command`` to its end, its output in ``log``, and return its exit status.

    Parameters
    ----------
    command, environment
        As in `process_group`.
    log : Path
        File that receives standard output and standard error.
    timeout : float
        Seconds after which the process group is stopped.
    on_line : callable, optional
        Called with every line of output.

    Raises
    ------
    TimeoutError
        If the command did not end in time.
    """
    expired = threading.Event()
    with (
        log.open("w") as sink,
        process_group(command, environment, stdout=subprocess.PIPE) as process,
    ):

        def expire() -> None:
            expired.set()
            stop_group(process)

        timer = threading.Timer(timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None  # asked for above
            for line in process.stdout:
                sink.write(line)
                sink.flush()
                if on_line is not None:
                    on_line(line.rstrip("\n"))
            status = process.wait()
        finally:
            timer.cancel()
    if expired.is_set():
        raise TimeoutError(f"no end after {timeout:.0f} s: {' '.join(command)}; log: {log}")
    return status


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log file, "" where there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
