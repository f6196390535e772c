# SPDX-License-Identifier: Apache-2.0
"""What the plugin says in vLLM's log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from repage.vllm import logs


class Keep(logging.Handler):
    """A handler that is not repage's, and keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Keep the lines that reach vLLM's handlers; what was logged once may be logged again."""
    handler = Keep()
    monkeypatch.setattr(logs, "_seen", set())
    logging.getLogger("vllm").addHandler(handler)
    yield handler.records
    logging.getLogger("vllm").removeHandler(handler)
