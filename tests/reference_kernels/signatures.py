# SPDX-License-Identifier: Apache-2.0
"""Binding of every call to the signature of the real library, imported on CPU.

A reference kernel with a signature of its own would accept what the real one refuses.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["bind", "flash_attention_interface", "site_dir_file"]

_FLASH_ATTN_PACKAGE = "vllm.vllm_flash_attn"


def bind(real: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of the call by name, with the real defaults.

    Raises
    ------
    TypeError
        As the real function would, for an unknown or missing argument.
    """
    bound = inspect.signature(real).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def site_dir_file(site_dir: Path, *parts: str) -> Path:
    """A file of an unpacked package.

    Raises
    ------
    FileNotFoundError
        If the directory does not hold it.
    """
    path = site_dir.joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: {site_dir} is not a directory with an unpacked vllm")
    return path


def flash_attention_interface(vllm_site_dir: Path | None = None) -> types.ModuleType:
    """vLLM's real ``vllm_flash_attn.flash_attn_interface``, without its compiled extensions.

    The package's own ``__init__`` refuses to load where ``_vllm_fa2_C`` and ``_vllm_fa3_C`` are
    missing, as in CPU builds; so a bare package takes its place.

    Parameters
    ----------
    vllm_site_dir : Path | None
        A directory with another unpacked vLLM, instead of the installed one. The first call of a
        process decides.
    """
    if _FLASH_ATTN_PACKAGE not in sys.modules:
        vllm = importlib.import_module("vllm")
        assert vllm.__file__ is not None
        site_dir = vllm_site_dir or Path(vllm.__file__).parent.parent
        interface = site_dir_file(site_dir, "vllm", "vllm_flash_attn", "flash_attn_interface.py")
        package = types.ModuleType(_FLASH_ATTN_PACKAGE)
        package.__path__ = [str(interface.parent)]
        sys.modules[_FLASH_ATTN_PACKAGE] = package
        vars(vllm)["vllm_flash_attn"] = package
    return importlib.import_module(f"{_FLASH_ATTN_PACKAGE}.flash_attn_interface")
