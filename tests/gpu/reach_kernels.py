# SPDX-License-Identifier: Apache-2.0
"""Calls every attention path on CPU tensors, as far as the compiled kernels.

Run by ``prepare.py`` in the bundle, without a GPU: FlashInfer's real Python code takes the calls of
the self-test and loads the module that it wants, and the compiled code then finds no device. So a
wrong argument, a file that the trimmed package lacks and a kernel that was built under another name
show before a GPU is there. Prints a JSON object: what each call ran into.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

HOPPER = (9, 0)


def pretend_to_be_hopper() -> None:
    """Answer the questions that FlashInfer asks the device before it calls a kernel."""
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:  # noqa: ARG001
        return real_empty(*args, **kwargs)

    vars(torch)["empty"] = empty  # pinning memory takes a driver
    vars(torch.cuda).update(current_device=lambda: 0, get_device_capability=lambda *_args: HOPPER)
    for name in ("decode", "xqa"):
        vars(importlib.import_module(f"flashinfer.{name}")).update(
            get_device_sm_count=lambda _device: 132,
            device_support_pdl=lambda _device: True,
            get_compute_capability=lambda _device: HOPPER,
        )


def outcome(call: Callable[[], object]) -> str:
    """Call in a child process; returns what went wrong before compiled code was reached.

    XQA's own code ends the process when it finds no device; Python never does without a word.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            call()
            text = "came back without a device"
        except Exception as error:
            in_kernel = isinstance(error, RuntimeError) and "cuda" in str(error).lower()
            text = "" if in_kernel else f"{type(error).__name__}: {str(error)[:200]}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def main() -> None:
    """Call everything once."""
    from repage.selftest.attention import PATHS, make_queries
    from repage.selftest.pool import PackedPool, PoolShape
    from repage.selftest.target import load_attention_kernels

    torch.set_num_threads(1)  # child processes have no thread pool
    kernels = load_attention_kernels()
    pretend_to_be_hopper()
    answers = {}
    for path in PATHS:
        for head_dim, window in ((128, None), (256, None), (128, 300)):
            shape = PoolShape("HND", 2, head_dim, path.cache_dtype)
            pool = PackedPool(shape, (1, 641), torch.device("cpu"), window=window)
            queries = make_queries(pool, path.kind)
            sizes = path.page_sizes if path.kind == "decode" and window is None else (64,)
            for page_tokens in sizes:
                name = f"{path.name} hd{head_dim} window {window} pages {page_tokens}"
                pages = pool.virtual_pages(page_tokens)
                call = functools.partial(
                    path.call, kernels, pages, queries, -1 if window is None else window - 1
                )
                answers[name] = outcome(call)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
