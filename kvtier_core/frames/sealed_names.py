"""Hides the keys of chunks from a store: a key is a digest of tokens that could confirm a guess of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, SupportsDirectReads, SupportsListing, SupportsNamespaces
from kvtier_core.types import ChunkKey, Location, Namespace

if TYPE_CHECKING:  # its library is only there where a tier has a key
    from kvtier_core.frames.keyed_seal import KeyedSeal

#: Names that are turned into keys at once.
_BATCH = 1024


class SealedNames(Backend):
    """Passes all calls to ``inner``, with the keyed seal's names in place of keys."""

    def __init__(self, inner: Backend, keyed_seal: KeyedSeal):
        self.shared = inner.shared  # type: ignore[misc]  # a class variable of `Backend`
        self._inner = inner
        self._names = keyed_seal.names
        self._keys = keyed_seal.keys

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return self._inner.contains(self._names(keys))

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        return self._inner.read(self._names(keys), into)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        return self._inner.write(self._names(keys), frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._inner.delete(self._names(keys))

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        self._inner.quarantine(self._names(keys))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        found = self._inner.scan() if isinstance(self._inner, SupportsListing) else iter(())
        while batch := list(islice(found, _BATCH)):
            keys = self._keys([name for name, _ in batch])
            yield from zip(keys, [nbytes for _, nbytes in batch], strict=True)

    def namespaces(self) -> Iterator[Namespace]:
        return self._inner.namespaces() if isinstance(self._inner, SupportsNamespaces) else iter(())

    def drop_namespace(self) -> None:
        if isinstance(self._inner, SupportsNamespaces):
            self._inner.drop_namespace()

    def reader_handle(self) -> str:
        return self._inner.reader_handle() if isinstance(self._inner, SupportsDirectReads) else ""

    def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Location | None]:
        return self._inner.locate(self._names(keys)) if isinstance(self._inner, SupportsDirectReads) else ()

    def facts(self) -> Mapping[str, str]:
        return self._inner.facts()

    def close(self) -> None:
        self._inner.close()
