# SPDX-License-Identifier: Apache-2.0
"""Random traffic for an engine, a function of the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from repage.demo.setups import WORDS


@dataclass(frozen=True)
class Request:
    """One request: when it comes, what it asks, and after how many tokens its client leaves.

    Attributes
    ----------
    arrival : int
        Engine step before which it is added.
    prompt : str
        Bytes are tokens.
    max_tokens : int
        Generated tokens.
    abort_after : int or None
        Generated tokens after which it is aborted.
    """

    arrival: int
    prompt: str
    max_tokens: int
    abort_after: int | None


def make_traffic(seed: int, count: int, longest: int) -> list[Request]:
    """Return requests with shared beginnings, lengths around block ends, bursts and aborts.

    Parameters
    ----------
    seed : int
        Of everything.
    count : int
        Requests.
    longest : int
        Tokens of the longest prompt.
    """
    source = random.Random(seed)
    shared = [_text(source, longest) for _ in range(2)]
    edges = [edge + step for edge in (640, 1280) for step in (-2, -1, 0, 1, 20)]
    traffic = []
    arrival = 0
    for _ in range(count):
        length = source.choice([*edges, source.randint(1, longest), source.randint(1, 200)])
        length = min(length, longest)
        prompt = source.choice([*shared, None])
        if prompt is None:
            prompt = _text(source, length)
        elif source.random() < 0.5:  # shares its beginning, then goes its own way
            fork = source.randint(0, length)
            prompt = prompt[:fork] + _text(source, length - fork)
        max_tokens = source.randint(1, 24)
        abort = source.randint(1, max_tokens) if source.random() < 0.2 else None
        arrival += source.choice([0, 0, 1, 5])
        traffic.append(Request(arrival, prompt[:length], max_tokens, abort))
    return traffic


def _text(source: random.Random, length: int) -> str:
    result = ""
    while len(result) < length:
        result += source.choice(WORDS)
    return result[:length]
