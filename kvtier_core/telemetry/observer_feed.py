"""Passes events to observers, each on its own thread, so that the engine waits for none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import Observer
from kvtier_core.types import Event
from kvtier_core.work.io_pool import IOPool, Outcome, Pool, run, run_aside, run_within

logger = logging.getLogger("kvtier")

#: Events that may wait for one observer, some 300 bytes each and 40 for every key. One that is further behind is
#: dropped: it would take memory for as long as the engine runs.
_MAX_WAITING = 1 << 16
#: Seconds after which a call that has not returned is logged.
_SLOW = 5.0
#: Seconds that `close` waits for each observer.
_CLOSE_TIMEOUT = 2.0


class Observers(ProcessBound):
    """The observers of one engine. Call every method on the owner's thread; only `close` waits."""

    def __init__(self, opened: Iterable[tuple[str, Observer]] = (), pool: Callable[[str, int], Pool] = IOPool):
        """``opened`` are names for the log, and observers that are open; ``pool`` makes a pool of that many threads."""
        self._dispatchers = [_Dispatcher(name, observer, pool("observer", 1)) for name, observer in opened]

    def tell(self, events: Sequence[Event]) -> None:
        """Pass on events, if there are any. Call it regularly: it also looks for observers that fail or block."""
        for each in self._dispatchers:
            each.tell(events)
        self._dispatchers = [each for each in self._dispatchers if not each.dropped]

    def close(self) -> None:
        """Give each observer `_CLOSE_TIMEOUT` seconds to finish what is queued for it, and close it."""
        for each in self._dispatchers:
            each.close()
        self._dispatchers = []


class _Dispatcher:
    """One observer, with the thread that calls it."""

    def __init__(self, name: str, observer: Observer, pool: Pool):
        self.dropped = False
        self._name = name
        self._observer = observer
        self._pool = pool
        self._waiting = 0  # events that it has not processed
        self._failed = False  # set on its thread, so that it is not called again before the owner knows
        self._blocks = False

    def tell(self, events: Sequence[Event]) -> None:
        self._pool.step()
        self._watch()
        if events and not self.dropped:
            batch = tuple(events)
            self._waiting += len(batch)
            self._pool.submit_store(lambda: self._observe(batch), lambda outcome: self._observed(len(batch), outcome))

    def close(self) -> None:
        """Close it when nothing is queued for it, or after `_CLOSE_TIMEOUT` seconds."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while self._pool.jobs and time.monotonic() < deadline:
            self._pool.wait(0.1)
            self._pool.step()
        if not self.dropped:
            self._close()

    def _observe(self, events: Sequence[Event]) -> None:
        """On the observer's thread."""
        if self._failed:
            return
        called = run(lambda: self._observer.observe(events))
        if called.error is not None:
            self._failed = True
            raise called.error

    def _observed(self, events: int, outcome: Outcome) -> None:
        self._waiting -= events
        if outcome.error is not None:
            self._drop(f"it raised {type(outcome.error).__name__}: {outcome.error}", outcome.error)

    def _watch(self) -> None:
        """Log once that a call takes long, and drop an observer that is too far behind."""
        seconds = self._pool.longest()
        if seconds > _SLOW and not self._blocks:
            logger.warning("kvtier: %s: a call has taken %.0f s; events are waiting for it", self._name, seconds)
        self._blocks = seconds > _SLOW
        if self._waiting > _MAX_WAITING:
            self._drop(f"{self._waiting} events are waiting for it")

    def _drop(self, why: str, error: BaseException | None = None) -> None:
        if not self.dropped:
            self.dropped = True
            logger.error("kvtier: %s is disabled until the engine restarts: %s", self._name, why, exc_info=error)
            run_aside(self._close, "observer-end")  # the engine waits for no observer

    def _close(self) -> None:
        """Close it, unless a call still runs."""
        if not self._pool.close(_CLOSE_TIMEOUT):
            logger.warning("kvtier: %s stays open: a call has not returned; it ends with the process", self._name)
            return
        closed = run_within(self._observer.close, _CLOSE_TIMEOUT)
        if closed is None:
            logger.warning("kvtier: cannot close %s: it has not returned; it ends with the process", self._name)
        elif closed.error is not None:
            logger.warning("kvtier: cannot close %s: %s", self._name, closed.error)
