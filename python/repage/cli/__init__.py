# SPDX-License-Identifier: Apache-2.0
"""The command ``repage``: what a layout costs, what is installed, whether it works."""

from __future__ import annotations

from repage.cli.main import main

__all__ = ["main"]
