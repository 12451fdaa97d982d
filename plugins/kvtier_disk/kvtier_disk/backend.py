"""A tier in a folder of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext
from kvtier_core.storekit.disk_access import effective_access, remove_probes
from kvtier_core.storekit.folder import Folder, backend_errors
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.types import ChunkKey
from kvtier_disk.files import Access, publish
from kvtier_disk.folder_backend import FolderBackend
from kvtier_disk.frames import (
    Found,
    Place,
    everything_of,
    move_to_quarantine,
    namespace_folders,
    oldest_first,
    place_of,
    quarantined,
    remove_if_empty,
)
from kvtier_disk.namespaces import is_kvtiers, make_namespace_folder, remove_facts
from kvtier_disk.shared_folder import must_not_be_shared
from kvtier_disk.space_account import SpaceAccount


class DiskBackend(FolderBackend):
    """Frames as files in a folder that this process locks. `kvtier_disk.config` explains the settings."""

    space: SpaceAccount
    remains = "its files are removed; the file system may keep their blocks until it uses them again"

    def __init__(self, path: Path, ctx: OpenContext, *, direct: str, io: str, min_free: int, quarantine: int):
        lock = FolderLock(path, must_not_be_shared, trial=ctx.checking)
        super().__init__(path, lock, ctx, direct=direct, io=io, min_free=min_free)
        self._quarantine_nbytes = quarantine
        self._capacity: int = ctx.capacity
        with backend_errors(path):
            root = lock.take()
            try:
                if not (ctx.checking and namespace_folders(root)):  # an engine's may be one of these
                    make_namespace_folder(root, ctx.namespace)
                others = _sweep(root, self._name, self._fits)
                used = sum(found.nbytes for found in [*others, *self._frames(root)])
                #: Files that anything else removes count as used until the folder is opened again.
                self.space = SpaceAccount(
                    ctx.capacity - used, ((found.place, found.nbytes) for found in others), self._remove_other
                )
                self._access = Access(*effective_access(path, root, direct=direct, io=io))
            except BaseException:
                lock.release()
                raise

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Keep damaged frames while there is room. From then on they count as frames of other namespaces."""
        with backend_errors(self._path):
            folder = self._namespace_folder(root := self._root.folder())
            if root is not None and folder is not None:
                self._each(keys, lambda key: self._quarantine(root, folder, key))

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        self.delete(keys)
        with backend_errors(self._path):
            if (root := self._root.folder()) is not None:
                for found in quarantined(root):
                    if found.namespace_folder == self._name:
                        self.space.remove(found.place)

    def resize(self, capacity: int) -> None:
        self.space.give(capacity - self._capacity)
        self._capacity = capacity

    def _write(self, folder: Folder, places: Sequence[Place], frames: Sequence[memoryview]) -> None:
        growths = [len(frame) - self._nbytes(folder, place) for place, frame in zip(places, frames, strict=True)]

        def replace(number: int) -> None:
            publish(folder, places[number], self._access)
            self.space.give(max(0, -growths[number]))

        self._write_taken(folder, places, frames, [max(0, growth) for growth in growths], replace)

    def _quarantine(self, root: Folder, folder: Folder, key: ChunkKey) -> None:
        nbytes = self._nbytes(folder, place_of(key))
        with contextlib.suppress(OSError, BackendError):  # what cannot be kept is removed
            kept = sum(found.nbytes for found in quarantined(root))
            if nbytes and kept + nbytes <= self._quarantine_nbytes:
                self.space.hand_over(move_to_quarantine(root, self._name, key), nbytes)
                return
        self._remove(folder, place_of(key))

    def _fits(self, found: Found) -> bool:
        """Can a frame have this length? A sparse file can have any."""
        return found.nbytes <= (self._longest if found.namespace_folder == self._name else self._capacity)

    def _remove_other(self, place: Place) -> None:
        if (root := self._root.folder()) is not None:
            place.remove(root)


def _sweep(root: Folder, own: str, fits: Callable[[Found], bool]) -> list[Found]:
    """Remove everything that is not a frame from the namespace folders that kvtier made, and nothing elsewhere.

    Returns the frames that are not in the namespace folder ``own``, oldest first. A frame for which ``fits`` is false
    does not count as one.
    """
    remove_probes(root)
    others = []
    names = [name for name in namespace_folders(root) if name == own or is_kvtiers(root, name)]
    lying = [each for name in names for each in everything_of(root, name)]
    for place, found in [*lying, *((found.place, found) for found in quarantined(root))]:
        if found is None or not fits(found):
            with contextlib.suppress(OSError):  # if it cannot be removed, it is still not a frame
                place.remove(root)
        elif place.folders[0] != own:
            others.append(found)
    for name in set(names) - {own} - {found.place.folders[0] for found in others}:
        with contextlib.suppress(OSError):
            remove_facts(root, name)
            remove_if_empty(root, name)
    return oldest_first(others)
