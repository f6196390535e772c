# SPDX-License-Identifier: Apache-2.0
"""The plugin's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from repage.errors import SettingError

_CPU_PAGES = ("32", "64", "128")


@dataclass(frozen=True)
class Settings:
    """What the environment asks of the plugin.

    Parameters
    ----------
    disable : bool
        ``REPAGE_DISABLE=1``: leave vLLM untouched.
    strict : bool
        ``REPAGE_STRICT=1``: raise where the plugin would otherwise step aside with a log line.
    debug : bool
        ``REPAGE_DEBUG=1``: check block ids against the pool in every page-table operation.
    cpu_page : int or None
        ``REPAGE_CPU_PAGE``: largest kernel page of CPU_ATTN in tokens. None leaves manager blocks
        whole.
    """

    disable: bool = False
    strict: bool = False
    debug: bool = False
    cpu_page: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse the environment as it is now.

        Parameters
        ----------
        environ : mapping of str to str or None, default None
            None reads ``os.environ``.

        Returns
        -------
        Settings

        Raises
        ------
        SettingError
            For a value that is none of the known ones. A disabled plugin looks at nothing else.
        """
        environ = os.environ if environ is None else environ
        if _flag(environ, "REPAGE_DISABLE"):
            return cls(disable=True)
        return cls(
            strict=_flag(environ, "REPAGE_STRICT"),
            debug=_flag(environ, "REPAGE_DEBUG"),
            cpu_page=_cpu_page(environ),
        )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SettingError(f"{name}: expected 0 or 1, got {value!r}; set 1 or unset it")
    return value == "1"


def _cpu_page(environ: Mapping[str, str]) -> int | None:
    name = "REPAGE_CPU_PAGE"
    value = environ.get(name, "")
    if not value:
        return None
    if value not in _CPU_PAGES:
        raise SettingError(
            f"{name}: expected {', '.join(_CPU_PAGES)} tokens, got {value!r}; unset it to keep "
            "manager blocks whole"
        )
    return int(value)
