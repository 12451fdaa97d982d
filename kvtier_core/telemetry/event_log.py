"""Logs and counts the stack's events, and passes them to observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtier_core.telemetry.log_limit import LogLimit
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.telemetry.readings import Readings
from kvtier_core.types import Event, EventKind, Usage

logger = logging.getLogger("kvtier")

#: Events that are logged, with the level of their line. All others are only counted.
_LOG_LEVELS = {
    EventKind.CORRUPT: logging.WARNING,
    EventKind.IO_ERROR: logging.WARNING,
    EventKind.BREAKER_OPEN: logging.WARNING,
    EventKind.INCOMPATIBLE: logging.INFO,
    EventKind.MISSING: logging.INFO,
    EventKind.BREAKER_CLOSED: logging.INFO,
}

#: Seconds between two looks at the usage of the tiers.
_USAGE_EVERY = 1.0
#: Seconds between two log lines of the totals: servers are often killed without notice.
_TOTALS_EVERY = 600.0


class EventLog:
    """Handles batches of events. ``clock`` returns seconds."""

    def __init__(self, observers: Observers, clock: Callable[[], float]):
        self.readings = Readings()
        self.listeners: list[Callable[[Sequence[Event]], None]] = []  #: the engine's own, called on this thread
        self._observers = observers
        self._clock = clock
        self._limit = LogLimit(clock)
        self.last_event = clock()  #: time of the last event, or of the start
        self._usage: dict[str, Usage] = {}  # as last reported, by tier
        self._next_look = clock()
        self._next_totals = clock() + _TOTALS_EVERY

    def record(self, events: Sequence[Event]) -> None:
        """Log, count and pass on events. Every ten minutes the totals are logged too. Call it in each step."""
        for event in events:
            if level := _LOG_LEVELS.get(event.kind):
                subject = f"{event.tier}: {event.kind.value}"
                self._limit.log(level, subject, f"{len(event.keys)} chunks" if event.keys else "", event.why)
        self._limit.flush()
        self.tell(events)
        if events:
            self.last_event = now = self._clock()
            if now >= self._next_totals:
                self._next_totals = now + _TOTALS_EVERY
                for line in self.readings.lines():
                    logger.info("kvtier: so far: %s", line)

    def tell(self, events: Sequence[Event]) -> None:
        """Count and pass on events."""
        if events:
            self.readings.add(events)
            for listener in self.listeners:
                listener(events)
        self._observers.tell(events)

    def watch(self, usage: Callable[[], Sequence[Usage]], *, now: bool = False) -> None:
        """Pass on the usage of tiers that has changed: once a second, or ``now``."""
        if self._clock() < self._next_look and not now:
            return
        self._next_look = self._clock() + _USAGE_EVERY
        changed = [each for each in usage() if each != self._usage.get(each.tier)]
        self._usage.update((each.tier, each) for each in changed)
        self.tell([Event(EventKind.USAGE, each.tier, nbytes=each.nbytes, usage=each) for each in changed])

    def close(self) -> None:
        """Close the observers, after they have received everything."""
        self._observers.close()

    def log_totals(self) -> None:
        """Log the totals and savings of each tier, after the causes that are only counted."""
        self._limit.flush(now=True)
        for line in self.readings.lines() + self.readings.lines_of_savings():
            logger.info("kvtier: totals: %s", line)
