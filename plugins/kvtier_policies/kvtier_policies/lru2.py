"""LRU-2: evicts first the chunks that were used only once, then the chunk whose second-to-last use is longest ago.

E. J. O'Neil, P. E. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk buffering" (SIGMOD
1993), for K = 2, with four ghosts for each held key. O(1) for each key forgotten, O(log n) for each key requested or
admitted, and for each victim.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey

#: Number of ghosts for each held key, and the least number of ghosts that are kept.
_GHOSTS = 4
_FEW = 64

#: Second-to-last and last use, as readings of a clock that counts uses; 0 is never. `_UNUSED` in the first place means
#: that no request has named the key since its admission, which is then in the second place.
_Uses = tuple[int, int]
_UNUSED = -1


@attrs.frozen
class Lru2Config(EvictionConfig):
    """Evicts by the second-to-last use."""

    type: ClassVar[str] = "lru2"

    def open(self) -> Lru2:
        return Lru2()


class Lru2(EvictionPolicy):
    """A heap of the last two uses of each held key, and the uses of ghosts."""

    def __init__(self) -> None:
        self._uses: dict[ChunkKey, _Uses] = {}  # of what is held
        self._ghosts: OrderedDict[ChunkKey, _Uses] = OrderedDict()  # the oldest first
        self._heap: list[tuple[_Uses, ChunkKey]] = []  # an entry that `_uses` contradicts is stale
        self._clock = 0

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in reversed(path):  # leaf before root, so that a prefix outlives its continuations
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
        """The heap in ascending order, without changing it: the next is the least whose parent was visited."""
        heap = self._heap
        front = [(heap[0], 0)] if heap else []
        named = None  # a key that came back from the ghosts is in the heap twice, with equal uses
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
