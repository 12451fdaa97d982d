"""S3-FIFO: a small queue that newcomers pass through, a main queue for chunks that were used again, and ghosts.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023), with
its constants: a tenth of the capacity for newcomers, counts up to three, two uses to be promoted, nine ghosts for ten
held keys. The heads of both queues are settled after each change, so that `victims` changes nothing.
O(1) for each key requested or admitted, amortised O(1) for each key forgotten, and for each victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey

_SMALL = 0.1  # of the capacity
_MOST = 3  # uses that are counted
_PROMOTED = 2  # uses of a newcomer


@attrs.frozen
class S3FifoConfig(EvictionConfig):
    """Evicts by S3-FIFO, as published."""

    type: ClassVar[str] = "s3fifo"

    def open(self) -> S3Fifo:
        return S3Fifo()


class S3Fifo(EvictionPolicy):
    """The queues S, M and G of the paper."""

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()  # uses since admission, capped; the first in first
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in path:
            queue = self._small if key in self._small else self._main
            if key in queue:
                queue[key] = min(queue[key] + 1, _MOST)
        self._settle()

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        if key in self._main:
            del self._main[key]
        else:
            del self._small[key]
            if evicted:
                self._ghosts[key] = None
        while len(self._ghosts) > (1 - _SMALL) * (len(self._small) + len(self._main)):
            self._ghosts.popitem(last=False)
        self._settle()

    def victims(self) -> Iterator[ChunkKey]:
        """Each on the assumption that the victims before it are evicted."""
        room = len(self._small) + len(self._main)
        surplus = len(self._small) - int(_SMALL * room)
        once = (key for key, uses in self._small.items() if uses < _PROMOTED)
        for key in once:
            if surplus <= 0:
                break
            surplus -= 1
            yield key
        else:
            key = None
        for turn in range(_MOST + 1):
            yield from (each for each, uses in self._main.items() if uses == turn)
        if key is not None:
            yield key
            yield from once
        yield from (each for each, uses in self._small.items() if uses >= _PROMOTED)

    def _settle(self) -> None:
        """Move a used newcomer at the head to the main queue, and a used head of the main queue to its end."""
        while self._small and (key := next(iter(self._small))) and self._small[key] >= _PROMOTED:
            del self._small[key]
            self._main[key] = 0
        while self._main and (key := next(iter(self._main))) and self._main[key]:
            self._main[key] -= 1
            self._main.move_to_end(key)
