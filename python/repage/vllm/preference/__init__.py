# SPDX-License-Identifier: Apache-2.0
"""The layout preference inside vLLM: packed by itself where it pays, stock everywhere else."""

from __future__ import annotations

from repage.vllm.preference.settings import LayoutMode, PreferenceSettings

__all__ = ["LayoutMode", "PreferenceSettings", "install"]


def install() -> None:
    """Wrap what ``vllm.v1.executor.abstract.Executor`` says of specs and layouts; idempotent.

    Called by the plugin once it is active in a process. Only the engine core ever runs the hooks.

    Raises
    ------
    SettingError
        When ``REPAGE_LAYOUT`` or ``REPAGE_DUMP`` has a value that is not known.
    """
    from repage.vllm.preference.hooks import install_hooks

    install_hooks(PreferenceSettings.from_env())
