"""Whom a level holds, and in which order they may leave."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.index.frequency_filter import FrequencyFilter
from kvtier_core.stack.index.prefix_tree import PrefixTree
from kvtier_core.types import ChunkKey


class CacheIndex:
    """The held keys of one level, and a policy.

    The policy has an opinion about order; this class keeps it honest: a chunk whose child is still held
    is passed over when the policy is ``leaf_first``, because without its parent a child is unreachable.
    """

    def __init__(self, policy: EvictionPolicy, store_after: int = 1):
        self.held = PrefixTree()  #: who, with sizes, places and parents; to be read, changes are made here
        self._policy = policy
        self._store_after = store_after
        self._sightings = FrequencyFilter() if store_after > 1 else None

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.held

    def __len__(self) -> int:
        return len(self.held)

    @property
    def used(self) -> int:
        """Bytes of all that is held."""
        return self.held.used

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """One prompt's chunks, root first, held or not."""
        if self._sightings:
            self._sightings.note(path)
        self.held.adopt(path)
        self._policy.request(path, now, hints)

    def meets_frequency(self, path: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """Those, root first, that were named by as many requests as a newcomer needs."""
        if self._sightings is None:
            return path
        return leading_run(path, lambda key: self._sightings.of(key) >= self._store_after)

    def admit(
        self,
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
        nbytes: int,
        places: Sequence[int] | None = None,
    ) -> None:
        """Take in keys of a path, root first, of ``nbytes`` each. Each may have a number noted, its place."""
        self.held.add(keys, parents, nbytes, [0] * len(keys) if places is None else places)
        for key in reversed(keys):  # leaves come before their root
            self._policy.admit(key, nbytes)

    def resize(self, key: ChunkKey, nbytes: int) -> None:
        self.held.resize(key, nbytes)

    def leave(self, keys: Sequence[ChunkKey]) -> None:
        """Whom these hang on need not wait until they are removed. Should they stay, the next request tells again."""
        self.held.detach(keys)

    def remove(self, keys: Sequence[ChunkKey], *, evicted: bool = False) -> list[int]:
        """Their places."""
        places = self.held.remove(keys)
        for key in keys:
            self._policy.forget(key, evicted=evicted)
        return places

    def select_victims(
        self,
        amount: int,
        weigh: Callable[[ChunkKey], int],
        spared: Sequence[Container[ChunkKey]] = (),
        pinned: Container[int] = (),
    ) -> list[ChunkKey]:
        """The best victims, in order, until they weigh ``amount``; less when there are no more. Removes none.

        None that one of the ``spared`` holds, or whose place is ``pinned``.
        """
        chosen: list[ChunkKey] = []
        eviction_candidates = self._eviction_candidates(spared, pinned)
        while amount > 0 and (key := next(eviction_candidates, None)) is not None:
            chosen.append(key)
            amount -= weigh(key)
        return chosen

    def plan_admission(
        self,
        newcomers: Sequence[ChunkKey],
        nbytes: int,
        room: int,
        weigh: Callable[[ChunkKey], int],
        spared: Sequence[Container[ChunkKey]] = (),
        pinned: Container[int] = (),
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Who of a path, root first, may come in at ``nbytes`` each, and who leaves for them. Changes nothing.

        A newcomer that the policy does not prefer to its victims is refused, and so are those that hang on it.
        """
        free = min(len(newcomers), max(room, 0) // nbytes)
        welcome, victims = list(newcomers[:free]), []
        room -= free * nbytes
        eviction_candidates = self._eviction_candidates(spared, pinned)
        for newcomer in newcomers[free:]:
            price: list[ChunkKey] = []
            while room < nbytes:
                victim = next(eviction_candidates, None)
                if victim is None or not self._policy.prefers(newcomer, victim):
                    return welcome, victims
                price.append(victim)
                room += weigh(victim)
            room -= nbytes
            welcome.append(newcomer)
            victims += price
        return welcome, victims

    def save(self) -> bytes:
        """What the policy learned; empty if it learns nothing."""
        return self._policy.save()

    def restore(self, saved: bytes) -> None:
        self._policy.restore(saved)

    def _eviction_candidates(self, spared: Sequence[Container[ChunkKey]], pinned: Container[int]) -> Iterator[ChunkKey]:
        return self.held.eviction_candidates(self._policy.victims(), spared, pinned, self._policy.leaf_first)
