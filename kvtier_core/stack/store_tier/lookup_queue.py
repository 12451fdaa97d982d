"""Keys to look up in a shared store: it may have them although the index of this tier does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtier_core.types import ChunkKey

#: Seconds for which a key that the store did not have is not asked for again.
_ABSENCE_HOLDS = 1.0

#: Seconds for which a frame that this tier cannot read is not asked for again.
_INCOMPATIBLE_HOLDS = 600.0


class LookupQueue:
    """Collects keys between two polls, and remembers for a short time which ones the store did not have."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._open: dict[ChunkKey, None] = {}
        self._absent: dict[ChunkKey, float] = {}  # until when the key is not asked for again

    def note(self, key: ChunkKey) -> bool:
        """Ask for this key at the next poll. Returns False if the store did not have it a moment ago."""
        if self._clock() < self._absent.get(key, float("-inf")):
            return False
        self._open[key] = None
        return True

    def take(self) -> list[ChunkKey]:
        """Empty the queue and return the keys to ask for now."""
        keys = list(self._open)
        self._open.clear()
        return keys

    def not_there(self, keys: Iterable[ChunkKey], seconds: float = _ABSENCE_HOLDS) -> None:
        """The store did not have these keys just now: they are not asked for again for so many ``seconds``."""
        now = self._clock()
        self._absent = {key: until for key, until in self._absent.items() if now < until}
        self._absent.update(dict.fromkeys(keys, now + seconds))

    def cannot_read(self, keys: Iterable[ChunkKey]) -> None:
        """The store has these frames in another codec. They are asked for again later: others may replace them."""
        self.not_there(keys, _INCOMPATIBLE_HOLDS)
