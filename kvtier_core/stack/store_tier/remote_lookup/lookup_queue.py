"""Keys to look up in a shared store: it may have them although the index of this tier does not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvtier_core.types import ChunkKey

#: Seconds for which a key that the store did not have is not asked for again.
_ABSENCE_HOLDS = 1.0

#: Seconds for which a frame that this tier cannot use is not asked for again.
_UNUSABLE_HOLDS = 600.0

#: Keys of one call: the first chunks of a long prompt are answered for before the last ones.
_BATCH = 128


class LookupQueue:
    """Collects keys between two polls, and remembers for a short time which ones the store did not have."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._noted: dict[ChunkKey, None] = {}
        self._asked: set[ChunkKey] = set()  # calls for them are under way
        self._absent = _Until(_ABSENCE_HOLDS)
        self._unusable = _Until(_UNUSABLE_HOLDS)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._asked or key in self._noted

    def note(self, key: ChunkKey) -> bool:
        """Ask for this key at the next poll. False if the store did not have it, or could not use it, just now."""
        if key in self:
            return True
        now = self._clock()
        if self._absent.has(key, now) or self._unusable.has(key, now):
            return False
        self._noted[key] = None
        return True

    def take(self) -> Iterator[list[ChunkKey]]:
        """The noted keys, in batches to ask for now."""
        keys = list(self._noted)
        self._noted.clear()
        self._asked.update(keys)
        for start in range(0, len(keys), _BATCH):
            yield keys[start : start + _BATCH]

    def answered(self, keys: Iterable[ChunkKey]) -> None:
        """The call that asked for these keys has returned, or was not made."""
        self._asked.difference_update(keys)

    def not_there(self, keys: Iterable[ChunkKey]) -> None:
        """The store did not have these keys just now: for a short time they are not asked for again."""
        self._absent.add(keys, self._clock())

    def unusable(self, keys: Iterable[ChunkKey]) -> None:
        """This tier cannot use these frames. They are asked for again much later: others may have replaced them."""
        self._unusable.add(keys, self._clock())


class _Until:
    """Keys that are remembered for so many ``seconds``, the first to be forgotten first."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._ends: OrderedDict[ChunkKey, float] = OrderedDict()

    def add(self, keys: Iterable[ChunkKey], now: float) -> None:
        """Remember these keys from now on. Each one that was added costs once more, when it is forgotten."""
        for key in keys:
            self._ends[key] = now + self._seconds
            self._ends.move_to_end(key)
        while self._ends and next(iter(self._ends.values())) <= now:
            self._ends.popitem(last=False)

    def has(self, key: ChunkKey, now: float) -> bool:
        """Is the key still remembered?"""
        return now < self._ends.get(key, now)
