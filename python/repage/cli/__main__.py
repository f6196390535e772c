# SPDX-License-Identifier: Apache-2.0
"""``python -m repage.cli``."""

from __future__ import annotations

from repage.cli.main import main

if __name__ == "__main__":
    main(prog_name="repage")
