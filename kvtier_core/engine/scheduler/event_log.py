"""Logs and counts the stack's events, and passes them to the observers of plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtier_core.stack.stats import Stats
from kvtier_core.types import Event, EventKind

logger = logging.getLogger("vllm.kvtier")

#: Events that operators want to read about, with the level of their log line. All others are only counted.
_LOG_LEVELS = {
    EventKind.CORRUPT: logging.WARNING,
    EventKind.IO_ERROR: logging.WARNING,
    EventKind.BREAKER_OPEN: logging.WARNING,
    EventKind.INCOMPATIBLE: logging.INFO,
    EventKind.MISSING: logging.INFO,
    EventKind.BREAKER_CLOSED: logging.INFO,
}


class EventLog:
    """Handles batches of events. ``clock`` returns seconds; ``observe`` is called with every batch."""

    def __init__(self, observe: Callable[[Sequence[Event]], None], clock: Callable[[], float]):
        self.stats = Stats(clock())
        self._observe = observe
        self._clock = clock
        self.last_event = clock()  #: time of the last event, or of the start

    def record(self, events: Sequence[Event]) -> None:
        """Log, count and pass on events. Every ten minutes the counters are logged too."""
        for event in events:
            if level := _LOG_LEVELS.get(event.kind):
                logger.log(
                    level, "kvtier: %s: %s: %d chunks: %s", event.tier, event.kind.value, len(event.keys), event.why
                )
        if events:
            self.last_event = self._clock()
            self.stats.count_events(events)
            self._observe(events)
            for line in self.stats.due(self._clock()):
                logger.info("kvtier: so far: %s", line)

    def log_totals(self) -> None:
        """Log the counters of each tier."""
        for line in self.stats.describe():
            logger.info("kvtier: in all: %s", line)
