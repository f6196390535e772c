# SPDX-License-Identifier: Apache-2.0
"""Exact comparison of two engine runs: token ids, logprobs and draft tokens."""

from __future__ import annotations

import math

from repage.demo.result import Generation, RunResult

IDENTICAL = "identical"


def compare(reference: RunResult, candidate: RunResult, *, exact: bool = True) -> str:
    """Return `IDENTICAL`, or the first difference in words.

    Parameters
    ----------
    reference, candidate : RunResult
        Two runs of the same setup.
    exact : bool
        True: logprobs must agree to the last bit and draft tokens call by call. False: only the
        token ids must agree, for runs that legitimately compute in another order.

    Notes
    -----
    A logprob that is not finite is a difference even where both runs have it: it comes from
    reading bytes that are no keys or values, and NaN hides everything behind it.
    """
    if reference.setup != candidate.setup:
        return f"runs of different setups: {reference.setup!r} and {candidate.setup!r}"
    if len(reference.rounds) != len(candidate.rounds):
        return f"rounds: {len(reference.rounds)} and {len(candidate.rounds)}"
    for index, (first, second) in enumerate(zip(reference.rounds, candidate.rounds, strict=True)):
        if len(first) != len(second):
            return f"round {index + 1}, requests: {len(first)} and {len(second)}"
        for request, (expected, found) in enumerate(zip(first, second, strict=True)):
            difference = _compare_generation(expected, found, exact)
            if difference:
                return f"round {index + 1}, request {request}, {difference}"
    return _compare_drafts(reference, candidate) if exact else IDENTICAL


def _compare_generation(expected: Generation, found: Generation, exact: bool) -> str:
    """Return "" or the first difference between two generations."""
    for side, generation in (("reference", expected), ("candidate", found)):
        for position, value in enumerate(generation.logprobs):
            if not math.isfinite(value):
                return f"token {position}: logprob of the {side} is {value}"
    for position, (left, right) in enumerate(
        zip(expected.token_ids, found.token_ids, strict=False)
    ):
        if left != right:
            return f"token {position}: id {left} and {right}"
    if len(expected.token_ids) != len(found.token_ids):
        return f"length: {len(expected.token_ids)} and {len(found.token_ids)} tokens"
    if not exact:
        return ""
    for position, (low, high) in enumerate(zip(expected.logprobs, found.logprobs, strict=True)):
        if low != high:
            return f"token {position}: logprob {low!r} and {high!r}"
    return ""


def _compare_drafts(reference: RunResult, candidate: RunResult) -> str:
    for call, (expected, found) in enumerate(zip(reference.drafts, candidate.drafts, strict=False)):
        if expected != found:
            return f"drafting call {call}: {_first_row_difference(expected, found)}"
    if len(reference.drafts) != len(candidate.drafts):
        return f"drafting calls: {len(reference.drafts)} and {len(candidate.drafts)}"
    return IDENTICAL


def _first_row_difference(expected: list[list[int]], found: list[list[int]]) -> str:
    for row, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return f"row {row}: {left} and {right}"
    return f"{len(expected)} and {len(found)} rows"
