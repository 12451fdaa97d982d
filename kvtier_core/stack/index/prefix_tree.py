"""The resident keys of one tier, each with its size, place and parent in the prefix tree."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from kvtier_core.native import choose
from kvtier_core.types import ChunkKey


class PlainPrefixTree:
    """A prefix tree over keys. A parent need not be resident; a key that is not resident has no known parent.

    A parent that is below its own child, which no prompt has, stays unknown: else neither could ever be evicted.

    csrc/prefix_tree.cpp gives the same answers faster and in less memory; it is tested against this.
    """

    def __init__(self) -> None:
        self._nbytes: dict[ChunkKey, int] = {}
        self._place: dict[ChunkKey, int] = {}
        self._parent: dict[ChunkKey, ChunkKey] = {}
        self._children: Counter[ChunkKey] = Counter()
        self._parked: set[ChunkKey] = set()
        self._freed: list[ChunkKey] = []
        self.used = 0  #: bytes of all resident keys
        self._changes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._nbytes

    def __len__(self) -> int:
        return len(self._nbytes)

    def __iter__(self) -> Iterator[ChunkKey]:
        """The resident keys: a snapshot, in no particular order."""
        return iter(list(self._nbytes))

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of a resident key."""
        return self._nbytes[key]

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """The parent of a key, if it is known."""
        return self._parent.get(key)

    def children(self, key: ChunkKey) -> int:
        """Number of resident keys with this parent."""
        return self._children.get(key, 0)

    def place(self, key: ChunkKey) -> int:
        """The number stored with a resident key; in an arena, its slot."""
        return self._place[key]

    def places(self, keys: Sequence[ChunkKey]) -> list[int]:
        """`place` of each key."""
        return [self._place[key] for key in keys]

    def run(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Length of the run of resident keys from ``start`` on."""
        return next((i - start for i in range(start, len(keys)) if keys[i] not in self._nbytes), len(keys) - start)

    def missing(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys that are not resident."""
        return [key for key in keys if key not in self._nbytes]

    def add(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], nbytes: int, places: Sequence[int]
    ) -> None:
        """Add keys of ``nbytes`` each. Raises ValueError, and changes nothing, if any is resident."""
        if len(set(keys)) < len(keys) or any(key in self._nbytes for key in keys):
            raise ValueError("a key is held already")
        self._changes += 1
        for key, parent, place in zip(keys, parents, places, strict=True):
            self._nbytes[key] = nbytes
            self._place[key] = place
            self.used += nbytes
            if parent is not None:
                self._adopt(key, parent)

    def adopt(self, path: Sequence[ChunkKey]) -> None:
        """Make each key of a path the parent of the next, if that one is resident and has no known parent."""
        for parent, key in itertools.pairwise(path):
            if key in self._nbytes and key not in self._parent:
                self._adopt(key, parent)

    def resize(self, key: ChunkKey, nbytes: int) -> None:
        """Set the size of a resident key."""
        self.used += nbytes - self._nbytes[key]
        self._nbytes[key] = nbytes

    def remove(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Remove these keys; returns their places."""
        self.detach(keys)
        for key in keys:
            self._parked.discard(key)
            self.used -= self._nbytes.pop(key)
        return [self._place.pop(key) for key in keys]

    def detach(self, keys: Sequence[ChunkKey]) -> None:
        """Forget the parents of these keys."""
        self._changes += 1
        for key in keys:
            parent = self._parent.pop(key, None)
            if parent is not None:
                self._children[parent] -= 1
                if not self._children[parent]:
                    del self._children[parent]
                    if parent in self._parked:
                        self._parked.remove(parent)
                        self._freed.append(parent)

    def park(self, keys: Sequence[ChunkKey]) -> None:
        """These keys, each with a resident child, count as passed over until that child has left."""
        self._parked.update(keys)

    def take_freed(self) -> list[ChunkKey]:
        """Resident parked keys whose last child has left since the last call."""
        freed, self._freed = self._freed, []
        return [key for key in freed if key in self._nbytes]

    def eviction_candidates(
        self,
        victims: Iterator[ChunkKey],
        spared: Sequence[Container[ChunkKey | None]],
        pinned: Container[int],
        leaf_first: bool,
        passed: list[ChunkKey],
    ) -> Iterator[ChunkKey]:
        """The ``victims`` that may be evicted, best first, each assuming that all before it are evicted.

        Passes over keys in any of the ``spared``, and keys whose place is ``pinned``. With ``leaf_first`` a key follows
        its last resident child, and is appended to ``passed`` when it is passed over; parked keys need not be named.
        Raises RuntimeError once the tree has changed.
        """
        changes = self._changes
        gone: Counter[ChunkKey | None] = Counter()  # number of a key's children among the candidates so far
        waiting: set[ChunkKey] = set()  # named by the policy, but with a resident child

        def is_leaf(key: ChunkKey) -> bool:
            return self._children.get(key, 0) <= gone.get(key, 0)

        def may_be_evicted(key: ChunkKey) -> bool:
            return self._place[key] not in pinned and not any(key in each for each in spared)

        for key in victims:
            if leaf_first and not is_leaf(key):
                waiting.add(key)
                passed.append(key)
                continue
            candidate: ChunkKey | None = key
            while candidate is not None and may_be_evicted(candidate):
                yield candidate
                if self._changes != changes:
                    raise RuntimeError("the tree changed while its candidates were iterated")
                parent = self._parent.get(candidate)
                gone[parent] += 1
                is_next = (parent in waiting or parent in self._parked) and is_leaf(parent)
                candidate = parent if is_next else None

    def _adopt(self, key: ChunkKey, parent: ChunkKey) -> None:
        if self._is_at_or_above(key, parent):
            return
        self._changes += 1
        self._parent[key] = parent
        self._children[parent] += 1

    def _is_at_or_above(self, key: ChunkKey, below: ChunkKey) -> bool:
        above: ChunkKey | None = below
        while above is not None and above != key and key in self._children:
            above = self._parent.get(above)
        return above == key


PrefixTree = choose("PrefixTree", PlainPrefixTree)
