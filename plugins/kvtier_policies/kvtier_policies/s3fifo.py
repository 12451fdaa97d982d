"""S3-FIFO: a small queue that newcomers pass through, a main queue for chunks that were used again, and ghosts.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023), with
its constants: a tenth of the capacity for newcomers, counts up to three, two uses to be promoted, nine ghosts for ten
held keys. The heads of both queues are settled after each change, so that `victims` changes nothing. What the tier
keeps for its children is in neither queue: the hand of the main queue would stop at it, and count down nothing after
it. O(1) for each key requested or admitted, amortised O(1) for each key forgotten, and for each victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy, SupportsSparing
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


class S3Fifo(EvictionPolicy, SupportsSparing):
    """The queues S, M and G of the paper, and what was taken out of S and M for the sake of children."""

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()  # uses since admission, capped; the first in first
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._spared_small: dict[ChunkKey, int] = {}
        self._spared_main: dict[ChunkKey, int] = {}
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in path:
            if (queue := self._queue_of(key)) is not None:
                queue[key] = min(queue[key] + 1, _MOST)
            if self._spared_small.get(key, 0) >= _PROMOTED:
                self._spared_main[key] = self._spared_small.pop(key)
        self._settle()

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        if evicted and (key in self._small or key in self._spared_small):
            self._ghosts[key] = None
        queue = self._queue_of(key)
        del (self._small if queue is None else queue)[key]
        while len(self._ghosts) > (1 - _SMALL) * self._held:
            self._ghosts.popitem(last=False)
        self._settle()

    def victims(self) -> Iterator[ChunkKey]:
        """Each on the assumption that the victims before it are evicted."""
        surplus = len(self._small) + len(self._spared_small) - int(_SMALL * self._held)
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

    def spare(self, key: ChunkKey) -> None:
        if key in self._small:
            self._spared_small[key] = self._small.pop(key)
        else:
            self._spared_main[key] = self._main.pop(key)
        self._settle()

    def unspare(self, key: ChunkKey) -> None:
        """A request for its children was one for it, too: those uses did not keep them, and are not counted again."""
        spared, queue = (
            (self._spared_small, self._small) if key in self._spared_small else (self._spared_main, self._main)
        )
        del spared[key]
        queue[key] = 0
        queue.move_to_end(key, last=False)

    @property
    def _held(self) -> int:
        return len(self._small) + len(self._main) + len(self._spared_small) + len(self._spared_main)

    def _queue_of(self, key: ChunkKey) -> dict[ChunkKey, int] | None:
        for queue in (self._main, self._spared_main, self._small, self._spared_small):
            if key in queue:
                return queue
        return None

    def _settle(self) -> None:
        """Move a used newcomer at the head to the main queue, and a used head of the main queue to its end."""
        while self._small and (key := next(iter(self._small))) and self._small[key] >= _PROMOTED:
            del self._small[key]
            self._main[key] = 0
        while self._main and (key := next(iter(self._main))) and self._main[key]:
            self._main[key] -= 1
            self._main.move_to_end(key)
