"""Opens the store tiers that a stack started without, once they can be opened."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kvtier_core.config.model import StoreTierConfig
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import Outcome, Pool

#: Seconds between two attempts.
_EVERY = 60.0

#: Opens a tier, and waits for its store. Raises ConfigError.
Open = Callable[[], StoreTier]


def bound(stack: StorageManager, written: Mapping[str, StoreTierConfig]) -> None:
    """Keep the store tiers of a stack within the bounds that are written for them now, by name; also later ones."""
    for tier in stack.tiers:
        _bound(tier, written[tier.name])
    if isinstance(stack.later, LaterTiers):
        stack.later.written = written


def _bound(tier: StoreTier, written: StoreTierConfig) -> None:
    capacity = written.capacity if written.resizable else None
    tier.adjust(capacity or tier.capacity, written.inflight)


class LaterTiers:
    """Tries the tiers in turn, on a thread. Every method is called on the owner's."""

    def __init__(self, tiers: Iterable[Open], pool: Pool, clock: Callable[[], float]):
        self.namespace: Namespace | None = None  #: replaces the one with which they are opened
        self.written: Mapping[str, StoreTierConfig] = {}  #: tiers, by name, whose bounds have changed since
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
        if opened.name in self.written:
            _bound(opened, self.written[opened.name])
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
