# SPDX-License-Identifier: Apache-2.0
"""What a check is, and what it answers."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from repage.selftest.target import Target


class Status(str, enum.Enum):
    """Outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    NOT_AVAILABLE = "not available"


class NotAvailableError(Exception):
    """Raised by a check that cannot run here; the message is the reason."""


class CheckFailedError(Exception):
    """Raised by a check that found something wrong; the message says what."""


@dataclass(frozen=True)
class Finding:
    """What a check that passed has to say.

    Parameters
    ----------
    detail : str
        What was compared, for people.
    measurements : mapping of str to float
        Numbers by name; the unit is the end of the name, such as ``"copy_us"``.
    """

    detail: str
    measurements: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckResult:
    """The answer of one check.

    Parameters
    ----------
    name : str
        Dotted name of the check.
    status : Status
        Outcome.
    detail : str
        What was compared, what is wrong, or why the check could not run.
    seconds : float
        Wall time of the check, with the loading and building of kernels.
    measurements : mapping of str to float
        As in `Finding`.
    """

    name: str
    status: Status
    detail: str
    seconds: float
    measurements: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "seconds": round(self.seconds, 4),
            "measurements": dict(self.measurements),
        }


@dataclass(frozen=True)
class Check:
    """A named check.

    Parameters
    ----------
    name : str
        Dotted name, such as ``"ops.page_table"``.
    body : callable
        Takes the target, returns a `Finding`. Raises `CheckFailedError` or `NotAvailableError`;
        any other exception is a failure too.
    """

    name: str
    body: Callable[[Target], Finding]

    def run(self, target: Target) -> CheckResult:
        """Run the check.

        Parameters
        ----------
        target : Target
            Where to run it.

        Returns
        -------
        CheckResult
            Never an exception: a kernel that raises is a check that fails.
        """
        start = time.perf_counter()
        measurements: Mapping[str, float] = {}
        try:
            finding = self.body(target)
            status, detail, measurements = Status.PASS, finding.detail, finding.measurements
        except NotAvailableError as error:
            status, detail = Status.NOT_AVAILABLE, str(error)
        except CheckFailedError as error:
            status, detail = Status.FAIL, str(error)
        except Exception as error:
            status, detail = Status.FAIL, f"{type(error).__name__}: {error}"
        return CheckResult(self.name, status, detail, time.perf_counter() - start, measurements)

    def not_available(self, reason: str) -> CheckResult:
        """Answer for a check that has nowhere to run."""
        return CheckResult(self.name, Status.NOT_AVAILABLE, reason, 0.0)


def require(condition: bool, what: str) -> None:
    """Raise `CheckFailedError` unless a condition holds."""
    if not condition:
        raise CheckFailedError(what)
