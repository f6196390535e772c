# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's second-generation model runner on a CPU, through Triton's interpreter.

That runner is written in Triton. A stock Triton wheel has no CPU backend, but its interpreter
executes the kernels in Python, which is slow and right. vLLM decides about Triton when
``vllm.triton_utils`` is imported (``vllm/triton_utils/importing.py``, 0.32.0: on a CPU build it
looks for a backend named ``cpu`` whose driver is active), so `install` must run before that, in
every process of an engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

SWITCH = "REPAGE_DEMO_TRITON_CPU"
"""Environment variable: ``1`` asks the demonstration's processes to install the interpreter."""


class InterpreterDriver:
    """What Triton asks of a driver, answered for a machine that has only a CPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Return True: there is always a CPU."""
        return True

    def get_current_target(self) -> Any:
        """Return the target that kernels would be compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Return the torch device of kernel arguments."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's module for the device."""
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        """Return the only device's index."""
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        """Return a stream handle; a CPU has none."""
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a benchmark for autotuned kernels that calls all candidates equal."""
        return lambda _kernel, quantiles=None, **_: [1.0] * len(quantiles or [1])

    def get_empty_cache_for_benchmark(self) -> None:
        """Return no buffer: nothing is timed."""

    def clear_cache(self, cache: Any) -> None:
        """Do nothing: nothing is timed."""


def install() -> None:
    """Register the interpreter as Triton's CPU backend and make it the active one.

    Raises
    ------
    RuntimeError
        If ``vllm.triton_utils`` was imported before: vLLM has then already decided that there is
        no Triton.
    """
    if "vllm.triton_utils" in sys.modules:
        raise RuntimeError(
            "the Triton interpreter must be installed before vLLM is imported; "
            "vllm.triton_utils is already loaded"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends
    from triton.runtime import driver

    triton.backends.backends["cpu"] = triton.backends.Backend(
        compiler=None, driver=InterpreterDriver
    )
    driver.set_active(InterpreterDriver())


def install_if_asked() -> None:
    """Run `install` if the environment asks for it (`SWITCH`) and vLLM is not loaded yet."""
    if os.environ.get(SWITCH) == "1" and "vllm.triton_utils" not in sys.modules:
        install()
