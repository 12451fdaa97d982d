"""A tournament: simulated caches of keys alone, each with its own policy; it follows the best so far.

The members are `lru` and `lru2`. The score of a simulated cache is the number of hits it would have had, halved every
500 requests; the leader changes when another is 2 % better. Chunks that the leader's cache does not hold are evicted
first, then the leader's victims. Following the best of several simulated caches is the idea of I. Ari et al., "ACME:
adaptive caching using multiple experts" (WDAS 2002). Costs the sum of its members' costs, and O(1) more for each key
requested.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import ChunkKey
from kvtier_policies.lru2 import Lru2Config

_HALF_LIFE = 500  # requests
_BETTER = 1.02
_MEMBERS = (LruConfig(), Lru2Config())


@attrs.frozen
class TournamentConfig(EvictionConfig):
    """Evicts as the better of LRU and LRU-2 would."""

    type: ClassVar[str] = "tournament"
    aliases: ClassVar[tuple[str, ...]] = ("tour",)

    def open(self) -> Tournament:
        return Tournament([member.open() for member in _MEMBERS])


class _SimulatedCache:
    """The contents of a cache of the same size if this policy had always decided."""

    def __init__(self, policy: EvictionPolicy):
        self.policy = policy
        self.held: dict[ChunkKey, None] = {}
        self.surplus: OrderedDict[ChunkKey, None] = OrderedDict()  # what the tier holds and this cache does not
        self.score = 0.0

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        run = next((i for i, key in enumerate(path) if key not in self.held), len(path))
        self.score = self.score * 0.5 ** (1 / _HALF_LIFE) + run
        for key in reversed(path):
            if key not in self.held:
                self.held[key] = None
                self.surplus.pop(key, None)
                self.policy.admit(key, 0)
        self.policy.request(path, now, hints)

    def shrink(self, capacity: int, in_tier: Mapping[ChunkKey, None]) -> None:
        while len(self.held) > capacity:
            victim = next(self.policy.victims())
            del self.held[victim]
            self.policy.forget(victim, evicted=True)
            if victim in in_tier:
                self.surplus[victim] = None


class Tournament(EvictionPolicy):
    """Follows the member whose simulated cache has the best score."""

    def __init__(self, members: Sequence[EvictionPolicy]) -> None:
        self._caches = [_SimulatedCache(policy) for policy in members]
        self._leader = self._caches[0]
        self._held: dict[ChunkKey, None] = {}

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        path = list(dict.fromkeys(path))
        for cache in self._caches:
            cache.request(path, now, hints)
            cache.shrink(len(self._held), self._held)
        best = max(self._caches, key=lambda cache: cache.score)
        if best.score > _BETTER * self._leader.score:
            self._leader = best

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._held[key] = None
        for cache in self._caches:
            if key not in cache.held:
                cache.surplus[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._held[key]
        for cache in self._caches:
            cache.surplus.pop(key, None)
            if not evicted and key in cache.held:
                del cache.held[key]
                cache.policy.forget(key, evicted=False)

    def victims(self) -> Iterator[ChunkKey]:
        yield from self._leader.surplus
        for key in self._leader.policy.victims():
            if key in self._held:
                yield key
