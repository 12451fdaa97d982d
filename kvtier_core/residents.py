"""Whom a tier holds, and in which order they may leave."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.sightings import Sightings
from kvtier_core.types import ChunkKey


class Residents:
    """The held keys of one tier with their sizes, and their places in the prefix tree.

    The policy has an opinion about order; this class keeps it honest: a chunk whose child is still held
    is passed over when the policy is ``leaf_first``, because without its parent a child is unreachable.
    """

    def __init__(self, policy: EvictionPolicy, store_after: int = 1):
        self._policy = policy
        self._store_after = store_after
        self._sightings = Sightings() if store_after > 1 else None
        self._nbytes: dict[ChunkKey, int] = {}
        self._parent: dict[ChunkKey, ChunkKey] = {}
        self._children: Counter[ChunkKey] = Counter()
        self.used = 0  #: bytes of all that is held

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._nbytes

    def __len__(self) -> int:
        return len(self._nbytes)

    def __iter__(self):
        return iter(self._nbytes)

    def nbytes(self, key: ChunkKey) -> int:
        return self._nbytes[key]

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """Of a held key, as far as it is known: a restart forgets it until the next request."""
        return self._parent.get(key)

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """One prompt's chunks, root first, held or not."""
        if self._sightings:
            self._sightings.note(path)
        for parent, key in itertools.pairwise(path):
            self._adopt(key, parent)
        self._policy.request(path, now, hints)

    def seen_enough(self, key: ChunkKey) -> bool:
        """Was the key named by as many requests as a newcomer needs?"""
        return self._sightings is None or self._sightings.of(key) >= self._store_after

    def admit(self, key: ChunkKey, parent: ChunkKey | None, nbytes: int) -> None:
        """Take in a key. Leaves of a path come before its root."""
        self._policy.admit(key, nbytes)
        self._nbytes[key] = nbytes
        self.used += nbytes
        if parent is not None:
            self._adopt(key, parent)

    def resize(self, key: ChunkKey, nbytes: int) -> None:
        self.used += nbytes - self._nbytes[key]
        self._nbytes[key] = nbytes

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        self.used -= self._nbytes.pop(key)
        parent = self._parent.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
        self._policy.forget(key, evicted=evicted)

    def choose(
        self, amount: int, weigh: Callable[[ChunkKey], int], may_leave: Callable[[ChunkKey], bool]
    ) -> list[ChunkKey]:
        """The best victims, in order, until they weigh ``amount``; less when there are no more. Removes none."""
        chosen: list[ChunkKey] = []
        leavers = self._leavers(may_leave)
        while amount > 0 and (key := next(leavers, None)) is not None:
            chosen.append(key)
            amount -= weigh(key)
        return chosen

    def trade(
        self,
        newcomers: Sequence[ChunkKey],
        nbytes: int,
        room: int,
        weigh: Callable[[ChunkKey], int],
        may_leave: Callable[[ChunkKey], bool],
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Who of a path, root first, may come in at ``nbytes`` each, and who leaves for them. Changes nothing.

        A newcomer that the policy does not prefer to its victims is refused, and so are those that hang on it.
        """
        welcome: list[ChunkKey] = []
        victims: list[ChunkKey] = []
        leavers = self._leavers(may_leave)
        for newcomer in newcomers:
            price: list[ChunkKey] = []
            while room < nbytes:
                victim = next(leavers, None)
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

    def _leavers(self, may_leave: Callable[[ChunkKey], bool]) -> Iterator[ChunkKey]:
        """Whoever may leave, best first, as if all before were gone."""
        leaving: Counter[ChunkKey | None] = Counter()  # how many children of a key were named
        passed: set[ChunkKey] = set()  # wanted by the policy, spared for the sake of a child

        def is_leaf(key: ChunkKey) -> bool:
            return self._children.get(key, 0) <= leaving.get(key, 0)

        for key in self._policy.victims():
            if not may_leave(key):
                continue
            if self._policy.leaf_first and not is_leaf(key):
                passed.add(key)
                continue
            leaver: ChunkKey | None = key
            while leaver is not None:
                yield leaver
                parent = self._parent.get(leaver)
                leaving[parent] += 1
                # With its last child goes a parent that was spared only for it.
                leaver = parent if parent in passed and is_leaf(parent) else None

    def _adopt(self, key: ChunkKey, parent: ChunkKey) -> None:
        if key in self._nbytes and key not in self._parent:
            self._parent[key] = parent
            self._children[parent] += 1
