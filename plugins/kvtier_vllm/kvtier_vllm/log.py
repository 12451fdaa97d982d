"""Sends the lines of the logger `kvtier` where vLLM's own go: in its format, at its level, once."""

from __future__ import annotations

import logging


class _ToVllm(logging.Handler):
    """Looks for vLLM's handlers at each line: vLLM configures its logging again with each engine."""

    def emit(self, record: logging.LogRecord) -> None:
        vllm = logging.getLogger("vllm")
        if vllm.isEnabledFor(record.levelno):
            vllm.handle(record)


def attach() -> None:
    """Show what kvtier logs in this process as vLLM's. A logger with handlers that an operator chose stays as it is."""
    log = logging.getLogger("kvtier")
    log.disabled = False  # an operator's file that does not name it may have disabled it
    if not log.handlers:
        log.addHandler(_ToVllm())
        log.propagate = False
        log.setLevel(log.level or logging.DEBUG)
