# SPDX-License-Identifier: Apache-2.0
"""Runs the self-test group by group, each in a process of its own with a time limit.

An illegal address ends a CUDA context: every later check of the process fails too. The groups keep
what is right apart from what is not, and what came before a time limit is not lost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

_COMMAND = "from repage.selftest.command import selftest_command; selftest_command()"


def groups() -> list[str]:
    """Names of the groups: one per attention path, one for each other kind of check."""
    from repage.selftest.run import all_checks

    names = [check.name.split(".") for check in all_checks()]
    return list(dict.fromkeys(".".join(n[:2]) if n[0] == "attention" else n[0] for n in names))


def run_group(name: str, limit: float) -> dict[str, object]:
    """Run one group and return its report, with what went wrong outside the checks."""
    command = [sys.executable, "-c", _COMMAND, "--json", "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "problem": f"took more than {limit} s", "results": []}
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        report = {"problem": (done.stdout + done.stderr)[-2000:], "results": []}
    return {**report, "exit_code": done.returncode}


def main() -> int:
    """Run every group; returns 1 when one failed, or when none could run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--limit", type=float, default=60, help="seconds for a group (60)")
    parser.add_argument("--jobs", type=int, default=4, help="groups at once (4)")
    arguments = parser.parse_args()
    reports: dict[str, dict[str, object]] = {}

    def finish(name: str, report: dict[str, object]) -> None:
        reports[name] = report
        # Written after each group: a limit on the whole must not lose what is there.
        arguments.output.write_text(json.dumps(reports, indent=1))
        results = report["results"]
        assert isinstance(results, list)
        for result in results:
            seconds = f"{result['seconds']:.2f} s"
            print(f"{result['status']:13} {seconds:>9} {result['name']}: {result['detail']}")
        if "problem" in report:
            print(f"failed                  {name}: {report['problem']}")

    # Importing takes longer than checking, so groups run side by side; the timings run alone.
    together = [name for name in groups() if name != "timing"]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {pool.submit(run_group, name, arguments.limit): name for name in together}
        for done in as_completed(runs):
            finish(runs[done], done.result())
    finish("timing", run_group("timing", arguments.limit))
    codes = {report["exit_code"] for report in reports.values()}
    return int(bool(codes - {0, 2}) or 0 not in codes)


if __name__ == "__main__":
    sys.exit(main())
