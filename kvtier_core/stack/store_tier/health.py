"""Whether a store may be called now: a circuit breaker each for reads and writes, and a watch for calls that hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.errors import StoreFull
from kvtier_core.stack.store_tier.breaker import Breaker
from kvtier_core.transfer.io_pool import Outcome, Pool
from kvtier_core.types import ChunkKey, Event, EventKind

#: A call hangs when it has taken so many times its timeout. Until it returns, no other call to this store begins.
_PATIENCE = 2


class StoreHealth:
    """Decides whether calls may begin, and collects what happens to the tier in ``events``."""

    def __init__(self, name: str, pool: Pool, timeout: float, clock: Callable[[], float]):
        """``timeout`` is the seconds after which a call should have given up by itself."""
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

    @property
    def reads_blocked(self) -> bool:
        """Does a breaker, or a call that hangs, keep reads from the store, but for a probe?"""
        return self._hangs or self.reads.open

    @property
    def writes_blocked(self) -> bool:
        """The same for writes."""
        return self._hangs or self.writes.open

    def begin(self, breaker: Breaker) -> None:
        """A call begins that counts for ``breaker``: `reads` or `writes`."""
        breaker.begin(self._clock())

    def give_up(self, breaker: Breaker) -> None:
        """A call that began is not made."""
        breaker.give_up()

    def record_outcome(self, breaker: Breaker, keys: Sequence[ChunkKey], outcome: Outcome) -> None:
        """A call returned. An error counts for its breaker, unless the store is merely full."""
        if outcome.error is not None:
            self.report(EventKind.IO_ERROR, keys, why=f"{type(outcome.error).__name__}: {outcome.error}")
        calls = "reads" if breaker is self.reads else "writes"
        if outcome.error is None or isinstance(outcome.error, StoreFull):
            if breaker.succeed():
                self.report(EventKind.BREAKER_CLOSED, [], why=f"{calls} again")
        elif breaker.fail(self._clock()):
            self.report(EventKind.BREAKER_OPEN, [], why=f"no {calls} for {breaker.pause:g}s")

    def watch_for_hangs(self) -> None:
        """Call this regularly: while the oldest call hangs, neither reads nor writes may begin."""
        hangs = self._pool.longest() > self._hangs_after
        if hangs and not self._hangs:
            self.report(EventKind.BREAKER_OPEN, [], why=f"until a call returns that has taken {self._hangs_after:g}s")
        elif self._hangs and not hangs:
            self.report(EventKind.BREAKER_CLOSED, [], why="the call has returned")
        self._hangs = hangs

    def report(
        self, kind: EventKind, keys: Sequence[ChunkKey], *, nbytes: int = 0, why: str = "", seconds: float = 0.0
    ) -> None:
        """Add an event of this tier."""
        self.events.append(Event(kind, self._name, tuple(keys), nbytes, why, seconds))
