"""First in, first out: what was admitted first goes first, however often it was used since.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966).
O(1) for each key admitted or forgotten, and for each victim; a request costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey


@attrs.frozen
class FifoConfig(EvictionConfig):
    type: ClassVar[str] = "fifo"

    def open(self) -> Fifo:
        return Fifo()


class Fifo(EvictionPolicy):
    def __init__(self) -> None:
        # A plain dict finds its first key behind all that were deleted before it, step by step.
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        pass

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._order[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._order)
