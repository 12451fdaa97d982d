"""Decides whether a store may be called: circuit breakers for reads and writes, and a watch for hanging calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.errors import StoreFull
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_core.work.io_pool import Pool

#: Consecutive failures that open a breaker.
_FAILURES = 3
#: Seconds for which it is open: the first time, and the most after doubling at each failed probe.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
#: A call hangs when it has taken this many times its timeout. Until it returns, no other call to this store begins.
_PATIENCE = 2


class Breaker:
    """A circuit breaker. Closed, it allows all calls; open, none; half-open, one probe that closes or reopens it.

    Each call that begins succeeds, fails, or is given up. ``now`` is in seconds of any clock.
    """

    def __init__(self) -> None:
        self._close()

    def _close(self) -> None:
        self.pause = _FIRST_PAUSE  #: seconds for which the breaker is open now, or will be next time
        self._failures = 0
        self._until: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Is it open, or half-open?"""
        return self._until is not None

    def allows(self, now: float) -> bool:
        """May a call begin now?"""
        if self._until is None:
            return True
        return now >= self._until and not self._probing

    def begin(self, now: float) -> None:
        """A call begins."""
        self._probing = self._until is not None and now >= self._until

    def give_up(self) -> None:
        """A call ended without an outcome: if it was the probe, another call may be the next one."""
        self._probing = False

    def succeed(self) -> bool:
        """A call succeeded. True if this closes the breaker."""
        was_open = self.open
        self._close()
        return was_open

    def fail(self, now: float) -> bool:
        """A call failed. True if this opens the breaker."""
        self._failures += 1
        if self._until is not None:
            if not self._probing:
                return False  # the call began before the breaker opened
            self.pause = min(self.pause * 2, _LONGEST_PAUSE)
        elif self._failures < _FAILURES:
            return False
        self._until = now + self.pause
        self._probing = False
        return True


class StoreHealth:
    """Decides whether calls may begin, and collects the tier's ``events``."""

    def __init__(self, name: str, pool: Pool, timeout: float, clock: Callable[[], float]):
        """``timeout`` is the seconds after which a call should have given up on its own."""
        self.events: list[Event] = []
        self.reads = Breaker()
        self.writes = Breaker()
        self._name = name
        self._pool = pool
        self._hangs_after = _PATIENCE * timeout
        self._clock = clock
        self._hangs = False

    @property
    def can_read(self) -> bool:
        """May a read begin now?"""
        return not self._hangs and self.reads.allows(self._clock())

    @property
    def can_write(self) -> bool:
        """May a write begin now?"""
        return not self._hangs and self.writes.allows(self._clock())

    def blocks(self, breaker: Breaker) -> bool:
        """Does this breaker or a hanging call block calls other than probes?"""
        return self._hangs or breaker.open

    def record(self, breaker: Breaker, keys: Sequence[ChunkKey], error: BaseException | None) -> None:
        """A call returned. An error counts for its breaker, unless the store is only full."""
        if error is not None:
            self.report(EventKind.IO_ERROR, keys, why=f"{type(error).__name__}: {error}")
        calls = "reads" if breaker is self.reads else "writes"
        if error is None or isinstance(error, StoreFull):
            if breaker.succeed():
                self.report(EventKind.BREAKER_CLOSED, [], why=f"{calls} again")
        elif breaker.fail(self._clock()):
            self.report(EventKind.BREAKER_OPEN, [], why=f"no {calls} for {breaker.pause:g}s")

    def watch_for_hangs(self) -> None:
        """Check for a hanging call; call this regularly. While one hangs, neither reads nor writes may begin."""
        hangs = self._pool.longest() > self._hangs_after
        if hangs and not self._hangs:
            self.report(EventKind.BREAKER_OPEN, [], why=f"until a call that has taken {self._hangs_after:g}s returns")
        elif self._hangs and not hangs:
            self.report(EventKind.BREAKER_CLOSED, [], why="the call has returned")
        self._hangs = hangs

    def report(
        self, kind: EventKind, keys: Sequence[ChunkKey], *, nbytes: int = 0, why: str = "", seconds: float = 0.0
    ) -> None:
        """Add an event of this tier."""
        self.events.append(Event(kind, self._name, tuple(keys), nbytes, why, seconds))
