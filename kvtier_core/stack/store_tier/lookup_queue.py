"""Keys to look up in a shared store: it may have them although the index of this tier does not."""

from __future__ import annotations

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
        self._absent: dict[ChunkKey, float] = {}  # until when the key is not asked for again

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._asked or key in self._noted

    def note(self, key: ChunkKey) -> bool:
        """Ask for this key at the next poll. False if the store did not have it, or could not use it, just now."""
        if key in self:
            return True
        if self._clock() < self._absent.get(key, float("-inf")):
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

    def not_there(self, keys: Iterable[ChunkKey], seconds: float = _ABSENCE_HOLDS) -> None:
        """The store did not have these keys just now: they are not asked for again for so many ``seconds``."""
        now = self._clock()
        self._absent = {key: until for key, until in self._absent.items() if now < until}
        self._absent.update(dict.fromkeys(keys, now + seconds))

    def unusable(self, keys: Iterable[ChunkKey]) -> None:
        """This tier cannot use these frames. They are asked for again much later: others may have replaced them."""
        self.not_there(keys, _UNUSABLE_HOLDS)
