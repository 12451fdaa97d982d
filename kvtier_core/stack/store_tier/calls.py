"""What all kinds of calls of a tier to its store have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from kvtier_core.interfaces import Backend
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.health import StoreHealth
from kvtier_core.stack.store_tier.keys_in_use import KeysInUse
from kvtier_core.stack.store_tier.space import Space
from kvtier_core.transfer.io_pool import Pool, Work


@attrs.frozen
class StoreParts:
    """A store, and what its tier knows of it. ``clock`` returns seconds."""

    backend: Backend
    index: CacheIndex
    pool: Pool
    health: StoreHealth
    space: Space
    in_use: KeysInUse
    clock: Callable[[], float]


class Timed(NamedTuple):
    """What a call to a store returned, and when, by the tier's clock."""

    value: Any
    ended: float
    begun: float

    @property
    def seconds(self) -> float:
        """How long it took, once it was on a thread."""
        return self.ended - self.begun


class StoreCalls:
    """The base of each kind of calls. Call every method on the owner's thread."""

    def __init__(self, parts: StoreParts):
        self._backend = parts.backend
        self._index = parts.index
        self._pool = parts.pool
        self._health = parts.health
        self._space = parts.space
        self._in_use = parts.in_use
        self._clock = parts.clock

    def _timed(self, work: Work) -> Callable[[], Timed]:
        """The same work, on a thread, with the time that it took."""

        def timed() -> Timed:
            begun = self._clock()
            value = work()
            return Timed(value, self._clock(), begun)

        return timed
