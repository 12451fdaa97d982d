"""Least frequently used; of equally frequent chunks the least recently used.

Buckets by count, after K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme" (2010). O(1) for each key requested, admitted or forgotten; `victims` first sorts the distinct counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey


@attrs.frozen
class LfuConfig(EvictionConfig):
    """Evicts the chunk that the fewest requests named since its admission."""

    type: ClassVar[str] = "lfu"

    def open(self) -> Lfu:
        return Lfu()


class Lfu(EvictionPolicy):
    """Held keys in buckets, one for each number of uses."""

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}
        self._buckets: dict[int, OrderedDict[ChunkKey, None]] = {}  # by count; the least recently used first

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        # Leaf before root, so that of equally frequent chunks a prefix outlives its continuations.
        for key in reversed(path):
            if key in self._counts:
                self._put(key, self._take(key) + 1)

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._put(key, 1)

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        self._take(key)

    def victims(self) -> Iterator[ChunkKey]:
        for count in sorted(self._buckets):
            yield from self._buckets[count]

    def _put(self, key: ChunkKey, count: int) -> None:
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None

    def _take(self, key: ChunkKey) -> int:
        count = self._counts.pop(key)
        bucket = self._buckets[count]
        del bucket[key]
        if not bucket:
            del self._buckets[count]
        return count
