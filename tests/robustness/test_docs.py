# SPDX-License-Identifier: Apache-2.0
"""The documentation runs, and the error texts in it are those of the sources."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from repage.vllm.preference.settings import PreferenceSettings
from repage.vllm.settings import Settings

REPOSITORY = Path(__file__).parents[2]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [*DOCS, *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return (words after the language, code) of a page's runnable blocks."""
    block = re.compile(rf"^```{language} runnable([^\n]*)\n(.*?)^```", re.M | re.S)
    found = block.findall(page.read_text())
    return [(words.strip(), code) for words, code in found]


def having(language: str) -> list[Path]:
    return [page for page in DOCS if blocks(page, language)]


@pytest.mark.parametrize("page", having("python"), ids=lambda page: page.stem)
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, in one namespace."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    names: dict[str, object] = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    for words, code in blocks(page, "python"):
        if words == "vllm" and not HAS_VLLM:
            pytest.skip("vLLM is not installed")
        with warnings.catch_warnings():
            if words == "vllm":
                warnings.simplefilter("ignore")  # vLLM's imports use what torch deprecates
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", having("shell"), ids=lambda page: page.stem)
def test_shell_commands_run(page: Path, tmp_path: Path) -> None:
    if not HAS_VLLM:
        pytest.skip("vLLM is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for _, code in blocks(page, "shell"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def templates(*files: Path) -> list[str]:
    """Return every string of Python files, with `…` for what is put in."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def error_texts() -> list[tuple[str, str]]:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^### `(.+)`(?: \((.+)\))?$", page, re.M)


@pytest.mark.parametrize(("text", "owner"), error_texts())
def test_error_texts_are_in_the_sources(text: str, owner: str) -> None:
    if owner == "CMake":
        sources = [" ".join((REPOSITORY / "CMakeLists.txt").read_text().split())]
    elif owner == "vLLM":
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("vLLM is not installed")
        sources = templates(Path(spec.origin).parent / "v1" / "worker" / "utils.py")
    else:
        sources = templates(*(REPOSITORY / "python").rglob("*.py"))
    assert any(text in source for source in sources), text


def test_there_is_something_to_test() -> None:
    assert len(error_texts()) > 25
    assert len(having("python")) >= 2
    assert len(having("shell")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", page.read_text(), re.M):
        assert re.search(rf"^{''.join(target)}:", makefile, re.M), target


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    """Of the plugin; the demonstration's and the build's are documented where they are used."""
    read = set(
        re.findall(
            r"REPAGE_[A-Z_]+",
            "".join(
                (REPOSITORY / "python" / "repage" / path).read_text()
                for path in ("vllm/settings.py", "vllm/preference/settings.py")
            ),
        )
    )
    table = (REPOSITORY / "docs" / "tuning.md").read_text()
    documented = set(re.findall(r"^\| `(REPAGE_[A-Z_]+)` \|", table, re.M))
    assert documented == read
    for variable in documented:
        assert variable in (REPOSITORY / "README.md").read_text()


def test_documented_values_are_accepted() -> None:
    table = (REPOSITORY / "docs" / "tuning.md").read_text()
    for variable, values in re.findall(r"^\| `(REPAGE_[A-Z_]+)` \| (.+?) \|", table, re.M):
        for value in re.findall(r"`([^`]+)`", values):
            Settings.from_env({variable: value})
            PreferenceSettings.from_env({variable: value})


def test_the_changelog_has_the_packages_version_or_unreleased_changes() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    version = re.search(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert "## Unreleased" in changes or f"## {version[1]}" in changes
