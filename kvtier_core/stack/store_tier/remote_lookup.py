"""Asks a shared store, in the background, for keys that its tier's index lacks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier_core.stack.batches import as_many, leading_run
from kvtier_core.stack.load_choice import StoreSpeed
from kvtier_core.stack.store_tier.calls import Call, Calls
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.types import ChunkKey, EventKind

#: Seconds for which a key that the store lacked is not asked for again.
_ABSENCE_HOLDS = 1.0

#: Seconds for which a frame that this tier cannot use is not asked for again.
_UNUSABLE_HOLDS = 600.0

#: Number of keys of one call, so that the first chunks of a long prompt are answered before the last ones.
_BATCH = 128


class RemoteLookup:
    """The queries of one store tier to its store.

    It collects keys between two polls, and remembers for a short time which ones the store lacked.
    """

    def __init__(self, calls: Calls, *, speed: StoreSpeed):
        self._calls = calls
        self._table = calls.table
        self._health = calls.health
        self._backend = calls.backend
        self._speed = speed
        self._noted: dict[ChunkKey, None] = {}
        self._asked: set[ChunkKey] = set()  # in calls under way
        #: Keys that the store lacked: they are not asked for again for a short time.
        self.absent = _Until(_ABSENCE_HOLDS, calls.clock)
        #: Keys whose frames this tier cannot use: the same for a long time. Others may replace them.
        self.unusable = _Until(_UNUSABLE_HOLDS, calls.clock)
        self._ended: list[ChunkKey] = []
        self._found: list[ChunkKey] = []

    def __contains__(self, key: ChunkKey) -> bool:
        """Is the answer for this key outstanding?"""
        return key in self._asked or key in self._noted

    def may_have(self, key: ChunkKey) -> bool:
        """Can a shared store be asked for this key, and is it not known to lack it?"""
        return self._backend.shared and self._health.can_read and key not in self.absent and key not in self.unusable

    def request(self, path: Sequence[ChunkKey], start: int = 0) -> int:
        """Length of the run of keys from ``start`` on that a shared store may have and the index does not.

        The next `start` asks for those that are not being asked for already.
        """
        if not self._backend.shared or not self._health.can_read:
            return 0
        return len(leading_run(path[start:], lambda key: key not in self._table.index and self._note(key)))

    def _note(self, key: ChunkKey) -> bool:
        """Ask for this key at the next poll. False if the store recently lacked it, or had an unusable frame."""
        if key in self:
            return True
        if key in self.absent or key in self.unusable:
            return False
        self._noted[key] = None
        return True

    def take_answers(self) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """The keys that were answered since the last call, and those among them that the store has."""
        ended, found, self._ended, self._found = self._ended, self._found, [], []
        return ended, found

    def ask_again(self, keys: Iterable[ChunkKey]) -> bool:
        """Forget that the store lacked these keys. False if it cannot be asked now."""
        self.absent.forget(keys)
        return self._backend.shared and self._health.can_read

    def start(self, then: Callable[[Sequence[ChunkKey]], None]) -> None:
        """Ask for the requested keys. ``then(found)`` is called with the keys of each call that the store has."""
        noted = list(self._noted)
        self._noted.clear()
        self._asked.update(noted)
        for at in range(0, len(noted), _BATCH):
            keys = noted[at : at + _BATCH]
            new = [key for key in keys if key not in self._table.in_use and key not in self._table.index]
            self._end(set(keys).difference(new))
            if new:
                self._ask(new, then)

    def _ask(self, keys: Sequence[ChunkKey], then: Callable[[Sequence[ChunkKey]], None]) -> None:
        if not self._health.can_read:
            return self._end(keys)
        reads, begun = self._health.reads, self._calls.clock()
        reads.begin(begun)
        self._speed.asked(begun)

        def answered(call: Call) -> None:
            self._speed.answered(begun, call.ended, ok=call.error is None)
            there = [key for key, answer in zip(keys, call.value or (), strict=call.error is None) if answer]
            self._health.record(reads, [], call.error)  # no event names a key of a chunk that may never be stored
            if call.error is None:
                self._health.report(EventKind.ASKED, there, seconds=call.seconds)
            self._end(keys)
            self.absent.add(set(keys).difference(there))
            found = self._table.index.resident.missing(there)
            self._found += found
            then(found)

        self._calls.run(
            keys, Use.READING, None, lambda: as_many(self._backend.contains(keys), keys), answered, load=True
        )

    def _end(self, keys: Collection[ChunkKey]) -> None:
        self._asked.difference_update(keys)
        self._ended += keys


class _Until:
    """Keys that are remembered for ``seconds``, in the order in which they expire."""

    def __init__(self, seconds: float, clock: Callable[[], float]):
        self._seconds = seconds
        self._clock = clock
        self._ends: OrderedDict[ChunkKey, float] = OrderedDict()

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Remember these keys from now on, and forget expired ones."""
        now = self._clock()
        for key in keys:
            self._ends[key] = now + self._seconds
            self._ends.move_to_end(key)
        while self._ends and next(iter(self._ends.values())) <= now:
            self._ends.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget these keys."""
        for key in keys:
            self._ends.pop(key, None)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._ends and self._clock() < self._ends[key]
