# SPDX-License-Identifier: Apache-2.0
"""What was built, and where its headers are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from repage import _core
from repage.errors import RepageError


@dataclass(frozen=True)
class BuildInfo:
    """What the compiled module contains.

    Parameters
    ----------
    version : str
        Version of the package.
    compiler : str
        C++ compiler of the CPU code.
    cuda : bool
        Whether it has CUDA kernels.
    cuda_version : str or None
        CUDA runtime that is linked in statically, like "13.0".
    cuda_architectures : tuple of str
        As CMake names them: "90-real" is code for sm_90, "80" is code and PTX for sm_80.
    """

    version: str
    compiler: str
    cuda: bool
    cuda_version: str | None
    cuda_architectures: tuple[str, ...]


def build_info() -> BuildInfo:
    """Describe the compiled module of this installation.

    Returns
    -------
    BuildInfo
    """
    runtime = _core.CUDA_VERSION
    return BuildInfo(
        version=version("repage"),
        compiler=_core.COMPILER,
        cuda=runtime is not None,
        cuda_version=None if runtime is None else f"{runtime // 1000}.{runtime % 1000 // 10}",
        cuda_architectures=tuple(filter(None, _core.CUDA_ARCHITECTURES.split(","))),
    )


def get_include() -> str:
    """Return the folder to put on a compiler's include path for ``#include <repage/...>``.

    Returns
    -------
    str
        Absolute path.

    Raises
    ------
    RepageError
        When the headers are in neither place where an installation has them.
    """
    compiled = Path(_core.__file__).resolve().parent
    # A wheel carries them beside the compiled module; in an editable install the package's
    # sources stay in the repository, two folders below the headers.
    for folder in (compiled / "include", Path(__file__).resolve().parents[2]):
        if (folder / "repage" / "page_map.h").is_file():
            return str(folder)
    raise RepageError(f"the headers of repage are missing beside {compiled}; reinstall the package")
