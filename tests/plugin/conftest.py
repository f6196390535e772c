"""Worlds of layers, and recording backends to re-page."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import MultipleOf

from repage.vllm import set_packed_mode
from repage.vllm.factory import repage_backend
from support.recording import (
    LAYERS,
    AlignedRecordingBackend,
    FixedPages,
    RecordingBackend,
    RecordingBuilder,
    RecordingImpl,
    World,
)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "REPAGE_DISABLE",
        "REPAGE_STRICT",
        "REPAGE_DEBUG",
        "REPAGE_CPU_PAGE",
        "VLLM_KV_CACHE_LAYOUT",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    set_packed_mode(None)


@pytest.fixture
def make_world() -> type[World]:
    return World


@pytest.fixture
def recording() -> SimpleNamespace:
    """Names of the recording classes, for tests that derive from them."""
    return SimpleNamespace(
        Backend=RecordingBackend,
        Builder=RecordingBuilder,
        Impl=RecordingImpl,
        AlignedBackend=AlignedRecordingBackend,
        FixedPages=FixedPages,
        MultipleOf=MultipleOf,
    )


@pytest.fixture
def repaged() -> Any:
    """Re-page the recording backend with the given page sizes."""

    def make(*sizes: int, parent: type = RecordingBackend, **options: Any) -> Any:
        return repage_backend(parent, FixedPages(*sizes, **options), module=__name__)

    return make


@pytest.fixture
def make_builder(make_world, repaged):
    """A world of two bound layers and a builder with 32-token pages in 128-token blocks."""

    def make(layout: str = "BLHNC", sizes: tuple[int, ...] = (32,), **options):
        backend = repaged(*sizes)
        world = make_world(layout=layout, impl=backend.get_impl_cls(), **options)
        names = world.add_layers(*LAYERS)
        world.bind()
        builder = backend.get_builder_cls()(world.spec(), names, world.config, torch.device("cpu"))
        return world, builder, backend

    return make
