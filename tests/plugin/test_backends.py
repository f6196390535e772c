"""The re-paged GPU backends, made when they are asked for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from repage.errors import UnsupportedVllmError
from repage.vllm import backends, compat, logs, registration
from repage.vllm.builder import RepagedBuilder
from repage.vllm.impl import RepagedImpl
from repage.vllm.mla import RepagedMLAImpl

FLASHMLA = "RepagedFlashMLABackend"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as in a process that has not asked for any backend yet."""
    for name in backends.FAMILIES:
        monkeypatch.delitem(vars(backends), name, raising=False)
    monkeypatch.setattr(logs, "_seen", set())
    return backends


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("RepagedFlashMLABackend", RepagedMLAImpl),
        ("RepagedCutlassMLABackend", RepagedMLAImpl),
        ("RepagedTurboQuantAttentionBackend", RepagedImpl),
    ],
)
def test_backends_are_derived_from_vllms(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, name: str, impl: type
) -> None:
    # CUTLASS_MLA's module allocates its workspace on the device when it is imported.
    monkeypatch.setattr(torch, "empty", lambda *_size, **_options: torch.zeros(1))
    family = fresh.FAMILIES[name]
    parent = compat.backend_class(family.class_path)
    backend = getattr(fresh, name)
    assert issubclass(backend, parent)
    assert backend is getattr(fresh, name)
    assert backend.full_cls_name() == ("repage.vllm.backends", name)
    assert backend.get_name() == parent.get_name()
    assert issubclass(backend.get_builder_cls(), (RepagedBuilder, parent.get_builder_cls()))
    assert issubclass(backend.get_impl_cls(), impl)
    assert issubclass(backend.get_impl_cls(), parent.get_impl_cls())


def test_every_family_is_registered_under_the_backend_that_it_derives() -> None:
    paths = {
        member.value: name
        for name in registration.BACKENDS
        if (member := AttentionBackendEnum[name])
    }
    registered = {path.rpartition(".")[2] for path in registration.BACKENDS.values()}
    assert registered - {"RepagedCPUAttentionBackend"} == set(backends.FAMILIES)
    for name, family in backends.FAMILIES.items():
        member = paths[family.class_path]
        assert registration.BACKENDS[member] == f"repage.vllm.backends.{name}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RepagedTritonBackend'"):
        _ = backends.RepagedTritonBackend


def test_a_backend_that_cannot_be_derived_is_vllms_own(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(backends, "log_once", lambda _level, text: messages.append(text))
    parent = compat.backend_class(fresh.FAMILIES[FLASHMLA].class_path)
    monkeypatch.delattr(parent, "get_impl_cls")
    monkeypatch.setattr(parent.__mro__[1], "get_impl_cls", None)
    assert getattr(fresh, FLASHMLA) is parent
    (message,) = messages
    assert "FlashMLABackend cannot be re-paged" in message
    assert "vLLM's own is used" in message


def test_strict_makes_that_an_error(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPAGE_STRICT", "1")
    parent = compat.backend_class(fresh.FAMILIES[FLASHMLA].class_path)
    monkeypatch.delattr(parent, "get_impl_cls")
    monkeypatch.setattr(parent.__mro__[1], "get_impl_cls", None)
    with pytest.raises(UnsupportedVllmError, match="FlashMLABackend cannot be re-paged"):
        getattr(fresh, FLASHMLA)


_WITHOUT_FLASHINFER = """
import sys
sys.modules["flashinfer"] = None
import repage.vllm
repage.vllm.register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends
assert Backends.FLASHINFER.is_overridden()
assert issubclass(Backends.CPU_ATTN.get_class(), object)
assert Backends.FLASHMLA.get_class().__name__ == "RepagedFlashMLABackend"
try:
    Backends.FLASHINFER.get_class()
except ImportError as error:
    assert "flashinfer" in str(error), error
else:
    raise AssertionError("expected vLLM's own ImportError")
"""


def test_registering_needs_no_flashinfer() -> None:
    """vLLM reports a missing library itself, and only for the backend that needs it."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_FLASHINFER],
        env={**os.environ, "REPAGE_STRICT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_registering_imports_no_backend(fresh: Any) -> None:
    registration.activate(registration.Settings())
    try:
        assert not [name for name in fresh.FAMILIES if name in vars(fresh)]
    finally:
        for name in registration.BACKENDS:
            AttentionBackendEnum[name].clear_override()


def test_flashinfers_page_list_kernel_is_replaced_once() -> None:
    pytest.importorskip("flashinfer")
    module = importlib.import_module("vllm.v1.attention.backends.flashinfer")
    flashinfer = importlib.import_module("repage.vllm.flashinfer")
    first = flashinfer.repage_flashinfer(module.FlashInferBackend, module=__name__)
    kernel = module._copy_page_indices_kernel
    flashinfer.repage_flashinfer(module.FlashInferBackend, module=__name__)
    assert module._copy_page_indices_kernel is kernel
    assert issubclass(first, module.FlashInferBackend)
