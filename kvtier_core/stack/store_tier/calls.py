"""The calls of a tier to its store: no two name the same key, and each is timed and counts for a breaker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs

from kvtier_core.interfaces import Backend
from kvtier_core.stack.store_tier.frame_table import FrameTable, Use
from kvtier_core.stack.store_tier.health import Breaker, StoreHealth
from kvtier_core.types import ChunkKey
from kvtier_core.work.io_pool import Outcome, Pool, Work


class Call(NamedTuple):
    """The result of a call to a store, or the error that it raised."""

    value: Any
    error: BaseException | None
    ended: float  #: by the tier's clock
    seconds: float  #: that it spent on a thread


@attrs.define(eq=False)
class Calls:
    """Makes the calls. Owner's thread only."""

    backend: Backend
    table: FrameTable
    pool: Pool
    health: StoreHealth
    clock: Callable[[], float]  #: returns seconds

    def run(
        self,
        keys: Sequence[ChunkKey],
        use: Use,
        breaker: Breaker | None,
        work: Work,
        then: Callable[[Call], None],
        *,
        load: bool = False,
    ) -> None:
        """Run ``work`` on a thread, then ``then``. Its outcome counts for the breaker, if any.

        A ``load`` precedes all other calls that have not begun.
        """
        self.begin(keys, use, breaker)
        self.submit(keys, breaker, work, then, load=load)

    def begin(self, keys: Sequence[ChunkKey], use: Use, breaker: Breaker | None) -> None:
        """A call will name these keys: `submit`, `fail` or `give_up` follows."""
        self.table.begin(keys, use)
        if breaker:
            breaker.begin(self.clock())

    def submit(
        self,
        keys: Sequence[ChunkKey],
        breaker: Breaker | None,
        work: Work,
        then: Callable[[Call], None],
        *,
        load: bool = False,
    ) -> None:
        """Make a call after `begin`."""

        def timed() -> Call:
            begun = self.clock()
            value = work()
            ended = self.clock()
            return Call(value, None, ended, ended - begun)

        def returned(outcome: Outcome) -> None:
            call = outcome.value if outcome.error is None else Call(None, outcome.error, self.clock(), 0.0)
            self.table.end(keys)
            if breaker:
                self.health.record(breaker, keys, call.error)
            then(call)

        (self.pool.submit_load if load else self.pool.submit_store)(timed, returned)

    def fail(self, keys: Sequence[ChunkKey], breaker: Breaker, error: BaseException) -> None:
        """A call cannot be made after `begin`."""
        self.table.end(keys)
        self.health.record(breaker, keys, error)

    def give_up(self, keys: Sequence[ChunkKey], breaker: Breaker) -> None:
        """A call is not made after `begin`, for a reason other than the store."""
        self.table.end(keys)
        breaker.give_up()
