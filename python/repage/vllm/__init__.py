# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: attention backends read packed manager blocks as small kernel pages.

Importing this module does not import vLLM.
"""

from __future__ import annotations

from repage.vllm.settings import Settings

__all__ = ["Settings", "register", "set_packed_mode"]


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``.

    vLLM calls it in every process, possibly more than once; calls after the first change nothing.
    With ``REPAGE_DISABLE=1`` it returns before it touches vLLM. On a vLLM that the plugin does
    not know it logs one line and changes nothing.

    Raises
    ------
    SettingError
        When an environment variable has an unknown value.
    UnsupportedVllmError
        With ``REPAGE_STRICT=1``, when vLLM's version or a name that the plugin needs does not fit.
    """
    settings = Settings.from_env()
    if settings.disable:
        return
    from repage.vllm.registration import activate

    activate(settings)


def set_packed_mode(layout: str | None) -> None:
    """Say, before specs are collected, which block-outermost layout this process will run on.

    ``VLLM_KV_CACHE_LAYOUT`` outranks it, and so does a layout that vLLM has resolved.

    Parameters
    ----------
    layout : str or None
        Name of a block-outermost layout such as ``"BLHNC"``. None forgets an earlier one.

    Raises
    ------
    UnsupportedLayoutError
        When vLLM knows no such layout, or it is layer-compact.
    """
    from repage.vllm import layouts

    layouts.set_packed_mode(layout)
