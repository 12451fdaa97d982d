"""Asks a shared store, in the background, for keys that the index of its tier does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many, leading_run
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.asking.lookup_queue import LookupQueue
from kvtier_core.stack.store_tier.asking.speed import StoreSpeed
from kvtier_core.stack.store_tier.health import StoreHealth
from kvtier_core.stack.store_tier.keys_in_use import KeysInUse, Use
from kvtier_core.transfer.io_pool import Outcome, Pool
from kvtier_core.types import ChunkKey


class Lookups:
    """The questions of one store tier to its store. Call every method on the owner's thread."""

    def __init__(
        self,
        backend: Backend,
        index: CacheIndex,
        *,
        pool: Pool,
        health: StoreHealth,
        in_use: KeysInUse,
        speed: StoreSpeed,
        clock: Callable[[], float],
    ):
        self.queue = LookupQueue(clock)
        self._backend = backend
        self._index = index
        self._pool = pool
        self._health = health
        self._in_use = in_use
        self._speed = speed
        self._clock = clock
        self._found: list[ChunkKey] = []

    def request(self, path: Sequence[ChunkKey], start: int) -> int:
        """How many keys from ``start`` on the store may have. `start` asks for those that are not asked for already."""
        if not self._backend.shared or not self._health.can_read:
            return 0
        return len(leading_run(path[start:], lambda key: key not in self._index and self.queue.note(key)))

    def take_found(self) -> list[ChunkKey]:
        """The keys that the store was asked for since the last call, and has."""
        found, self._found = self._found, []
        return found

    def start(self, then: Callable[[Sequence[ChunkKey]], None]) -> None:
        """Ask for what was requested. ``then(found)`` is called with the keys of each call that the store has."""
        for keys in self.queue.take():
            new = [key for key in keys if key not in self._in_use and key not in self._index]
            self.queue.answered(set(keys).difference(new))
            if new:
                self._ask(new, then)

    def _ask(self, keys: Sequence[ChunkKey], then: Callable[[Sequence[ChunkKey]], None]) -> None:
        if not self._health.can_read:
            return self.queue.answered(keys)
        self._in_use.begin(keys, Use.READING)
        self._health.begin(self._health.reads)

        def ask() -> tuple[Sequence[bool], float]:
            begun = self._clock()
            return as_many(self._backend.contains(keys), keys), self._clock() - begun

        def answered(outcome: Outcome) -> None:
            found = self._answered(keys, outcome)
            self._found += found
            then(found)

        self._pool.submit_load(ask, answered)

    def _answered(self, keys: Sequence[ChunkKey], outcome: Outcome) -> list[ChunkKey]:
        for key in keys:
            del self._in_use[key]
        self.queue.answered(keys)
        self._health.record_outcome(self._health.reads, keys, outcome)
        answers, seconds = outcome.value or ([False] * len(keys), 0.0)
        self._speed.answered(seconds)
        there = [key for key, answer in zip(keys, answers, strict=True) if answer]
        self.queue.not_there(set(keys).difference(there))
        return self._index.held.missing(there)
