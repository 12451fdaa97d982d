"""First in, first out: the chunk that was admitted first is evicted first, however often it was used since.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966).
O(1) for each key admitted or forgotten, and for each victim; a request costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy, SupportsSparing
from kvtier_core.types import ChunkKey


@attrs.frozen
class FifoConfig(EvictionConfig):
    """Evicts the chunk that was admitted first."""

    type: ClassVar[str] = "fifo"

    def open(self) -> Fifo:
        return Fifo()


class Fifo(EvictionPolicy, SupportsSparing):
    """Held keys in the order of their admission."""

    def __init__(self) -> None:
        # Not a plain dict: that finds its first key by stepping over all that were deleted before it.
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()
        self._spared: dict[ChunkKey, None] = {}

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        pass

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._order[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del (self._spared if key in self._spared else self._order)[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._order)

    def spare(self, key: ChunkKey) -> None:
        del self._order[key]
        self._spared[key] = None

    def unspare(self, key: ChunkKey) -> None:
        del self._spared[key]
        self._order[key] = None
        self._order.move_to_end(key, last=False)
