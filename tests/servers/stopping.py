"""Stops a process as a whole: after a signal its threads may run on for milliseconds, and answer or give up locks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def stop(pid: int, how: int = signal.SIGSTOP) -> None:
    """Returns when no thread of it runs any more: it has stopped, or has ended. Raises ProcessLookupError."""
    os.kill(pid, how)
    while not all(_stands_still(thread) for thread in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.0005)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It does nothing until the end of the context, and its connections stay open."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stands_still(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
