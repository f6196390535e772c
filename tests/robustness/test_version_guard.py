# SPDX-License-Identifier: Apache-2.0
"""A vLLM that lacks or changes something is refused: one line, and nothing changed.

`test_vllm_033.py` runs this file once more with vLLM 0.33.0.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repage.errors import UnsupportedVllmError
from robustness.changed_vllm import PLUGIN, ChangedName, planner_names

Lines = list[logging.LogRecord]


def registered() -> list[str]:
    """Return what the plugin has changed in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from repage.vllm.preference import hooks, planner_compat
    from repage.vllm.registration import BACKENDS

    changed = [name for name in BACKENDS if AttentionBackendEnum[name].is_overridden()]
    executor = planner_compat.executor_class()
    for name in ("get_kv_cache_specs", "get_supported_kv_cache_layouts"):
        if hasattr(getattr(executor, name, None), hooks._MARK):
            changed.append(name)
    return changed


@pytest.mark.usefixtures("clean")
class TestPlugin:
    def test_an_unchanged_vllm_is_registered(self, lines: Lines) -> None:
        from repage.vllm import compat, register

        expected = os.environ.get("REPAGE_EXPECT_VLLM", "0.32")
        assert compat.vllm_version().startswith(expected)
        register()
        assert len(registered()) == 9
        assert lines == []

    @pytest.mark.parametrize("case", PLUGIN, ids=lambda case: f"{case.probe}: {case.what}")
    def test_a_name_that_is_gone_or_changed(
        self, case: ChangedName, lines: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from repage.vllm import register

        with pytest.MonkeyPatch.context() as patch:
            case.change(patch)
            register()
            monkeypatch.setenv("REPAGE_STRICT", "1")
            with pytest.raises(UnsupportedVllmError) as error:
                register()
        (line,) = lines
        assert line.levelno == logging.WARNING
        for text in (line.getMessage(), str(error.value)):
            assert f"{case.probe}, needed for" in text
        assert "vLLM runs as if repage were not installed" in line.getMessage()
        assert registered() == []

    def test_every_probe_has_such_a_name(self) -> None:
        from repage.vllm import probes

        assert {case.probe for case in PLUGIN} == {probe.name for probe in probes.PROBES}

    @pytest.mark.parametrize("raises", [False, True])
    def test_each_probe_alone_decides(
        self, raises: bool, lines: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from repage.vllm import probes, register

        def broken() -> bool:
            if raises:
                raise RuntimeError("vLLM is different today")
            return False

        for probe in probes.PROBES:
            monkeypatch.setattr(probes, "PROBES", (replace(probe, holds=broken),))
            register()
            register()
            monkeypatch.undo()
            assert registered() == []
            assert probe.name in lines[-1].getMessage()
        assert len(lines) == len(probes.PROBES)


def planner_cases() -> list[Any]:
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        return []
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [pytest.param(case, id=f"{case.probe}: {case.what}") for case in planner_names()]


@pytest.mark.usefixtures("clean")
class TestPreference:
    """The backends stay; only the layout is left to vLLM."""

    @pytest.mark.parametrize("case", planner_cases())
    def test_a_name_that_is_gone_or_changed(
        self, case: ChangedName, lines: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from repage.vllm.preference import install

        with pytest.MonkeyPatch.context() as patch:
            case.change(patch)
            install()
            install()
            monkeypatch.setenv("REPAGE_STRICT", "1")
            with pytest.raises(UnsupportedVllmError, match="REPAGE_STRICT=1"):
                install()
        (line,) = lines
        assert line.getMessage().startswith("repage leaves the KV-cache layout to vLLM")
        assert case.probe in line.getMessage()
        assert registered() == []

    def test_every_probe_has_such_a_name(self) -> None:
        from repage.vllm.preference import planner_compat

        assert {case.probe for case in planner_names()} == {
            probe.name for probe in planner_compat.PROBES
        }


class TestOtherPackagesOfThatName:
    """A `vllm` that is none of the supported ones, first on the path of a fresh process."""

    @pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "dev"])
    def test_another_version_costs_one_line(self, version: str, tmp_path: Path) -> None:
        done = self.register(tmp_path, version)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert done.stderr.count("repage is off: it supports vLLM >=0.32,<0.34") == 1
        strict = self.register(tmp_path, version, REPAGE_STRICT="1")
        assert strict.returncode != 0
        assert "UnsupportedVllmError" in strict.stderr

    def test_the_right_version_of_something_else_entirely(self, tmp_path: Path) -> None:
        """Not one name is there: every probe says so, and nothing is raised."""
        done = self.register(tmp_path, "0.33.0")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("repage is off: vLLM 0.33.0 lacks what it builds on") == 1

    @staticmethod
    def register(folder: Path, version: str, **variables: str) -> subprocess.CompletedProcess[str]:
        package = folder / "vllm"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        code = (
            "import logging, sys\n"
            f"sys.path.insert(0, {str(folder)!r})\n"
            "logging.getLogger('vllm').addHandler(logging.StreamHandler())\n"
            "import importlib.metadata\n"
            "known = importlib.metadata.version\n"
            "def version(name):\n"
            "    if name.startswith('vllm'):\n"
            "        raise importlib.metadata.PackageNotFoundError(name)\n"
            "    return known(name)\n"
            "importlib.metadata.version = version\n"
            "import repage.vllm\n"
            "repage.vllm.register(); repage.vllm.register()\n"
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("REPAGE_")}
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
