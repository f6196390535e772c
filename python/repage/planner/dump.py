# SPDX-License-Identifier: Apache-2.0
"""Specs and decision of an engine as a JSON file, and planning from one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

from repage.errors import RepageError
from repage.planner.decision import Decision
from repage.planner.layout_plan import KernelPage, LayoutPlan, plan_layout
from repage.planner.request import PlanResult, offline_config
from repage.vllm import compat

FORMAT = "repage-plan"
VERSION = 1

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


class DumpError(RepageError, ValueError):
    """A file that is no dump of an engine, or of one that this vLLM cannot read."""


def config_facts(config: Any) -> dict[str, Any]:
    """Return what planning needs of a config.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        Of the engine.

    Returns
    -------
    dict
        Plain data.
    """
    return {
        "model": str(getattr(config.model_config, "model", "unknown")),
        "max_model_len": int(config.model_config.max_model_len),
        "max_in_flight_tokens": int(config.max_in_flight_tokens),
        "mamba_cache_mode": str(config.cache_config.mamba_cache_mode),
        "num_prefill_lookahead_tokens": int(config.num_prefill_lookahead_tokens),
        "decode_context_parallel_size": int(config.parallel_config.decode_context_parallel_size),
    }


def make_dump(config: Any, runs: Runs, decision: Decision, manager_block: int) -> dict[str, Any]:
    """Return specs and decision as plain data.

    Parameters
    ----------
    config : vllm.config.VllmConfig
        Of the engine.
    runs : mapping of str to sequence of mapping of str to KVCacheSpec
        Per layout that was looked at, the specs of each rank.
    decision : Decision
        What was decided.
    manager_block : int
        Tokens in a block of full attention.

    Returns
    -------
    dict
        For ``json.dump``.
    """
    pages = {
        plan.layout: [asdict(page) for page in plan.kernel_pages]
        for plan in (decision.stock, decision.packed)
        if plan is not None
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "vllm": compat.vllm_version(),
        "config": config_facts(config),
        "manager_block": manager_block,
        "runs": {
            layout: [{name: _encode_spec(spec) for name, spec in rank.items()} for rank in ranks]
            for layout, ranks in runs.items()
        },
        "kernel_pages": pages,
        "decision": {
            "verdict": decision.verdict,
            "layout": decision.layout,
            "reasons": list(decision.reasons),
        },
    }


def plan_dump(
    path: Path, *, memory: int | None = None, min_group_layers: Sequence[int] = ()
) -> PlanResult:
    """Explain an engine's decision from its dump.

    Parameters
    ----------
    path : pathlib.Path
        File that an engine wrote with ``REPAGE_DUMP``.
    memory : int or None, default None
        Bytes for the KV cache on each rank.
    min_group_layers : sequence of int, default ()
        What-if rows.

    Returns
    -------
    PlanResult
        Verdict and reasons are the engine's; the numbers come from the installed vLLM's planner.

    Raises
    ------
    DumpError
        When the file is not what an engine writes.
    """
    data = _read(path)
    try:
        return _replan(data, memory, min_group_layers)
    except (KeyError, TypeError, AttributeError, ImportError) as error:
        raise DumpError(
            f"{path}: written by vLLM {data.get('vllm')}, and this vLLM "
            f"({compat.vllm_version()}) cannot read its specs: {error!r}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DumpError(f"{path}: expected a file written with REPAGE_DUMP: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DumpError(f"{path}: expected a file written with REPAGE_DUMP")
    if data.get("version") != VERSION:
        raise DumpError(f"{path}: expected version {VERSION}, got {data.get('version')!r}")
    return data


def _replan(data: dict[str, Any], memory: int | None, widths: Sequence[int]) -> PlanResult:
    facts = data["config"]
    config = offline_config(
        facts["max_model_len"], facts["max_in_flight_tokens"], facts["mamba_cache_mode"]
    )
    config.num_prefill_lookahead_tokens = facts["num_prefill_lookahead_tokens"]
    parallel = config.parallel_config
    parallel.decode_context_parallel_size = facts["decode_context_parallel_size"]
    runs = {
        layout: [{name: _decode_spec(spec) for name, spec in rank.items()} for rank in ranks]
        for layout, ranks in data["runs"].items()
    }

    def plan(layout: str, width: int = 1) -> LayoutPlan:
        found = plan_layout(config, runs[layout], layout, memory=memory, min_group_layers=width)
        return found.with_pages(
            [KernelPage(**page) for page in data["kernel_pages"].get(layout, ())]
        )

    plans = {layout: plan(layout) for layout in runs}
    stock = next((found for found in plans.values() if not found.is_packed), None)
    packed = [found for found in plans.values() if found.is_packed]
    recorded = data["decision"]
    chosen = plans.get(recorded["layout"])
    best = chosen if chosen in packed else next(iter(packed), None)
    decision = Decision(
        recorded["verdict"], recorded["layout"], tuple(recorded["reasons"]), stock, best
    )
    what_if = () if stock is None else tuple((w, plan(stock.layout, w)) for w in widths)
    note = f"Decided by vLLM {data['vllm']}, planned again by vLLM {compat.vllm_version()}."
    shown = tuple(found for found in (stock, best) if found is not None)
    return PlanResult(facts["model"], data["manager_block"], decision, shown, what_if, (note,))


def _encode_spec(spec: Any) -> dict[str, Any]:
    values = {field.name: _encode(getattr(spec, field.name)) for field in fields(spec)}
    return {"class": type(spec).__name__, "module": type(spec).__module__, **values}


def _encode(value: Any) -> Any:
    torch = importlib.import_module("torch")
    plain = value is None or isinstance(value, bool | int | float | str)
    if plain and not isinstance(value, Enum):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    if isinstance(value, Enum):
        return {"enum": type(value).__name__, "module": type(value).__module__, "name": value.name}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if hasattr(value, "base"):
        return {"multiple_of": int(value.base)}
    raise DumpError(f"spec: a value of type {type(value).__name__} cannot be written")


def _decode_spec(data: Mapping[str, Any]) -> Any:
    cls = _vllm_attribute(data["module"], data["class"])
    known = {field.name for field in fields(cls)}
    return cls(**{name: _decode(value) for name, value in data.items() if name in known})


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(importlib.import_module("torch"), value["dtype"])
    if "fraction" in value:
        return Fraction(*value["fraction"])
    if "multiple_of" in value:
        return compat.multiple_of(value["multiple_of"])
    return _vllm_attribute(value["module"], value["enum"])[value["name"]]


def _vllm_attribute(module: str, name: str) -> Any:
    if not module.startswith("vllm."):
        raise DumpError(f"spec: expected a class of vLLM, got {module}.{name}")
    return getattr(importlib.import_module(module), name)
