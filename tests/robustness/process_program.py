# SPDX-License-Identifier: Apache-2.0
"""Loads the plugin as vLLM does, here and in child processes, and prints what each one sees.

``python process_program.py fork|spawn``. The parent is the API server, its children are engine
core and worker.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")


def load() -> dict[str, Any]:
    """Load plugins twice, as a process may, and describe the result."""
    import vllm.plugins

    for _ in range(2):
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from repage.vllm import logs
    from repage.vllm.preference import hooks, planner_compat
    from repage.vllm.registration import BACKENDS

    executor = planner_compat.executor_class()
    depth = 0
    method = executor.get_kv_cache_specs
    while hasattr(method, hooks._MARK):
        method, depth = getattr(method, hooks._MARK), depth + 1
    handlers = logs.get_logger().handlers
    return {
        "registered": [name for name in BACKENDS if AttentionBackendEnum[name].is_overridden()],
        "hooks": depth,
        "handlers": sum(isinstance(handler, logs.VllmHandler) for handler in handlers),
    }


def report(sender: Any, generations: int) -> None:
    """Describe this process, then what a child of it sees."""
    found = [load()]
    if generations:
        found += child(generations - 1)
    sender.send(found)


def child(generations: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context(sys.argv[1])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(sender, generations))
    process.start()
    found: list[dict[str, Any]] = receiver.recv()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps([load(), *child(1)]))
