# SPDX-License-Identifier: Apache-2.0
"""A wheel in an environment of its own, away from the checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from repage.demo.checkpoints import default_cache_dir
from support.processes import output_of

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh virtual environment with the wheel; the rest comes from the running one."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["--no-build-isolation", "--no-deps", f"-Cbuild-dir={folder / 'build'}"]
    subprocess.run([*pip, "wheel", *build, "--wheel-dir", str(folder), str(REPOSITORY)], check=True)
    (wheel,) = folder.glob("repage-*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip[:3], "--python", str(python), *pip[3:], *install], check=True)
    # After the environment's own packages on the path; import hooks in there, such as that of an
    # editable install, do not run.
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv"


def run(environment: Path, folder: Path, *command: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    return output_of(
        [str(environment / "bin" / command[0]), *command[1:]],
        inherited | {"PATH": path},
        folder=folder,
    )


@pytest.mark.slow
def test_the_installed_package_is_the_wheels(environment: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, repage, repage._core as core\n"
        "print(repage.__file__, core.__file__, repage.get_include(), sep='\\n')\n"
        "entries = importlib.metadata.entry_points(group='vllm.general_plugins', name='repage')\n"
        "print(*[entry.value for entry in entries])"
    )
    *paths, entries = run(environment, tmp_path, "python", "-c", code).splitlines()
    assert all(Path(path).is_relative_to(environment) for path in paths), paths
    assert entries == "repage.vllm:register"
    assert "0.1" in run(environment, tmp_path, "repage", "--version")


@pytest.mark.slow
@pytest.mark.engine
def test_the_short_demonstration_runs_outside_of_the_checkout(
    environment: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    out = run(
        environment,
        tmp_path,
        *("python", "-m", "repage.demo", "--short"),
        *("--cache-dir", str(default_cache_dir()), "--out", str(tmp_path / "records")),
    )
    assert "identical" in out
    assert "served hybrid-dflash" in out
