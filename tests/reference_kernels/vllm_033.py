# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's backend modules inside a 0.32.0 engine.

There is no CPU build of 0.33.0. Its backend modules differ from those of 0.32.0 by little of what
they import, so the missing names are given to the 0.32.0 modules and the file is loaded under the
name of the one it replaces.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from reference_kernels.signatures import site_dir_file

__all__ = ["load_backend_module"]

_BACKENDS = "vllm.v1.attention.backends"


def load_backend_module(name: str, site_dir: Path | None) -> ModuleType:
    """Import a backend module, from another unpacked vLLM if ``site_dir`` is given.

    Parameters
    ----------
    name : str
        ``"flashinfer"`` or ``"flash_attn"``.
    site_dir : Path | None
        Directory that contains 0.33.0's ``vllm``; ``None`` imports the installed module.

    Raises
    ------
    RuntimeError
        If the installed module was imported before and would stay in use.
    """
    full_name = f"{_BACKENDS}.{name}"
    if site_dir is None:
        return importlib.import_module(full_name)
    path = site_dir_file(site_dir, "vllm", "v1", "attention", "backends", f"{name}.py")
    loaded = sys.modules.get(full_name)
    if loaded is not None:
        if loaded.__file__ == str(path):
            return loaded
        raise RuntimeError(f"{full_name} is already loaded from {loaded.__file__}")
    _add_names_of_033()
    spec = importlib.util.spec_from_file_location(full_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full_name]
        raise
    setattr(importlib.import_module(_BACKENDS), name, module)
    return module


def _add_names_of_033() -> None:
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "is_quantized_kv_cache"):
        torch_utils = importlib.import_module("vllm.utils.torch_utils")
        vars(interface)["is_quantized_kv_cache"] = torch_utils.is_quantized_kv_cache
    dcp = importlib.import_module("vllm.v1.attention.ops.dcp")
    if not hasattr(dcp, "mask_dcp_empty_shards_"):
        vars(dcp)["mask_dcp_empty_shards_"] = _no_context_parallelism


def _no_context_parallelism(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError("decode context parallelism needs vLLM 0.33.0 itself")
