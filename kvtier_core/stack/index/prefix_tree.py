"""The held keys of one level, what is noted of each, and how they hang on one another."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from kvtier_core.native import extension
from kvtier_core.types import ChunkKey


class PlainPrefixTree:
    """A prefix tree. A parent is known by its key, held or not; a key that is not held has no parent."""

    def __init__(self) -> None:
        self._nbytes: dict[ChunkKey, int] = {}
        self._place: dict[ChunkKey, int] = {}
        self._parent: dict[ChunkKey, ChunkKey] = {}
        self._children: Counter[ChunkKey] = Counter()
        self.used = 0  #: bytes of all that is held
        self._changes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._nbytes

    def __len__(self) -> int:
        return len(self._nbytes)

    def __iter__(self) -> Iterator[ChunkKey]:
        """In no order; who leaves meanwhile is named all the same."""
        return iter(list(self._nbytes))

    def nbytes(self, key: ChunkKey) -> int:
        return self._nbytes[key]

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """As far as it is known."""
        return self._parent.get(key)

    def place(self, key: ChunkKey) -> int:
        """What was noted of a held key."""
        return self._place[key]

    def places(self, keys: Sequence[ChunkKey]) -> list[int]:
        return [self._place[key] for key in keys]

    def run(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """How many are held from ``start`` on, before the first that is not."""
        return next((i - start for i in range(start, len(keys)) if keys[i] not in self._nbytes), len(keys) - start)

    def missing(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those that are not held."""
        return [key for key in keys if key not in self._nbytes]

    def add(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], nbytes: int, places: Sequence[int]
    ) -> None:
        """Hold keys of ``nbytes`` each. ValueError, before the first, if one is held."""
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
        """Each key of a path hangs on the one before it, unless it is known to hang on another."""
        for parent, key in itertools.pairwise(path):
            if key in self._nbytes and key not in self._parent:
                self._adopt(key, parent)

    def resize(self, key: ChunkKey, nbytes: int) -> None:
        self.used += nbytes - self._nbytes[key]
        self._nbytes[key] = nbytes

    def remove(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Hold these no more; what was noted of them."""
        self.detach(keys)
        for key in keys:
            self.used -= self._nbytes.pop(key)
        return [self._place.pop(key) for key in keys]

    def detach(self, keys: Sequence[ChunkKey]) -> None:
        """These hang on nobody any more."""
        self._changes += 1
        for key in keys:
            parent = self._parent.pop(key, None)
            if parent is not None:
                self._children[parent] -= 1
                if not self._children[parent]:
                    del self._children[parent]

    def eviction_candidates(
        self,
        victims: Iterator[ChunkKey],
        spared: Sequence[Container[ChunkKey]],
        pinned: Container[int],
        leaf_first: bool,
    ) -> Iterator[ChunkKey]:
        """Of ``victims`` those who may leave, best first, as if all before were gone.

        Not whoever is in one of the ``spared``, or whose place is ``pinned``. ``leaf_first`` passes over a key on which
        another hangs that is still held; it follows its last child. RuntimeError once the tree has changed.
        """
        changes = self._changes
        leaving: Counter[ChunkKey | None] = Counter()  # how many children of a key were named
        passed: set[ChunkKey] = set()  # named by the policy, spared for the sake of a child

        def is_leaf(key: ChunkKey) -> bool:
            return self._children.get(key, 0) <= leaving.get(key, 0)

        def may_leave(key: ChunkKey) -> bool:
            return self._place[key] not in pinned and not any(key in each for each in spared)

        for key in victims:
            if leaf_first and not is_leaf(key):
                passed.add(key)
                continue
            leaver: ChunkKey | None = key
            while leaver is not None and may_leave(leaver):
                yield leaver
                if self._changes != changes:
                    raise RuntimeError("the tree changed while its leavers were named")
                parent = self._parent.get(leaver)
                leaving[parent] += 1
                leaver = parent if parent in passed and is_leaf(parent) else None

    def _adopt(self, key: ChunkKey, parent: ChunkKey) -> None:
        if key == parent:  # of a path that names it twice
            return
        self._changes += 1
        self._parent[key] = parent
        self._children[parent] += 1


PrefixTree = getattr(extension, "PrefixTree", PlainPrefixTree)
