# SPDX-License-Identifier: Apache-2.0
"""Registering the re-paged backends and the layout preference with vLLM, or nothing at all."""

from __future__ import annotations

import logging

from repage.errors import UnsupportedVllmError
from repage.vllm import compat, preference, probes
from repage.vllm.logs import log_once
from repage.vllm.settings import Settings

# Member of vLLM's AttentionBackendEnum -> the class that takes its place. vLLM imports the class
# where a model uses the backend.
BACKENDS = {
    "CPU_ATTN": "repage.vllm.cpu_attn.RepagedCPUAttentionBackend",
    "FLASHINFER": "repage.vllm.backends.RepagedFlashInferBackend",
    "FLASH_ATTN": "repage.vllm.backends.RepagedFlashAttentionBackend",
    "FLASHINFER_MLA": "repage.vllm.backends.RepagedFlashInferMLABackend",
    "FLASHMLA": "repage.vllm.backends.RepagedFlashMLABackend",
    "CUTLASS_MLA": "repage.vllm.backends.RepagedCutlassMLABackend",
    "TURBOQUANT": "repage.vllm.backends.RepagedTurboQuantAttentionBackend",
}


def activate(settings: Settings) -> None:
    """Register every re-paged backend and the preference if the plugin knows this vLLM.

    Parameters
    ----------
    settings : Settings
        Of this call.

    Raises
    ------
    UnsupportedVllmError
        With ``settings.strict``, in place of the log line.
    """
    problem = _problem()
    if problem is not None:
        message = f"repage is off: {problem}. vLLM runs as if repage were not installed"
        if settings.strict:
            raise UnsupportedVllmError(f"{message} (REPAGE_STRICT=1 makes this an error)")
        log_once(logging.WARNING, message)
        return
    registry = compat.registry()
    for name, path in BACKENDS.items():
        member = registry.AttentionBackendEnum[name]
        if not member.is_overridden():
            registry.register_backend(member, path)
        elif member.get_path() != path:
            log_once(
                logging.WARNING,
                f"{name} is already overridden by {member.get_path()}; repage leaves it alone",
            )
    preference.install()


def _problem() -> str | None:
    version = compat.vllm_version()
    if not compat.is_supported_version(version):
        return f"it supports vLLM {compat.SUPPORTED}, this is {version}"
    failures = probes.failed_probes()
    if failures:
        return f"vLLM {version} lacks what it builds on: {'; '.join(failures)}"
    return None
