# SPDX-License-Identifier: Apache-2.0
"""Every error that repage raises on purpose.

Each message names the argument, what was expected, what came, and what to do next. All of them
derive from `RepageError`; most derive from the built-in exception that fits as well, so that
``except ValueError`` keeps its meaning.
"""

from __future__ import annotations


class RepageError(Exception):
    """Base of every error raised by repage."""


class GeometryError(RepageError, ValueError):
    """Sizes and strides that describe no possible cache, or a cache too small for them."""


class NoValidPageError(GeometryError):
    """No page size satisfies the kernel on this geometry.

    Attributes
    ----------
    failures : tuple of tuple of (int, str)
        Per candidate page size, in tokens, the rule that failed and how.
    suggestions : tuple of str
        Nearest manager block sizes or block strides that would work.
    """

    def __init__(
        self,
        message: str,
        failures: tuple[tuple[int, str], ...] = (),
        suggestions: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.suggestions = suggestions


class ArgumentError(RepageError, ValueError):
    """An argument that a function cannot take; the subclasses say in which respect."""


class DtypeError(ArgumentError, TypeError):
    """A tensor, or another argument, of the wrong type."""


class DeviceError(ArgumentError):
    """A tensor on another device than the others, or on one that is not supported."""


class ShapeError(ArgumentError):
    """A tensor with the wrong number of dimensions or the wrong sizes."""


class ContiguityError(ArgumentError):
    """A tensor whose strides the operation cannot follow."""


class PageIdError(RepageError, IndexError):
    """A block id or slot outside the pool, found by the debug checks."""


class CudaUnavailableError(RepageError, RuntimeError):
    """CUDA memory was passed to a build without CUDA kernels."""


class CudaLaunchError(RepageError, RuntimeError):
    """The CUDA runtime refused a launch."""


class UnsupportedLayoutError(RepageError, ValueError):
    """A KV-cache layout that cannot be viewed as kernel pages."""


class UnsupportedVllmError(RepageError, RuntimeError):
    """A vLLM version, or a change inside it, that the plugin does not know."""


class SettingError(RepageError, ValueError):
    """An environment variable with a value that repage does not know."""


class RepagingRefusedError(RepageError, RuntimeError):
    """A model, cache format or backend that must not be re-paged."""
