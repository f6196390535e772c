# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the layout preference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from repage.errors import SettingError


class LayoutMode(Enum):
    """``REPAGE_LAYOUT``: who chooses the KV-cache layout."""

    AUTO = "auto"
    """Packed where it pays."""
    PACKED = "packed"
    """Packed, whatever it costs; an error where it cannot be."""
    STOCK = "stock"
    """vLLM's own choice."""


@dataclass(frozen=True)
class PreferenceSettings:
    """What the environment asks of the layout preference.

    Parameters
    ----------
    mode : LayoutMode
        ``REPAGE_LAYOUT``.
    strict : bool
        ``REPAGE_STRICT=1``: a decision that fails is an error instead of a warning and vLLM's own
        choice.
    dump : pathlib.Path or None
        ``REPAGE_DUMP``: the folder for specs and decision, for ``repage plan FILE``.
    """

    mode: LayoutMode = LayoutMode.AUTO
    strict: bool = False
    dump: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PreferenceSettings:
        """Parse the environment as it is now.

        Parameters
        ----------
        environ : mapping of str to str or None, default None
            None reads ``os.environ``.

        Returns
        -------
        PreferenceSettings

        Raises
        ------
        SettingError
            For a value that is none of the known ones.
        """
        environ = os.environ if environ is None else environ
        value = environ.get("REPAGE_LAYOUT", "") or LayoutMode.AUTO.value
        known = [mode.value for mode in LayoutMode]
        if value not in known:
            raise SettingError(
                f"REPAGE_LAYOUT: expected {', '.join(known)}, got {value!r}; unset it for auto"
            )
        dump = environ.get("REPAGE_DUMP", "")
        if dump and Path(dump).exists() and not Path(dump).is_dir():
            raise SettingError(f"REPAGE_DUMP: expected a folder, got {dump!r}, which is a file")
        return cls(
            LayoutMode(value), environ.get("REPAGE_STRICT") == "1", Path(dump) if dump else None
        )
