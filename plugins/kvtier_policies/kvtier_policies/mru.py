"""Most recently used first: right for a loop over more than fits, wrong for almost everything else.

H.-T. Chou and D. J. DeWitt, "An evaluation of buffer management strategies for relational database systems"
(VLDB 1985). O(1) for each key requested, admitted or forgotten, and for each victim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig
from kvtier_core.types import ChunkKey
from kvtier_policies.fifo import Fifo


@attrs.frozen
class MruConfig(EvictionConfig):
    """Evicts the most recently used chunk first."""

    type: ClassVar[str] = "mru"

    def open(self) -> Mru:
        return Mru()


class Mru(Fifo):
    """The keys of a FIFO that requests move to its end, from which they leave."""

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        # Root before leaf: the leaf of a prompt is the first to go.
        for key in path:
            if key in self._order:
                self._order.move_to_end(key)

    def victims(self) -> Iterator[ChunkKey]:
        return reversed(self._order)

    def unspare(self, key: ChunkKey) -> None:
        del self._spared[key]
        self._order[key] = None
