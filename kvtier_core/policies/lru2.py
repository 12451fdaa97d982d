"""Least recently used but one: the first to go had one use only, or its last use but one longest ago.

E. J. O'Neil, P. E. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk buffering" (SIGMOD
1993), for K = 2, with four ghosts for each key that is held. O(1) for each key forgotten, O(log n) for each one named,
admitted, or told as a victim.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey

#: Ghosts for each key that is held, and how many at least.
_GHOSTS = 4
_FEW = 64

#: The last but one and the last, as numbers of a clock that counts uses; 0 is never. After `_UNUSED` comes when it was
#: admitted, and no request has named it yet.
_Uses = tuple[int, int]
_UNUSED = -1


@attrs.frozen
class Lru2Config(EvictionConfig):
    type: ClassVar[str] = "lru2"

    def open(self) -> Lru2:
        return Lru2()


class Lru2(EvictionPolicy):
    def __init__(self) -> None:
        self._uses: dict[ChunkKey, _Uses] = {}  # of what is held
        self._ghosts: OrderedDict[ChunkKey, _Uses] = OrderedDict()  # the oldest first
        self._heap: list[tuple[_Uses, ChunkKey]] = []  # of what is held; an entry of other uses is out of date
        self._clock = 0

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in reversed(path):  # leaf before root: a prefix that others may share outlives what hangs on it
            self._clock += 1
            first, last = self._uses.get(key) or self._ghosts.pop(key, (0, 0))
            uses = (0 if first == _UNUSED else last, self._clock)
            if key in self._uses:
                self._put(key, uses)
            else:
                self._ghosts[key] = uses
        self._bound()

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._clock += 1
        self._put(key, self._ghosts.pop(key, (_UNUSED, self._clock)))

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        uses = self._uses.pop(key)
        if evicted:
            self._ghosts[key] = uses
        self._bound()

    def victims(self) -> Iterator[ChunkKey]:
        """The heap in order, and as it was: the next one is the least of those whose parent in it was named."""
        heap = self._heap
        front = [(heap[0], 0)] if heap else []
        named = None  # who came back from the ghosts is in the heap twice, side by side
        while front:
            (uses, key), i = heapq.heappop(front)
            if self._uses.get(key) == uses and key != named:
                named = key
                yield key
            for child in (2 * i + 1, 2 * i + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child], child))

    def _put(self, key: ChunkKey, uses: _Uses) -> None:
        self._uses[key] = uses
        heapq.heappush(self._heap, (uses, key))

    def _bound(self) -> None:
        while len(self._ghosts) > max(_FEW, _GHOSTS * len(self._uses)):
            self._ghosts.popitem(last=False)
        while self._heap and self._uses.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._uses) + _FEW:
            self._heap = [(uses, key) for key, uses in self._uses.items()]
            heapq.heapify(self._heap)
