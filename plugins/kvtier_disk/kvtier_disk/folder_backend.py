"""Stores each frame as a file in a folder, whoever else may use the folder."""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext, SupportsListing, SupportsNamespaces
from kvtier_core.storekit.disk_access import FULL, raise_if_store_failed
from kvtier_core.storekit.folder import Folder, NoFile, backend_errors
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.storekit.namespaces import home_of
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Namespace, Nbytes, size
from kvtier_disk.files import Access, discard, read_frames, write_unfinished
from kvtier_disk.frames import (
    Found,
    Place,
    everything_of,
    namespace_folders,
    oldest_first,
    place_of,
    remove_if_empty,
)
from kvtier_disk.namespaces import make_namespace_folder, read_facts, remove_facts
from kvtier_disk.shared_folder import SharedFolder
from kvtier_disk.space_account import SpaceAccount


class FolderBackend(Backend, SupportsListing, SupportsNamespaces):
    """Frames as files. Subclasses define who owns the folder, and account for its space."""

    space: SpaceAccount | SharedSpace | None  #: None: only ``min_free`` bounds the folder
    _access: Access

    def __init__(
        self, path: Path, root: FolderLock | SharedFolder, ctx: OpenContext, *, direct: str, io: str, min_free: int
    ):
        self._path = path
        self._root = root
        self._asked = {"direct": direct, "io": io}
        self._min_free = Nbytes(min_free)
        self._namespace = ctx.namespace
        self._name = home_of(ctx.namespace)
        self._longest = ctx.max_frame_nbytes or ctx.capacity or sys.maxsize

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with backend_errors(self._path):
            folder = self._namespace_folder(self._root.folder())
            return [folder is not None and self._is_frame(place_of(key).nbytes(folder, usable=True)) for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        with backend_errors(self._path):
            folder = self._namespace_folder(root := self._root.folder())
            if root is None or folder is None:
                return [0] * len(keys)
            return self._separate_errors(root, keys, read_frames(folder, list(map(place_of, keys)), into, self._access))

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        with backend_errors(self._path):
            root = self._root.folder_again()
            folder = self._namespace_folder(root)
            if folder is None:
                folder = make_namespace_folder(root, self._namespace, self._access.writer)
            self._check_free(root, sum(map(len, frames)))
            self._write(folder, list(map(place_of, keys)), frames)
        return None

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with backend_errors(self._path):
            folder = self._namespace_folder(self._root.folder())
            if folder is not None:
                self._each(keys, lambda key: self._remove(folder, place_of(key)))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        with backend_errors(self._path):
            root = self._root.folder()
            found = [] if root is None else oldest_first(self._frames(root))
            return iter([(each.key, each.nbytes) for each in found])

    def namespaces(self) -> Iterator[Namespace]:
        with backend_errors(self._path):
            root = self._root.folder()
            if root is None:
                return iter(())
            others = [name for name in namespace_folders(root) if name != self._name]
            return iter([facts for name in others if (facts := read_facts(root, name)) is not None])

    def drop_namespace(self) -> None:
        with backend_errors(self._path):
            root = self._root.folder()
            if root is not None and self._namespace_folder(root) is not None:
                for place, _ in everything_of(root, self._name):
                    place.remove(root)
                remove_facts(root, self._name)
                remove_if_empty(root, self._name)

    def facts(self) -> Mapping[str, str]:
        return {
            "path": str(self._path.absolute()),
            "direct": f"{self._asked['direct']} -> {'on' if self._access.direct else 'off'}",
            "io": f"{self._asked['io']} -> {'io_uring' if self._access.ring else 'calls'}",
        }

    def close(self) -> None:
        with backend_errors(self._path):
            self._root.release()

    @abc.abstractmethod
    def _write(self, folder: Folder, places: Sequence[Place], frames: Sequence[memoryview]) -> None:
        """Write frames below the namespace's folder, and account for them. Raises OSError and BackendError."""

    def _write_taken(
        self,
        folder: Folder,
        places: Sequence[Place],
        frames: Sequence[memoryview],
        needed: Sequence[int],
        publish: Callable[[int], None],
    ) -> None:
        """Write all frames under temporary names, then publish them one by one, each by its number.

        ``needed`` bytes are taken for each, and given back for those that were not published.
        """
        if self.space is not None:
            self.space.take(sum(needed))
        published = 0
        try:
            write_unfinished(folder, places, frames, self._access)
            for number in range(len(places)):
                publish(number)
                published += 1
        except BaseException as error:  # OSError, or BackendError for a folder that others may write to
            discard(folder, places[published:], self._access)
            self._give(sum(needed[published:]))
            if isinstance(error, OSError) and error.errno in FULL:
                raise StoreFull(f"{self._path}: {error.strerror}", missing=sum(map(len, frames))) from error
            raise

    def _namespace_folder(self, root: Folder | None) -> Folder | None:
        """The folder of this namespace's frames; None if it was removed."""
        try:
            return root and root.inner(self._name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _separate_errors(
        self, root: Folder, keys: Sequence[ChunkKey], outcomes: Sequence[int | OSError | NoFile]
    ) -> list[int | BackendError]:
        """Errors of single frames become values; an error of the whole store is raised."""
        raise_if_store_failed(outcomes, root)
        folder = self._path / self._name
        return [
            BackendError(f"{place_of(key).under(folder)}: {each.strerror}") if isinstance(each, OSError) else each
            for key, each in zip(keys, outcomes, strict=True)
        ]

    def _remove(self, folder: Folder, place: Place) -> None:
        nbytes = self._nbytes(folder, place)
        if place.remove(folder):
            self._give(nbytes)

    def _give(self, nbytes: int) -> None:
        if self.space is not None:
            self.space.give(nbytes)

    def _each(self, keys: Sequence[ChunkKey], act: Callable[[ChunkKey], None]) -> None:
        """Call ``act`` for every key, even if it fails for some; then raise the first failure."""
        failures: list[Exception] = []
        for key in keys:
            try:
                act(key)
            except (OSError, BackendError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _is_frame(self, nbytes: int) -> bool:
        """Would `read` find a frame in a file of this length?"""
        return 0 < nbytes <= self._longest and not nbytes % FRAME_ALIGNMENT

    def _frames(self, root: Folder) -> list[Found]:
        found = [found for _, found in everything_of(root, self._name)]
        return [each for each in found if each is not None and each.nbytes <= self._longest]

    def _nbytes(self, folder: Folder, place: Place) -> int:
        """The bytes in the account for the frame at this place. A sparse file can have any length; a frame cannot."""
        return min(place.nbytes(folder), self._longest)

    def _check_free(self, root: Folder, nbytes: int) -> None:
        free = free_of(root)
        if free - nbytes < self._min_free:
            raise StoreFull(
                f"{self._path}: {size(nbytes)} to write, {size(free)} free, "
                f"of which min_free reserves {self._min_free}",
                missing=self._min_free + nbytes - free,
            )


def free_of(folder: Folder) -> int:
    """Bytes that the file system would still let this user write."""
    stats = os.fstatvfs(folder.fd)
    return stats.f_bavail * stats.f_frsize
