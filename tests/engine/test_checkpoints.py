# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made on the fly: complete, deterministic, built once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from repage.demo.checkpoints import (
    DFlashCheckpoint,
    Eagle3Checkpoint,
    GemmaCheckpoint,
    HybridCheckpoint,
    content_version,
    default_cache_dir,
    materialize,
)
from repage.demo.setups import SETUPS

TRANSFORMERS_WARNS = pytest.mark.filterwarnings("ignore::Warning")


@dataclass(frozen=True)
class Counted:
    """A checkpoint of one file that remembers how often it was built."""

    name: str = "counted"
    size: int = 1

    def build(self, path: Path) -> None:
        (path / "file").write_text("x" * self.size)
        with (path.parent / "builds").open("a") as builds:
            builds.write(f"{self.size}\n")


@dataclass(frozen=True)
class Failing:
    """A checkpoint whose building stops in the middle."""

    name: str = "failing"

    def build(self, path: Path) -> None:
        (path / "half").write_text("half")
        raise OSError("disk full")


def test_a_checkpoint_is_built_once(tmp_path: Path) -> None:
    first = materialize(Counted(), tmp_path)
    assert materialize(Counted(), tmp_path) == first
    assert (first.parent / "builds").read_text() == "1\n"


def test_other_fields_are_another_checkpoint(tmp_path: Path) -> None:
    assert materialize(Counted(size=1), tmp_path) != materialize(Counted(size=2), tmp_path)
    assert content_version(GemmaCheckpoint()) != content_version(GemmaCheckpoint(head_dim=256))


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        materialize(Failing(), tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_builder_that_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    class Raced(Counted):
        def build(self, path: Path) -> None:
            super().build(path)
            other = path.parent / f"{self.name}-{content_version(self)}"
            other.mkdir()
            (other / "file").write_text("by the other builder")

    built = materialize(Raced(), tmp_path)
    assert (built / "file").read_text() == "by the other builder"
    assert [item for item in built.parent.iterdir() if item.name.startswith(".")] == []


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "repage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "repage"


@TRANSFORMERS_WARNS
@pytest.mark.parametrize(
    "checkpoint",
    [
        GemmaCheckpoint(),
        GemmaCheckpoint(head_dim=256, global_head_dim=256),
        HybridCheckpoint(),
        HybridCheckpoint(head_dim=256),
        DFlashCheckpoint(),
        DFlashCheckpoint(layer_types=("sliding_attention", "full_attention")),
        Eagle3Checkpoint(),
    ],
    ids=lambda item: f"{item.name}-{item.head_dim}",
)
def test_building_twice_gives_the_same_bytes(tmp_path: Path, checkpoint: object) -> None:
    pytest.importorskip("transformers")
    first, second = (
        materialize(checkpoint, tmp_path / side)  # type: ignore[arg-type]
        for side in ("a", "b")
    )
    names = sorted(item.name for item in first.iterdir())
    assert names == sorted(item.name for item in second.iterdir())
    assert {"config.json", "model.safetensors"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert sum(item.stat().st_size for item in first.iterdir()) < 8 << 20


@TRANSFORMERS_WARNS
def test_the_tokenizer_has_one_token_per_byte(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(materialize(GemmaCheckpoint(), tmp_path))
    for setup in SETUPS.values():
        for prompt, length in zip(setup.prompts(), setup.prompt_lengths, strict=True):
            ids = tokenizer(prompt)["input_ids"]
            assert len(ids) == length
            assert tokenizer.decode(ids) == prompt


def test_mixed_drafters_say_which_layers_slide(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    kinds = ("sliding_attention",) * 5 + ("full_attention",)
    mixed = DFlashCheckpoint(layer_types=kinds, sliding_window=64)
    config = json.loads((materialize(mixed, tmp_path) / "config.json").read_text())
    assert config["layer_types"] == list(kinds)
    assert config["sliding_window"] == 64
    assert config["use_sliding_window"]
    full = materialize(replace(mixed, layer_types=("full_attention",)), tmp_path)
    assert "sliding_window" not in json.loads((full / "config.json").read_text())
