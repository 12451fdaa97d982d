"""Opens the store tiers that a stack started without, once they can be opened."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable

from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import Outcome, Pool

#: Seconds between two attempts.
_EVERY = 60.0

#: Opens a tier, and waits for its store. Raises ConfigError.
Open = Callable[[], StoreTier]


class LaterTiers:
    """Tries the tiers in turn, on a thread. Every method is called on the owner's."""

    def __init__(self, tiers: Iterable[Open], pool: Pool, clock: Callable[[], float]):
        self.namespace: Namespace | None = None  #: replaces the one with which they are opened
        self._left = deque(tiers)
        self._pool = pool
        self._clock = clock
        self._next = clock() + _EVERY
        self._opened: list[StoreTier] = []

    def step(self) -> StoreTier | None:
        """A tier that is open now, if there is one; the caller closes it."""
        self._pool.step()
        now = self._clock()
        if self._left and not self._pool.jobs and now >= self._next:
            self._next = now + _EVERY
            tier = self._left.popleft()
            self._pool.submit_store(tier, functools.partial(self._tried, tier))
        if not self._opened:
            return None
        opened = self._opened.pop()
        if self.namespace is not None:
            opened.invalidate_all(self.namespace)
        return opened

    def close(self, timeout: float) -> None:
        """Try no more. Waits no longer than ``timeout`` seconds for the store that is being opened."""
        self._left.clear()
        self._pool.close(timeout)
        while tier := self.step():
            tier.close(timeout)

    def _tried(self, tier: Open, outcome: Outcome) -> None:
        if outcome.error is None:
            self._opened.append(outcome.value)
        else:
            self._left.append(tier)
