"""Reads the frames in a bundle."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kvtier_bundle.format import Bundle, Extent, must_be_trusted, naming
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, Stored, SupportsNamespaces
from kvtier_core.storekit.files import read_files
from kvtier_core.types import ChunkKey, Namespace


class BundleBackend(Backend, SupportsNamespaces):
    """The frames of one bundle, or none if it is of another namespace.

    If others can write to the file, none of its frames is served any more: they may keep it open after it is closed to
    them again.
    """

    shared = True

    def __init__(self, path: Path, namespace: Namespace):
        self._path = path
        self._namespace = namespace
        self._bundle = Bundle.open(path)
        self._extents = dict(self._bundle.extents if self._bundle.namespace == namespace else {})

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self._extents for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        if self._bundle.file.closed:
            raise BackendError(f"{self._path}: the tier is closed")
        outcomes: list[int | BackendError] = [0] * len(keys)
        fitting = {
            number: extent
            for number, key in enumerate(keys)
            if (extent := self._extents.get(key)) and extent.nbytes <= len(into[number])
        }
        views = [into[number][: extent.nbytes] for number, extent in fitting.items()]
        fds, at = [self._bundle.file.fileno()] * len(views), [extent.at for extent in fitting.values()]
        reads = read_files(fds, views, ring=False, at=at)
        self._must_be_trusted()  # before any of them counts
        for (number, extent), found in zip(fitting.items(), reads, strict=True):
            if isinstance(found, OSError):
                outcomes[number] = BackendError(f"{self._path}: at {extent.at}: {found.strerror}")
            elif found == extent.nbytes:
                outcomes[number] = found
        return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> NoReturn:
        raise BackendError(f"{self._path}: a bundle is only read")

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: a bundle is not changed."""

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Damaged frames stay damaged: they are not read again."""
        for key in keys:
            self._extents.pop(key, None)

    def namespaces(self) -> Iterator[Namespace]:
        return iter([self._bundle.namespace] if self._bundle.namespace != self._namespace else [])

    def drop_namespace(self) -> None:
        """Nothing: a bundle is not changed."""

    def facts(self) -> Mapping[str, str]:
        return {"frames": str(len(self._bundle.extents)), "namespace": self._bundle.namespace.digest.hex()[:16]}

    def close(self) -> None:
        self._bundle.file.close()

    def _must_be_trusted(self) -> None:
        try:
            with naming(self._path):
                must_be_trusted(self._bundle.file)
        except BackendError:
            self._extents.clear()
            raise


@contextlib.contextmanager
def everything_in(path: Path) -> Iterator[Iterator[Stored]]:
    """All frames of the bundle, for `kvtier fsck`. Raises BackendError."""
    bundle = Bundle.open(path)
    with bundle.file as file:
        yield (
            Stored(
                where=f"{path}: at {extent.at}",
                nbytes=extent.nbytes,
                home=bundle.namespace.digest,
                key=key,
                read=functools.partial(_read, path, file.fileno(), extent),
                remove=functools.partial(_refuse, path),
            )
            for key, extent in bundle.extents.items()
        )


def _read(path: Path, fd: int, extent: Extent, offset: int, nbytes: int) -> bytes:
    with naming(path):
        return os.pread(fd, max(0, min(nbytes, extent.nbytes - offset)), extent.at + offset)


def _refuse(path: Path) -> NoReturn:
    raise BackendError(f"{path}: a bundle is not changed; export it again")
