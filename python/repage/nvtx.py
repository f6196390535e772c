# SPDX-License-Identifier: Apache-2.0
"""Ranges for profilers: one per operation, in the NVTX domain ``repage``.

Off unless ``REPAGE_NVTX=1``, which is read when an operation is set up (at import of `repage.ops`,
when a `repage.PageTableBuffer` is made) and not again: where it is off, calls go straight to the
operation and cost nothing. Ranges come from the compiled core where it has CUDA, from the ``nvtx``
package otherwise.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from repage import _core

_P = ParamSpec("_P")
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def enabled() -> bool:
    """Whether ``REPAGE_NVTX`` asks for ranges."""
    return os.environ.get("REPAGE_NVTX") == "1"


def ranged(function: Callable[_P, _T], name: str, group: str | None = None) -> Callable[_P, _T]:
    """Return a function that runs in a range of its own.

    Parameters
    ----------
    function : callable
        The operation.
    name : str
        The operation's name, which is the range's.
    group : str or None, default None
        The attention group; the range is then ``name[group]``.

    Returns
    -------
    callable
        `function` itself where ranges are off.

    Notes
    -----
    Host-side only: safe during graph capture. The range covers the call, hence the launch; the
    profiler projects it onto the kernels that it launched.
    """
    if not enabled():
        return function
    backend = _backend()
    if backend is None:
        return function
    push, pop = backend(name if group is None else f"{name}[{group}]")

    @functools.wraps(function)
    def in_range(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        push()
        try:
            return function(*args, **kwargs)
        finally:
            pop()

    return in_range


_PushPop = tuple[Callable[[], Any], Callable[[], Any]]


@functools.cache
def _backend() -> Callable[[str], _PushPop] | None:
    """Return what makes a pair of push and pop for a name, or None where nothing can."""
    if _core.CUDA_VERSION is not None:
        return _from_core
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ModuleNotFoundError:
        _logger.warning(
            "REPAGE_NVTX=1, but this build of repage has no CUDA and the nvtx package is not "
            "installed: there will be no ranges (pip install nvtx)"
        )
        return None
    domain = nvtx.get_domain("repage")

    def from_package(name: str) -> _PushPop:
        attributes = domain.get_event_attributes(message=name)
        return functools.partial(domain.push_range, attributes), domain.pop_range

    return from_package


def _from_core(name: str) -> _PushPop:
    return functools.partial(_core.nvtx_push, _core.nvtx_register(name)), _core.nvtx_pop
