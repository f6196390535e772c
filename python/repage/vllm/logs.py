# SPDX-License-Identifier: Apache-2.0
"""The plugin's log lines, through vLLM's handlers.

vLLM configures handlers for the logger ``vllm`` only, and may do so again later in the same
process (``vllm/logger.py``, 0.32.0 and 0.33.0). So the handler here owns no stream: it hands each
record to whatever handlers the ``vllm`` logger has at that moment.
"""

from __future__ import annotations

import logging

LOGGER_NAME = "repage"

_seen: set[str] = set()


class VllmHandler(logging.Handler):
    """Passes records on to the handlers of vLLM's logger, at vLLM's level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record to vLLM's handlers.

        Parameters
        ----------
        record : logging.LogRecord
            Keeps its name, ``repage``.
        """
        target = logging.getLogger("vllm")
        if target.isEnabledFor(record.levelno):
            target.callHandlers(record)


def get_logger() -> logging.Logger:
    """Return the logger ``repage``, connected to vLLM's handlers exactly once per process.

    Returns
    -------
    logging.Logger
        Does not propagate, so a line never appears twice.
    """
    logger = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, VllmHandler) for handler in logger.handlers):
        logger.addHandler(VllmHandler())
        logger.setLevel(logging.DEBUG)  # the level that counts is vLLM's, asked per record
        logger.propagate = False
    return logger


def log_once(level: int, message: str) -> None:
    """Log a line that this process has not logged yet.

    Parameters
    ----------
    level : int
        Of the ``logging`` module.
    message : str
        Complete; it is also the key.
    """
    if message not in _seen:
        _seen.add(message)
        get_logger().log(level, "%s", message, stacklevel=2)
