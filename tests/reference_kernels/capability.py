# SPDX-License-Identifier: Apache-2.0
"""A platform that answers for another device."""

from __future__ import annotations

from typing import Any

__all__ = ["CapabilityProxy"]


class CapabilityProxy:
    """vLLM's current platform, except for its compute capability.

    It replaces ``current_platform`` in single modules, so that only their branches see the
    pretended device and the rest of the engine stays on the CPU.
    """

    def __init__(self, platform: Any, capability: tuple[int, int]) -> None:
        self._platform = platform
        self._capability = capability

    @classmethod
    def of_current_platform(cls, capability: tuple[int, int]) -> CapabilityProxy:
        """Wrap the process's real platform, also where a proxy has replaced it before."""
        from vllm.platforms import current_platform

        return cls(current_platform, capability)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def get_device_capability(self, device_id: int = 0) -> Any:  # noqa: ARG002
        """The pretended capability."""
        from vllm.platforms.interface import DeviceCapability

        return DeviceCapability(*self._capability)

    def has_device_capability(
        self,
        capability: tuple[int, int] | int,
        device_id: int = 0,  # noqa: ARG002
    ) -> bool:
        """Whether the device is at least ``capability``."""
        return self._number() >= _number(capability)

    def is_device_capability(
        self,
        capability: tuple[int, int] | int,
        device_id: int = 0,  # noqa: ARG002
    ) -> bool:
        """Whether the device is exactly ``capability``."""
        return self._number() == _number(capability)

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:  # noqa: ARG002
        """Whether the device has the major version of ``capability``."""
        return self._number() // 10 == capability // 10

    def _number(self) -> int:
        return _number(self._capability)


def _number(capability: tuple[int, int] | int) -> int:
    if isinstance(capability, int):
        return capability
    return capability[0] * 10 + capability[1]
