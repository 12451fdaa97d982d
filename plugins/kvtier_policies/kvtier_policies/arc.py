"""Adaptive replacement cache: ghosts adapt how chunks used once and chunks used more often share the capacity.

N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). There are as many ghosts
as held keys. A tier asks for victims before it admits, so the capacity that the two lists share is what is held.
O(1) for each key requested, admitted or forgotten, and for each victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey


@attrs.frozen
class ArcConfig(EvictionConfig):
    """Evicts by ARC, as published."""

    type: ClassVar[str] = "arc"

    def open(self) -> Arc:
        return Arc()


class Arc(EvictionPolicy):
    """The four lists of ARC: T1, T2, B1 and B2 of the paper, in this order."""

    def __init__(self) -> None:
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()  # the least recently used first, as in all four
        self._often: OrderedDict[ChunkKey, None] = OrderedDict()
        self._once_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._often_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._target = 0.0  # how many keys ``_once`` should hold: p of the paper

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in reversed(path):  # leaf before root, so that a prefix outlives its continuations
            if key in self._once:
                del self._once[key]
                self._often[key] = None
            elif key in self._often:
                self._often.move_to_end(key)

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        if key in self._once_ghosts:
            self._target += max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            del self._once_ghosts[key]
            self._often[key] = None
        elif key in self._often_ghosts:
            self._target -= max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            del self._often_ghosts[key]
            self._often[key] = None
        else:
            self._once[key] = None
        self._target = min(max(self._target, 0.0), float(self._held_count))

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        held, ghosts = (self._once, self._once_ghosts) if key in self._once else (self._often, self._often_ghosts)
        del held[key]
        if evicted:
            ghosts[key] = None
        while len(self._once) + len(self._once_ghosts) > self._held_count + 1 and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._often_ghosts) > self._held_count + 1:
            (self._often_ghosts or self._once_ghosts).popitem(last=False)

    def victims(self) -> Iterator[ChunkKey]:
        """The oldest of the list that exceeds its share, each as if the victims before it were evicted."""
        once, often = iter(self._once), iter(self._often)
        left = len(self._once)
        while left > self._target and left:
            yield next(once)
            left -= 1
        yield from often
        yield from once

    @property
    def _held_count(self) -> int:
        return len(self._once) + len(self._often)
