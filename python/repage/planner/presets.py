# SPDX-License-Identifier: Apache-2.0
"""Cache geometry of known models and drafters (``presets.json``), by name.

The numbers come from public model configurations; a ``note`` says where one is assumed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from repage.errors import RepageError


class UnknownNameError(RepageError, ValueError):
    """A model or drafter without a preset."""


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers with equal caches.

    Parameters
    ----------
    layers : int
        How many.
    kv_heads : int
        KV heads of the whole model; 1 for latent caches.
    head_dim, head_dim_v : int
        Elements of K and of V; `head_dim_v` is 0 for latent caches.
    window : int or None
        Tokens of the sliding window.
    bytes_per_state : int or None
        Latent caches: bytes of one state in bf16, or in the only format if `fixed`.
    fixed : bool
        The format does not follow the KV cache's dtype.
    tokens_per_state : int
        Tokens that one state covers.
    block : int or None
        Manager block that the model asks for, whatever the others have.
    alignment : int or None
        Bytes that a page is padded to a multiple of.
    label : str
        Part of the layers' names.
    as_target : bool
        Same cache as the target's full attention.
    """

    layers: int
    kv_heads: int = 1
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    bytes_per_state: int | None = None
    fixed: bool = False
    tokens_per_state: int = 1
    block: int | None = None
    alignment: int | None = None
    label: str = ""
    as_target: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether one latent vector is kept in place of K and V."""
        return self.bytes_per_state is not None


@dataclass(frozen=True)
class Preset:
    """A model or drafter.

    Parameters
    ----------
    name : str
        As on the command line.
    title : str
        Name for people.
    attention : tuple of AttentionLayers
        Its attention layers.
    state : mapping or None
        Recurrent-state layers: ``kind``, ``layers`` and the sizes that vLLM's calculators take.
    ssm_dtype : str
        What vLLM makes of ``--mamba-ssm-cache-dtype auto``.
    block_size : int or None
        ``--block-size`` of the published setup, or the block that the model's kernels ask for.
    max_model_len : int or None
        Longest request of the model.
    spec_tokens : int
        Drafters: drafted tokens per step.
    drafters : mapping of str to str
        Models: short drafter names and what they mean here.
    note : str
        What is assumed.
    """

    name: str
    title: str
    attention: tuple[AttentionLayers, ...]
    state: Mapping[str, Any] | None
    ssm_dtype: str
    block_size: int | None
    max_model_len: int | None
    spec_tokens: int
    drafters: Mapping[str, str]
    note: str


def model_preset(name: str) -> Preset:
    """Find a model.

    Parameters
    ----------
    name : str
        In any case, with or without its organisation.

    Returns
    -------
    Preset

    Raises
    ------
    UnknownNameError
        Names the near ones.
    """
    return _find("model", name, _presets()["models"])


def drafter_preset(name: str, target: Preset | None = None) -> Preset:
    """Find a drafter.

    Parameters
    ----------
    name : str
        Full name, or a short one such as ``dflash``.
    target : Preset or None, default None
        Says what a short name means.

    Returns
    -------
    Preset

    Raises
    ------
    UnknownNameError
        Names the near ones.
    """
    if target is not None:
        name = target.drafters.get(name.lower(), name)
    return _find("drafter", name, _presets()["drafters"])


def model_names() -> list[str]:
    """Return the names of all models."""
    return list(dict.fromkeys(preset.name for preset in _presets()["models"].values()))


def drafter_names() -> list[str]:
    """Return the names of all drafters."""
    return list(dict.fromkeys(preset.name for preset in _presets()["drafters"].values()))


def _find(what: str, name: str, presets: Mapping[str, Preset]) -> Preset:
    key = name.lower().rsplit("/", 1)[-1]
    if key in presets:
        return presets[key]
    near = _near(key, presets)
    hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(presets)}"
    raise UnknownNameError(f"{what}: there is no preset {name!r}; {hint}")


def _near(key: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    close = difflib.get_close_matches(key, names, n=5, cutoff=0.5)
    parts = [name for name in names if key in name or name in key]
    return list(dict.fromkeys([*parts, *close]))[:6]


@cache
def _presets() -> dict[str, dict[str, Preset]]:
    text = resources.files("repage.planner").joinpath("presets.json").read_text("utf-8")
    return {
        part: {
            key: preset
            for entry in entries
            for preset in [_parse(entry)]
            for key in (preset.name, *entry.get("aliases", ()))
        }
        for part, entries in json.loads(text).items()
    }


def _parse(entry: Mapping[str, Any]) -> Preset:
    return Preset(
        name=entry["name"],
        title=entry["title"],
        attention=tuple(_layers(layers) for layers in entry["attention"]),
        state=entry.get("state"),
        ssm_dtype=entry.get("ssm_dtype", "bf16"),
        block_size=entry.get("block_size"),
        max_model_len=entry.get("max_model_len"),
        spec_tokens=entry.get("spec_tokens", 0),
        drafters=entry.get("drafters", {}),
        note=entry.get("note", ""),
    )


def _layers(entry: Mapping[str, Any]) -> AttentionLayers:
    values = dict(entry)
    if "bytes_per_state" not in values and not values.get("as_target"):
        values.setdefault("head_dim_v", values["head_dim"])
    return AttentionLayers(**values)
