# SPDX-License-Identifier: Apache-2.0
"""Numeric checks of repage on the user's own GPU, in about half a minute.

``repage selftest`` on the command line, `run` from Python. What is checked: the operations against
brute force, real attention kernels on virtual views of packed blocks against the same kernels on
dense caches, what the driver says to their tensor maps, and how long the operations take.
"""

from __future__ import annotations

from repage.selftest.result import CheckResult, Status
from repage.selftest.run import exit_code, run

__all__ = ["CheckResult", "Status", "exit_code", "run"]
