# SPDX-License-Identifier: Apache-2.0
"""Every check of the self-test, as a test of its own."""

from __future__ import annotations

import functools

import pytest

from repage.selftest.result import Check, Status
from repage.selftest.run import all_checks
from repage.selftest.target import Target

pytestmark = pytest.mark.gpu


@functools.cache
def target() -> Target:
    return Target.of_device()


# The attention checks run as groups in processes of their own (selftest_groups.py).
@pytest.mark.parametrize(
    "check",
    [check for check in all_checks() if not check.name.startswith("attention.")],
    ids=lambda check: check.name,
)
def test_check(check: Check) -> None:
    result = check.run(target())
    if result.status is Status.NOT_AVAILABLE:
        pytest.skip(result.detail)
    assert result.status is Status.PASS, result.detail
