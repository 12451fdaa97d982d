"""What a shared store may have although the index does not say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtier_core.types import ChunkKey

#: How long the answer "not there" is believed, in seconds.
_ABSENCE_HOLDS = 1.0


class LookupQueue:
    """Keys that are to be asked for, and those that were not there a moment ago."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._open: dict[ChunkKey, None] = {}
        self._absent: dict[ChunkKey, float] = {}

    def note(self, key: ChunkKey) -> bool:
        """Ask for this key, soon; False if the answer is known."""
        if self._clock() - self._absent.get(key, float("-inf")) < _ABSENCE_HOLDS:
            return False
        self._open[key] = None
        return True

    def take(self) -> list[ChunkKey]:
        """All that are to be asked for now."""
        keys = list(self._open)
        self._open.clear()
        return keys

    def not_there(self, keys: Iterable[ChunkKey]) -> None:
        now = self._clock()
        self._absent = {key: since for key, since in self._absent.items() if now - since < _ABSENCE_HOLDS}
        self._absent.update(dict.fromkeys(keys, now))
