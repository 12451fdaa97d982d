"""The index of chunks with several parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.layouts import chunk_key, number_of_part
from kvtier_core.stack.index.cache_index import Admitted, CacheIndex
from kvtier_core.stack.index.write_budget import WriteBudget
from kvtier_core.types import ChunkKey


class PartedIndex(CacheIndex):
    """The policy knows chunks by the keys of their first parts. The other parts of a chunk leave with it.

    A request can continue after a boundary, a chunk that has all of its parts. The chunks between two boundaries serve
    only the second one: they leave with it unless another chunk follows them.
    """

    def __init__(self, policy: EvictionPolicy, store_after: int = 1, budget: WriteBudget | None = None):
        super().__init__(policy, store_after, budget)
        self._others: dict[ChunkKey, dict[ChunkKey, None]] = {}  # all parts but the first, by chunk
        self._orphaned: dict[ChunkKey, None] = {}  # chunks whose first part is not resident

    def chunk_of(self, key: ChunkKey) -> ChunkKey:
        return chunk_key(key)

    def with_their_parts(self, keys: Sequence[ChunkKey], admitted: Admitted) -> list[ChunkKey]:
        chunks, parts = _split(keys)
        # A chunk that is on its way here, and not resident yet, is admitted now as it was before.
        homes = dict.fromkeys(home for part in parts if (home := chunk_key(part)) not in self.resident)
        joined = set(admitted([*homes, *(chunk for chunk in chunks if chunk not in homes)]))
        return [
            *(chunk for chunk in chunks if chunk in joined),
            *(part for part in parts if chunk_key(part) in self.resident or chunk_key(part) in joined),
        ]

    def other_parts(self, chunks: Sequence[ChunkKey]) -> list[ChunkKey]:
        return [part for chunk in chunks for part in self._others.get(chunk, ())]

    def admit(
        self,
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
        nbytes: int,
        places: Sequence[int] | None = None,
    ) -> None:
        above = [None if number_of_part(key) else parent for key, parent in zip(keys, parents, strict=True)]
        self.resident.add(keys, above, nbytes, [0] * len(keys) if places is None else places)
        chunks, others = _split(keys)
        for chunk in reversed(chunks):
            self.policy.admit(chunk, nbytes)
            self._orphaned.pop(chunk, None)
        for part in others:
            self._others.setdefault(chunk_key(part), {})[part] = None
            if chunk_key(part) not in self.resident:
                self._orphaned[chunk_key(part)] = None

    def remove(self, keys: Sequence[ChunkKey], *, evicted: bool = False) -> list[int]:
        places = self.resident.remove(keys)
        chunks, others = _split(keys)
        for part in others:
            siblings = self._others[chunk_key(part)]
            del siblings[part]
            if not siblings:
                del self._others[chunk_key(part)]
                self._orphaned.pop(chunk_key(part), None)
        for chunk in chunks:
            self.policy.forget(chunk, evicted=evicted)
            if chunk in self._others:
                self._orphaned[chunk] = None
        self._unspare()
        return places

    def _prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        return number_of_part(victim) > 0 or super()._prefers(newcomer, victim)

    def _eviction_candidates(
        self,
        spared: Sequence[Container[ChunkKey | None]],
        pinned: Container[int],
        passed: list[ChunkKey],
        among: Sequence[ChunkKey] | None = None,
    ) -> Iterator[Sequence[ChunkKey]]:
        def may_leave(key: ChunkKey) -> bool:
            return self.resident.place(key) not in pinned and not any(key in each for each in spared)

        orphaned: Iterable[ChunkKey] = self._orphaned
        if among is not None:
            orphaned = [chunk for chunk in dict.fromkeys(map(chunk_key, among)) if chunk in self._orphaned]
            among = [key for key in among if not number_of_part(key)]
        for chunk in orphaned:
            if not any(chunk in each for each in spared) and (parts := list(filter(may_leave, self._others[chunk]))):
                yield parts
        gone: set[ChunkKey] = set()
        children: Counter[ChunkKey | None] = Counter()  # that are gone
        for (chunk,) in super()._eviction_candidates(spared, pinned, passed, among):
            leaving: list[ChunkKey] = []
            last: ChunkKey | None = chunk
            while last is not None and last not in gone and self.resident.children(last) <= children[last]:
                parts = self.other_parts([last])
                if not all(map(may_leave, parts)) or (leaving and parts):
                    break  # in use, or a boundary
                leaving += [last, *parts]
                gone.add(last)
                parent = self.resident.parent(last)
                children[parent] += 1
                last = parent if parent is not None and parent in self.resident and may_leave(parent) else None
            if leaving:
                yield leaving


def _split(keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], list[ChunkKey]]:
    """Split keys into those of chunks and those of other parts."""
    return [key for key in keys if not number_of_part(key)], [key for key in keys if number_of_part(key)]
