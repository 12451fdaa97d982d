"""Frames that lie in a tier's own store although the tier cannot read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier_core.types import ChunkKey


class IncompatibleFrames:
    """Frames of another codec or format version, by key, with the bytes that they take. Owner's thread only.

    They are not in the tier's index, so they are not read again, and their keys may be overwritten. They stay in the
    store, for an engine that can read them, and count as used space. When the tier needs that space they are deleted
    before any frame that it can read.
    """

    def __init__(self) -> None:
        self.nbytes = 0  #: of all of them
        self._held: dict[ChunkKey, int] = {}
        self._overwritten: dict[ChunkKey, int] = {}  # while a write of their key is under way

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held or key in self._overwritten

    def add(self, keys: Sequence[ChunkKey], nbytes: Callable[[ChunkKey], int]) -> None:
        """Reads found that these frames cannot be served; ``nbytes(key)`` is what each takes."""
        for key in keys:
            self._held[key] = nbytes(key)
            self.nbytes += self._held[key]

    def begin_write(self, keys: Iterable[ChunkKey]) -> None:
        """These keys will be written. Until then the old frames count as used space and cannot be evicted."""
        for key in keys if self._held else ():
            if key in self._held:
                self._overwritten[key] = self._held.pop(key)

    def end_write(self, keys: Iterable[ChunkKey], *, replaced: bool) -> None:
        """A write has ended. Unless it ``replaced`` the old frames, they may still be there and count as before."""
        for key in keys if self._overwritten else ():
            nbytes = self._overwritten.pop(key, 0)
            if replaced:
                self.nbytes -= nbytes
            elif nbytes:
                self._held[key] = nbytes

    def evictable(self, spared: Sequence[ChunkKey]) -> int:
        """Bytes that can be freed, without those of ``spared``."""
        if not self._held:
            return 0
        return self.nbytes - sum(self._overwritten.values()) - sum(self._held.get(key, 0) for key in spared)

    def take(self, nbytes: int) -> dict[ChunkKey, int]:
        """Forget frames of ``nbytes`` in all, those found first, and return them for the caller to delete."""
        taken: dict[ChunkKey, int] = {}
        while nbytes > 0 and self._held:
            key = next(iter(self._held))
            taken[key] = self._held.pop(key)
            nbytes -= taken[key]
        self.nbytes -= sum(taken.values())
        return taken
