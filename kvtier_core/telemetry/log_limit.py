"""Keeps the log readable during repeated failures: the first line of a cause immediately, then only their number."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import attrs

logger = logging.getLogger("kvtier")

#: Seconds for which a cause that was logged is only counted.
EVERY = 60.0

#: Words that may differ between two errors of one cause: names of frames, with the folder of their first byte, places
#: in a file, and lengths of time. Addresses, ports, and numbers of errors distinguish causes.
_DIFFERS = re.compile(r"(\b[0-9a-f]{2}/)?[0-9a-f]{16,}|\b\d{6,}\b|(?<![\d.])\d+\.\d+(?![\d.])")


@attrs.define
class _Cause:
    """Messages that are only counted until ``until``."""

    level: int
    since: float
    until: float
    more: int = 0
    last: str = ""  #: the latest reason


class LogLimit:
    """Writes lines to the log. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._causes: dict[tuple[str, str], _Cause] = {}
        self._next = float("inf")  # when the first of them is due

    def log(self, level: int, subject: str, detail: str, why: str) -> None:
        """Log a line. If one of the same subject and reason was logged in the last minute, it is only counted."""
        self.flush()
        cause = (subject, _DIFFERS.sub("…", why))
        known = self._causes.get(cause)
        if known is not None:
            known.more, known.last = known.more + 1, why
            return
        logger.log(level, "kvtier: %s", ": ".join(filter(None, (subject, detail, why))))
        now = self._clock()
        self._causes[cause] = _Cause(level, now, now + EVERY)
        self._next = min(self._next, now + EVERY)

    def flush(self, *, now: bool = False) -> None:
        """Log the number of further lines of each cause that was counted for a minute; ``now``: of every cause."""
        time = self._clock()
        if time < self._next and not now:
            return
        for cause, counted in list(self._causes.items()):
            if time < counted.until and not now:
                continue
            if counted.more:
                seconds = time - counted.since
                logger.log(
                    counted.level, "kvtier: %s: %d more in %.0f s: %s", cause[0], counted.more, seconds, counted.last
                )
                self._causes[cause] = _Cause(counted.level, time, time + EVERY)
            else:
                del self._causes[cause]
        self._next = min((each.until for each in self._causes.values()), default=float("inf"))
