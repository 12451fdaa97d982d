"""A backend in front of another backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, SupportsDirectReads, SupportsListing, SupportsNamespaces
from kvtier_core.types import ChunkKey, Location, Namespace


class Relay(Backend):
    """Passes all calls to ``inner``, with `names` for keys. If ``inner`` lacks an ability, the answer is empty."""

    def __init__(self, inner: Backend):
        self.shared = inner.shared  # type: ignore[misc]  # a class variable of `Backend`
        self.remains = inner.remains  # type: ignore[misc]
        self._inner = inner

    def names(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """The names of frames in ``inner``: by default the keys."""
        return keys

    @property
    def used(self) -> int | None:
        return self._inner.used

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return self._inner.contains(self.names(keys))

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        return self._inner.read(self.names(keys), into)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        return self._inner.write(self.names(keys), frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._inner.delete(self.names(keys))

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        self._inner.quarantine(self.names(keys))

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        self._inner.erase(self.names(keys))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        return self._inner.scan() if isinstance(self._inner, SupportsListing) else iter(())

    def namespaces(self) -> Iterator[Namespace]:
        return self._inner.namespaces() if isinstance(self._inner, SupportsNamespaces) else iter(())

    def drop_namespace(self) -> None:
        if isinstance(self._inner, SupportsNamespaces):
            self._inner.drop_namespace()

    def reader_handle(self) -> str:
        return self._inner.reader_handle() if isinstance(self._inner, SupportsDirectReads) else ""

    def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Location | None]:
        return self._inner.locate(self.names(keys)) if isinstance(self._inner, SupportsDirectReads) else ()

    def facts(self) -> Mapping[str, str]:
        return self._inner.facts()

    def resize(self, capacity: int) -> None:
        self._inner.resize(capacity)

    def close(self) -> None:
        self._inner.close()


class Untouched(Relay):
    """Shows a store to a check: writes and deletes do not arrive, and nothing of its namespace stays."""

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        pass

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        pass

    quarantine = erase = delete

    def close(self) -> None:
        with contextlib.suppress(BackendError):  # a store that cannot be reached does not know the namespace
            self.drop_namespace()
        super().close()
