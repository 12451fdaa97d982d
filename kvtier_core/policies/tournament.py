"""A tournament: shadows of the whole cache, without bytes, try a policy each, and the best so far is followed.

The members are `lru` and `lru2`. The score of a shadow is the chunks it would have given back, halved every 500
requests; the leader changes when another is two hundredths better. What the leader does not hold goes first, then what
it would evict. To follow the best of several simulated caches is the idea of I. Ari et al., "ACME: adaptive caching
using multiple experts" (WDAS 2002). Costs what its members cost, and O(1) more for each key named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.policies.lru import LruConfig
from kvtier_core.policies.lru2 import Lru2Config
from kvtier_core.types import ChunkKey

_HALF_LIFE = 500  # requests
_BETTER = 1.02
_MEMBERS = (LruConfig(), Lru2Config())


@attrs.frozen
class TournamentConfig(EvictionConfig):
    type: ClassVar[str] = "tournament"
    aliases: ClassVar[tuple[str, ...]] = ("tour",)

    def open(self) -> Tournament:
        return Tournament([member.open() for member in _MEMBERS])


class _Shadow:
    """What a policy would hold had it always decided alone."""

    def __init__(self, policy: EvictionPolicy):
        self.policy = policy
        self.held: dict[ChunkKey, None] = {}
        self.surplus: OrderedDict[ChunkKey, None] = OrderedDict()  # what is really held, and not here
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

    def shrink(self, room: int, really: Mapping[ChunkKey, None]) -> None:
        while len(self.held) > room:
            victim = next(self.policy.victims())
            del self.held[victim]
            self.policy.forget(victim, evicted=True)
            if victim in really:
                self.surplus[victim] = None


class Tournament(EvictionPolicy):
    def __init__(self, members: Sequence[EvictionPolicy]) -> None:
        self._shadows = [_Shadow(policy) for policy in members]
        self._leader = self._shadows[0]
        self._held: dict[ChunkKey, None] = {}

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        path = list(dict.fromkeys(path))
        for shadow in self._shadows:
            shadow.request(path, now, hints)
            shadow.shrink(len(self._held), self._held)
        best = max(self._shadows, key=lambda shadow: shadow.score)
        if best.score > _BETTER * self._leader.score:
            self._leader = best

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._held[key] = None
        for shadow in self._shadows:
            if key not in shadow.held:
                shadow.surplus[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._held[key]
        for shadow in self._shadows:
            shadow.surplus.pop(key, None)
            if not evicted and key in shadow.held:
                del shadow.held[key]
                shadow.policy.forget(key, evicted=False)

    def victims(self) -> Iterator[ChunkKey]:
        yield from self._leader.surplus
        for key in self._leader.policy.victims():
            if key in self._held:
                yield key
