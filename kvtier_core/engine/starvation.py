"""Logs that a thread of the engine starves: it could run, but others have the cores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvtier_core.telemetry.log_limit import LogLimit

#: Minimum number of seconds between two looks. A step may be longer.
_EVERY = 10.0
#: A thread that waits for a core for a larger part of the time starves.
_SHARE = 0.5

#: The causes, each with its remedy. Threads that spin while they wait take the cores of those that work.
_CAUSES = (
    "other programs use its cores (give it cores of its own), it has more ranks or threads than cores (run fewer: "
    "OMP_NUM_THREADS), waiting threads spin (KMP_BLOCKTIME=0, OMP_WAIT_POLICY=passive), or the CPU quota of its cgroup "
    "is used up"
)


class Starvation:
    """Watches the thread that calls `look`, at the cost of one small read every ten seconds."""

    def __init__(
        self,
        of: str,
        clock: Callable[[], float] = time.monotonic,
        file: Path = Path("/proc/thread-self/schedstat"),
    ):
        """``of`` names the thread in the line. ``file`` has the nanoseconds that it ran, and those that it waited."""
        self._of = of
        self._clock = clock
        self._file = file
        self._log = LogLimit(clock)
        self._next = float("-inf")
        self._last: tuple[float, float] | None = None  # the time of the last look, and the seconds waited by then

    def look(self) -> None:
        """Log a line if the thread has starved since the last look. Call it in each step."""
        now = self._clock()
        if now < self._next:
            return
        try:
            waited = int(self._file.read_text("ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the kernel does not count this
            self._next = float("inf")
            return
        then, before = self._last or (now, waited)
        self._last, self._next = (now, waited), now + _EVERY
        seconds, period = waited - before, now - then
        if seconds > _SHARE * period:
            why = f"it waited {seconds:.1f} s of {period:.1f} s for a core"
            self._log.log(logging.WARNING, f"{self._of}: too few cores", _CAUSES, why)
