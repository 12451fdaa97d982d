"""Least recently used.

The rule dates from the 1960s; P. J. Denning, "The working set model for program behavior" (CACM 11(5), 1968)
explains it. O(1) for each key requested, admitted or forgotten, and for each victim. csrc/policies/lru.cpp gives
the same answers faster and in less memory; it is tested against this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.native import choose
from kvtier_core.types import ChunkKey


@attrs.frozen
class LruConfig(EvictionConfig):
    """Evicts the least recently used chunk first."""

    type: ClassVar[str] = "lru"

    def open(self) -> EvictionPolicy:
        """The policy in C++ if that was compiled; for `isinstance` it is an `EvictionPolicy`, too."""
        return EvictionPolicy.register(choose("Lru", Lru))()


class Lru(EvictionPolicy):
    """Held keys in the order of their last use."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()  # the least recently used first

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        # Leaf before root, so that a prefix, which others may share, outlives its continuations.
        for key in reversed(path):
            if key in self._order:
                self._order.move_to_end(key)

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._order[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._order)
