"""Least recently used.

The rule is folklore of the 1960s; P. J. Denning, "The working set model for program behavior" (CACM 11(5), 1968)
says why it works. O(1) for each key named, admitted or forgotten, and for each victim. csrc/policies/lru.cpp answers
alike, sooner and in less room; this is what it is tested against.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.policies.native_counterpart import native_counterpart
from kvtier_core.types import ChunkKey


@attrs.frozen
class LruConfig(EvictionConfig):
    type: ClassVar[str] = "lru"

    def open(self) -> EvictionPolicy:
        return Implementation()


class Lru(EvictionPolicy):
    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()  # the least recently used first

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        # Leaf before root: a prefix that others may share outlives what hangs on it.
        for key in reversed(path):
            if key in self._order:
                self._order.move_to_end(key)

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._order[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._order)


Implementation = native_counterpart(Lru)
