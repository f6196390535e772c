# SPDX-License-Identifier: Apache-2.0
"""What a reference kernel raises when a call would be wrong, slow or fatal on the real device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProvenanceError", "Rules", "Source", "StrictKernelError", "UnmodelledCallError"]


@dataclass(frozen=True)
class Source:
    """Where a rule was read: a released project and a place in its files."""

    project: str
    place: str

    def __str__(self) -> str:
        return f"{self.project}, {self.place}"


class StrictKernelError(Exception):
    """A call that the real kernel would refuse, misread or crash on.

    Not an ``AssertionError``: vLLM catches those in places (``fa_utils.get_flash_attn_version``)
    and would carry on with another kernel.

    Attributes
    ----------
    kernel : str
        The kernel that was called.
    argument : str
        The argument that breaks the rule.
    expected, got : str
        What the rule asks for, and what came.
    source : Source
        Where the rule was read.
    """

    def __init__(
        self, kernel: str, argument: str, expected: object, got: object, source: Source
    ) -> None:
        self.kernel = kernel
        self.argument = argument
        self.expected = str(expected)
        self.got = str(got)
        self.source = source
        super().__init__(
            f"{kernel}: {argument}: expected {self.expected}, got {self.got} [{source}]"
        )


class ProvenanceError(StrictKernelError):
    """A kernel read bytes that are not the K or V of the layer, token and slot it wanted."""


class UnmodelledCallError(NotImplementedError):
    """A call that may be right, but which the reference kernel does not model."""

    def __init__(self, kernel: str, argument: str, got: object) -> None:
        super().__init__(f"{kernel}: the reference kernel does not model {argument}={got!r}")


@dataclass(frozen=True)
class Rules:
    """The rules of one kernel; every failed one names the kernel."""

    kernel: str

    def require(
        self, condition: bool, argument: str, expected: object, got: object, source: Source
    ) -> None:
        """Raise :class:`StrictKernelError` unless ``condition`` holds."""
        if not condition:
            raise StrictKernelError(self.kernel, argument, expected, got, source)

    def unmodelled(self, **arguments: object) -> None:
        """Raise :class:`UnmodelledCallError` for the first argument that was given a value."""
        for name, value in arguments.items():
            if value is not None and value is not False:
                raise UnmodelledCallError(self.kernel, name, value)
