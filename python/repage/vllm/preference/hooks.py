# SPDX-License-Identifier: Apache-2.0
"""The two methods of vLLM's Executor that the preference wraps.

The engine core calls them one after the other, before it resolves the layout
(``v1/engine/core.py``, `_initialize_kv_caches`, 0.32.0 and 0.33.0).
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from repage.errors import RepageError, UnsupportedLayoutError
from repage.planner.decision import Decision
from repage.planner.dump import make_dump
from repage.vllm import compat
from repage.vllm.logs import get_logger, log_once
from repage.vllm.preference import planner_compat, worker
from repage.vllm.preference.choose import (
    Choice,
    agree_on_layouts,
    choose,
    connector_or_request,
    rank_backends,
)
from repage.vllm.preference.settings import LayoutMode, PreferenceSettings
from repage.vllm.preference.table import decision_table

_MARK = "_repage_wraps"
_CHOICE = "_repage_choice"


def install_hooks(settings: PreferenceSettings) -> None:
    """Wrap the methods, once per process.

    Parameters
    ----------
    settings : PreferenceSettings
        Of this call; the hooks read the environment again when they run.

    Raises
    ------
    UnsupportedVllmError
        With ``REPAGE_STRICT=1``, where vLLM lacks what the preference builds on.
    """
    problems = [] if _installed() else planner_compat.failed_probes()
    if problems:
        message = f"repage leaves the KV-cache layout to vLLM, which lacks: {'; '.join(problems)}"
        if settings.strict:
            raise planner_compat.unsupported(message)
        log_once(logging.WARNING, message)
        return
    executor = planner_compat.executor_class()
    for name, hook in (
        ("get_kv_cache_specs", _collect_specs),
        ("get_supported_kv_cache_layouts", _order_layouts),
    ):
        original = getattr(executor, name)
        if not hasattr(original, _MARK):
            setattr(executor, name, _wrap(original, hook))


def remove_hooks() -> None:
    """Take the hooks out again; for tests."""
    executor = planner_compat.executor_class()
    for name in ("get_kv_cache_specs", "get_supported_kv_cache_layouts"):
        original = getattr(getattr(executor, name), _MARK, None)
        if original is not None:
            setattr(executor, name, original)


def _installed() -> bool:
    try:
        executor = planner_compat.executor_class()
    except (ImportError, AttributeError):
        return False
    return hasattr(getattr(executor, "get_kv_cache_specs", None), _MARK)


def _wrap(original: Callable[[Any], Any], hook: Callable[[Any, Callable[[Any], Any]], Any]) -> Any:
    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        return hook(self, original)

    setattr(wrapper, _MARK, original)
    return wrapper


def _collect_specs(executor: Any, original: Callable[[Any], Any]) -> Any:
    """Return the specs of the layout that the run will get."""
    settings = PreferenceSettings.from_env()
    setattr(executor, _CHOICE, None)
    # The planned layout belongs to the process: an engine before this one may have left its own.
    executor.collective_rpc(worker.set_mode, args=(None,))
    if settings.mode is LayoutMode.STOCK or _steps_aside(executor):
        return original(executor)
    stock = original(executor)
    try:
        lists = _original_layouts(executor)
        choice = choose(executor, stock, lists, settings.mode)
    except UnsupportedLayoutError:
        raise
    except Exception as error:
        if settings.strict:
            raise
        get_logger().warning(
            "repage leaves the KV-cache layout to vLLM: the decision failed (%s: %s)",
            *(type(error).__name__, error),
        )
        executor.collective_rpc(worker.set_mode, args=(None,))
        return stock
    setattr(executor, _CHOICE, choice)
    _announce(executor, choice, settings)
    return choice.specs


def _order_layouts(executor: Any, original: Callable[[Any], Any]) -> Any:
    """Return the same list for every rank, the chosen layout first."""
    lists = original(executor)
    if not lists or not all(lists):
        return lists
    choice: Choice | None = getattr(executor, _CHOICE, None)
    if choice is None and all(own == lists[0] for own in lists):
        return lists
    common = agree_on_layouts(lists, lambda: rank_backends(executor))
    if choice is not None and choice.first in common:
        outermost = [name for name in common if name in ("BLHNC", "BLNHC") and name != choice.first]
        rest = [name for name in common if name != choice.first and name not in outermost]
        common = [choice.first, *outermost, *rest]
    return [list(common) for _ in lists]


def _steps_aside(executor: Any) -> bool:
    """Whether something that outranks the preference decides; its layout is passed on."""
    config = executor.vllm_config
    name = connector_or_request(config)
    if name is not None:
        layout = compat.layout_by_name(name)
        if layout is not None and layout.is_block_outermost:
            executor.collective_rpc(worker.set_mode, args=(name,))
        get_logger().info("repage leaves the KV-cache layout as asked for: %s", name)
        return True
    if config.attention_config.hisparse_config is not None:
        return True
    if planner_compat.has_own_preference():
        log_once(logging.INFO, "this vLLM prefers packed KV caches by itself; repage steps aside")
        return True
    return False


def _original_layouts(executor: Any) -> list[list[str]]:
    method = type(executor).get_supported_kv_cache_layouts
    return [list(own) for own in getattr(method, _MARK, method)(executor)]


def _announce(executor: Any, choice: Choice, settings: PreferenceSettings) -> None:
    decision = choice.decision
    if decision is None:
        return
    logger = get_logger()
    logger.info("repage: %s", decision.summary())
    logger.debug("repage: %s", decision_table(decision))
    if settings.dump is not None:
        _write_dump(executor, choice, decision, settings)


def _write_dump(
    executor: Any, choice: Choice, decision: Decision, settings: PreferenceSettings
) -> None:
    """Write specs and decision; a run never fails for it."""
    if settings.dump is None:
        return
    path = settings.dump / f"repage-plan-{os.getpid()}.json"
    try:
        settings.dump.mkdir(parents=True, exist_ok=True)
        config = executor.vllm_config
        block = int(config.cache_config.block_size)
        data = make_dump(config, choice.runs, decision, block)
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except (OSError, RepageError, AttributeError) as error:
        get_logger().warning("REPAGE_DUMP: %s could not be written: %s", path, error)
        return
    get_logger().info("wrote %s; explain it with: repage plan %s", path, path)
