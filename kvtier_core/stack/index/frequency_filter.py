"""How often keys were named lately, as far as a bounded memory goes."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_core.types import ChunkKey

#: Keys that are remembered, at least; twice as many at most.
_ENOUGH = 1 << 17
#: What is kept of a key. Two keys that begin alike are counted as one, which stores a chunk too soon at worst.
_PREFIX_NBYTES = 8


class FrequencyFilter:
    """Two generations: when the younger is full it becomes the older, and what was older is forgotten."""

    def __init__(self, enough: int = _ENOUGH):
        self._enough = enough
        self._younger: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def note(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            short = key[:_PREFIX_NBYTES]
            seen = self._younger.get(short) or self._older.get(short, 0)
            self._younger[short] = seen + 1
            if len(self._younger) >= self._enough:
                self._older, self._younger = self._younger, {}

    def of(self, key: ChunkKey) -> int:
        short = key[:_PREFIX_NBYTES]
        return self._younger.get(short) or self._older.get(short, 0)
