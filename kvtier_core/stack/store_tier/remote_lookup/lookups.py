"""Asks a shared store, in the background, for keys that the index of its tier does not know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtier_core.stack.batches import as_many, leading_run
from kvtier_core.stack.store_tier.calls import StoreCalls, StoreParts, Timed
from kvtier_core.stack.store_tier.keys_in_use import Use
from kvtier_core.stack.store_tier.remote_lookup.lookup_queue import LookupQueue
from kvtier_core.stack.store_tier.remote_lookup.speed import StoreSpeed
from kvtier_core.transfer.io_pool import Outcome
from kvtier_core.types import ChunkKey, EventKind


class Lookups(StoreCalls):
    """The questions of one store tier to its store."""

    def __init__(self, parts: StoreParts, *, speed: StoreSpeed):
        super().__init__(parts)
        self.queue = LookupQueue(parts.clock)
        self._speed = speed
        self._ended: list[ChunkKey] = []
        self._found: list[ChunkKey] = []

    def request(self, path: Sequence[ChunkKey], start: int) -> int:
        """How many keys from ``start`` on the store may have. `start` asks for those that are not asked for already."""
        if not self._backend.shared or not self._health.can_read:
            return 0
        return len(leading_run(path[start:], lambda key: key not in self._index and self.queue.note(key)))

    def take_answers(self) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """The keys since the last call whose questions have ended; and those among them that the store has."""
        ended, found, self._ended, self._found = self._ended, self._found, [], []
        return ended, found

    def start(self, then: Callable[[Sequence[ChunkKey]], None]) -> None:
        """Ask for what was requested. ``then(found)`` is called with the keys of each call that the store has."""
        for keys in self.queue.take():
            new = [key for key in keys if key not in self._in_use and key not in self._index]
            self._end(set(keys).difference(new))
            if new:
                self._ask(new, then)

    def _ask(self, keys: Sequence[ChunkKey], then: Callable[[Sequence[ChunkKey]], None]) -> None:
        if not self._health.can_read:
            return self._end(keys)
        self._in_use.begin(keys, Use.READING)
        self._health.begin(self._health.reads)
        begun = self._clock()
        self._speed.asked(begun)

        def answered(outcome: Outcome) -> None:
            call = outcome.value or Timed([False] * len(keys), self._clock(), begun)
            self._speed.answered(begun, call.ended, ok=outcome.error is None)
            if outcome.error is None:
                self._health.report(EventKind.ASKED, keys, seconds=call.seconds)
            found = self._answered(keys, call.value, outcome)
            self._found += found
            then(found)

        self._pool.submit_load(self._timed(lambda: as_many(self._backend.contains(keys), keys)), answered)

    def _end(self, keys: Collection[ChunkKey]) -> None:
        self.queue.answered(keys)
        self._ended += keys

    def _answered(self, keys: Sequence[ChunkKey], answers: Sequence[bool], outcome: Outcome) -> list[ChunkKey]:
        """The keys that the store has, and the index does not know."""
        for key in keys:
            del self._in_use[key]
        self._end(keys)
        self._health.record_outcome(self._health.reads, keys, outcome)
        there = [key for key, answer in zip(keys, answers, strict=True) if answer]
        self.queue.not_there(set(keys).difference(there))
        return self._index.held.missing(there)
