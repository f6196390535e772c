# SPDX-License-Identifier: Apache-2.0
"""The targets of `page_tables.py`, judged on its own measurements."""

from __future__ import annotations

from typing import Any

LARGE_TABLE = 4 << 20
COPY_LIMIT = {"cpu": 1.3, "cuda": 1.15}


def judge(cases: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Return, for each target, the worst case and whether it holds there.

    Parameters
    ----------
    cases : list of dict
        With ``shape``, ``table_bytes`` and ``us`` (medians by contender).
    device : str
        ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    list of dict
        ``target``, ``limit``, ``worst`` (a ratio), ``where``, ``holds``; without the last three
        where no case applies.
    """
    one_megatoken = [case for case in cases if case["shape"]["max_model_len"] >= 1 << 20]
    large = [case for case in cases if case["table_bytes"] >= LARGE_TABLE]
    listed = [case for case in cases if "vllm csr" in case["us"]]
    return [
        _verdict(
            "1M tokens of room, 8K live: times faster than vLLM's mapping, at least",
            10.0,
            [(ratio(c, "vllm", "repage live 8K"), c) for c in one_megatoken],
            smallest=True,
        ),
        _verdict(
            "full table: times faster than vLLM's mapping, at least",
            1.0,
            [(ratio(c, "vllm", "repage"), c) for c in cases],
            smallest=True,
        ),
        _verdict(
            "100% live: times faster than vLLM's mapping, at least",
            1.0,
            [(ratio(c, "vllm", "repage live 100%"), c) for c in cases],
            smallest=True,
        ),
        _verdict(
            "tables of 4 MiB and more: time over that of copying them, at most",
            COPY_LIMIT[device],
            [(ratio(c, "repage", "copy"), c) for c in large],
            smallest=False,
        ),
        _verdict(
            "FlashInfer's list: times faster than vLLM's mapping alone, at least",
            1.0,
            [(ratio(c, "vllm", "repage csr"), c) for c in cases if "repage csr" in c["us"]],
            smallest=True,
        ),
        _verdict(
            "FlashInfer's list: times faster than vLLM's mapping and list, at least",
            1.0,
            [(ratio(c, "vllm csr", "repage csr"), c) for c in listed],
            smallest=True,
        ),
    ]


def ratio(case: dict[str, Any], over: str, under: str) -> float:
    """Return one contender's median over another's."""
    return float(case["us"][over]["median"]) / float(case["us"][under]["median"])


def _verdict(
    target: str, limit: float, found: list[tuple[float, dict[str, Any]]], *, smallest: bool
) -> dict[str, Any]:
    verdict: dict[str, Any] = {"target": target, "limit": limit}
    if found:
        pick = min if smallest else max
        worst, case = pick(found, key=lambda pair: pair[0])
        missed = [value for value, _ in found if (value < limit if smallest else value > limit)]
        verdict |= {
            "worst": round(worst, 2),
            "where": case["shape"],
            "cases": len(found),
            "missed": len(missed),
            "holds": not missed,
        }
    return verdict
