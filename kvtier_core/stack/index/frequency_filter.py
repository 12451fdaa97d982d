"""Counts how often requests named each key recently, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_core.types import ChunkKey

#: Keys that are remembered: at least this many, at most twice as many.
_ENOUGH = 1 << 17
#: Bytes of each key that are kept. Two keys with the same prefix count as one: at worst a chunk is stored too early.
_PREFIX_NBYTES = 8


class FrequencyFilter:
    """Two generations of counts: when the younger is full it replaces the older one, which is dropped."""

    def __init__(self, enough: int = _ENOUGH):
        self._enough = enough
        self._younger: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """A request names these keys."""
        for key in keys:
            short = key[:_PREFIX_NBYTES]
            seen = self._younger.get(short) or self._older.get(short, 0)
            self._younger[short] = seen + 1
            if len(self._younger) >= self._enough:
                self._older, self._younger = self._younger, {}

    def of(self, key: ChunkKey) -> int:
        """How many requests named this key, as far as the two generations remember."""
        short = key[:_PREFIX_NBYTES]
        return self._younger.get(short) or self._older.get(short, 0)
