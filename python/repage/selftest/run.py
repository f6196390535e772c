# SPDX-License-Identifier: Apache-2.0
"""Which checks there are, and running them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from repage.errors import ArgumentError
from repage.selftest.attention_checks import attention_checks
from repage.selftest.ops_checks import ops_checks
from repage.selftest.result import Check, CheckResult, NotAvailableError, Status
from repage.selftest.target import Target
from repage.selftest.tensor_map_checks import tensor_map_checks
from repage.selftest.timing import timing_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def all_checks() -> list[Check]:
    """Return every check, in the order in which they run."""
    return [*ops_checks(), *tensor_map_checks(), *attention_checks(), *timing_checks()]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def select_checks(only: Sequence[str] = ()) -> list[Check]:
    """Return the checks that match a pattern.

    Parameters
    ----------
    only : sequence of str, default ()
        Names, beginnings of names up to a dot, or shell patterns. Empty selects every check.

    Returns
    -------
    list of Check

    Raises
    ------
    ArgumentError
        When a pattern matches nothing.
    """
    checks = all_checks()
    for pattern in only:
        if not any(_matches(check.name, pattern) for check in checks):
            groups = sorted({check.name.split(".")[0] for check in checks})
            raise ArgumentError(
                f"only: no check matches {pattern!r}; names begin with {', '.join(groups)}"
            )
    return [
        check
        for check in checks
        if not only or any(_matches(check.name, pattern) for pattern in only)
    ]


def run(
    device: torch.device | None = None,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    report: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Check repage on a GPU.

    Parameters
    ----------
    device : torch.device or None, default None
        A CUDA device; None takes the current one.
    quick : bool, default False
        Fewer page sizes and head counts.
    only : sequence of str, default ()
        As in `select_checks`.
    report : callable or None, default None
        Called with every result as it comes.

    Returns
    -------
    list of CheckResult
        One per check. Without a CUDA device all are "not available", with the reason.

    Raises
    ------
    ArgumentError
        As `select_checks`.
    """
    checks = select_checks(only)
    try:
        target = Target.of_device(device, quick=quick)
    except NotAvailableError as error:
        results = [check.not_available(str(error)) for check in checks]
        for result in results:
            if report is not None:
                report(result)
        return results
    with torch.cuda.device(target.device):  # where FlashInfer launches
        return run_on(target, checks, report=report)


def run_on(
    target: Target,
    checks: Sequence[Check],
    *,
    report: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run checks on a target.

    Parameters
    ----------
    target : Target
        Where to run them.
    checks : sequence of Check
        What to run.
    report : callable or None, default None
        Called with every result as it comes.

    Returns
    -------
    list of CheckResult
    """
    results = []
    for check in checks:
        result = check.run(target)
        if report is not None:
            report(result)
        results.append(result)
    return results


def exit_code(results: Sequence[CheckResult]) -> int:
    """Return what a process should end with.

    Parameters
    ----------
    results : sequence of CheckResult
        From `run`.

    Returns
    -------
    int
        1 when a check failed; 2 when none failed and none could run; 0 otherwise.
    """
    statuses = {result.status for result in results}
    if Status.FAIL in statuses:
        return 1
    return 0 if Status.PASS in statuses else 2
