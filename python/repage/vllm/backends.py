# SPDX-License-Identifier: Apache-2.0
"""The re-paged GPU backends, each made when vLLM asks for it.

vLLM imports a registered backend by path; looking a class up here imports vLLM's module of that
backend and derives from it. A backend that cannot be derived is vLLM's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from repage.errors import UnsupportedVllmError
from repage.vllm import compat
from repage.vllm.factory import repage_backend
from repage.vllm.fixed_pages import FixedPagePolicy
from repage.vllm.kernel_rules import (
    CUTLASS_MLA,
    FA4_FP8_HD512_SM90,
    FA4_HD256,
    FLASHINFER_MLA,
    FLASHMLA,
    TURBOQUANT,
)
from repage.vllm.logs import log_once
from repage.vllm.mla import RepagedMLAImpl
from repage.vllm.settings import Settings

_BACKENDS = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class Family:
    """How one backend is re-paged.

    Parameters
    ----------
    class_path : str
        vLLM's class.
    derive : callable
        Takes that class and ``module=`` and returns the re-paged one.
    """

    class_path: str
    derive: Callable[..., type[Any]]


def _derive_flashinfer(parent: type[Any], *, module: str) -> type[Any]:
    from repage.vllm.flashinfer import repage_flashinfer

    return repage_flashinfer(parent, module=module)


def _fixed(policy: FixedPagePolicy, **options: Any) -> Family:
    return Family(policy.class_path, partial(repage_backend, policy=policy, **options))


def _mla(name: str, path: str, kernel: Any) -> Family:
    policy = FixedPagePolicy(name, f"{_BACKENDS}.mla.{path}", kernel)
    return _fixed(policy, impl_mixin=RepagedMLAImpl)


FAMILIES: dict[str, Family] = {
    "RepagedFlashInferBackend": Family(
        f"{_BACKENDS}.flashinfer.FlashInferBackend", _derive_flashinfer
    ),
    "RepagedFlashAttentionBackend": _fixed(
        FixedPagePolicy(
            "FLASH_ATTN",
            f"{_BACKENDS}.flash_attn.FlashAttentionBackend",
            FA4_HD256,
            FA4_FP8_HD512_SM90,
        )
    ),
    "RepagedFlashInferMLABackend": _mla(
        "FLASHINFER_MLA", "flashinfer_mla.FlashInferMLABackend", FLASHINFER_MLA
    ),
    "RepagedFlashMLABackend": _mla("FLASHMLA", "flashmla.FlashMLABackend", FLASHMLA),
    "RepagedCutlassMLABackend": _mla("CUTLASS_MLA", "cutlass_mla.CutlassMLABackend", CUTLASS_MLA),
    "RepagedTurboQuantAttentionBackend": _fixed(
        FixedPagePolicy(
            "TURBOQUANT",
            f"{_BACKENDS}.turboquant_attn.TurboQuantAttentionBackend",
            TURBOQUANT,
            token_major_layouts=True,
        )
    ),
}


def __getattr__(name: str) -> type[Any]:
    """Make a backend on first use and keep it under its name.

    Raises
    ------
    AttributeError
        For a name that is none of `FAMILIES`.
    ImportError
        When vLLM's own module of the backend cannot be imported, as without the plugin.
    UnsupportedVllmError
        With ``REPAGE_STRICT=1``, when the backend cannot be derived.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    parent: type[Any] = compat.backend_class(family.class_path)
    try:
        backend = family.derive(parent, module=__name__)
    except Exception as error:
        # Whatever became of vLLM's class: the user asked for this backend, not for re-paging.
        message = f"{parent.__name__} cannot be re-paged ({type(error).__name__}: {error})"
        if Settings.from_env().strict:
            raise UnsupportedVllmError(
                f"{message} (REPAGE_STRICT=1 makes this an error)"
            ) from error
        log_once(logging.WARNING, f"repage: {message}; vLLM's own is used")
        backend = parent
    globals()[name] = backend
    return backend
