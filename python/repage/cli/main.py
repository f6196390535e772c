# SPDX-License-Identifier: Apache-2.0
"""The command group."""

from __future__ import annotations

from importlib.metadata import version

import click

from repage.cli.doctor import doctor
from repage.cli.plan import plan
from repage.selftest.command import selftest_command

EXIT_CODES = """\b
Exit codes:
  0  done
  1  the answer is no: a check failed, a model cannot be planned
  2  wrong usage: unknown option, name or value
"""


@click.group(epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("repage"), prog_name="repage")
def main() -> None:
    """Small kernel pages on vLLM's packed KV-cache blocks."""


main.add_command(plan)
main.add_command(doctor)
main.add_command(selftest_command)
