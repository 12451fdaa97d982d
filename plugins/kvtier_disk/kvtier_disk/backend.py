"""Stores each frame as a file in a folder."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey, Namespace, Nbytes
from kvtier_disk.files import discard, probe_device, publish, read_frames, write_unfinished
from kvtier_disk.folder import Folder, NoFile
from kvtier_disk.folder_lock import FolderLock
from kvtier_disk.frames import (
    Found,
    Place,
    everything_of,
    move_to_quarantine,
    namespace_folder_name,
    namespace_folders,
    place_of,
    quarantined,
)
from kvtier_disk.namespaces import make_namespace_folder, read_facts
from kvtier_disk.opening import effective_access, sweep
from kvtier_disk.space_account import SpaceAccount, free_of

#: Errors that one frame's file may cause by itself, if the device still answers. All others are the whole store's.
_OF_ONE_FRAME = {
    errno.EACCES,
    errno.EBADMSG,  # the file system's checksum is wrong
    errno.EILSEQ,  # the device's checksum is wrong
    errno.EIO,
    errno.ELOOP,
    errno.ENODATA,  # a bad sector
    errno.ENOTDIR,
    errno.EPERM,
    errno.EREMOTEIO,
    errno.EUCLEAN,  # the file system's own structures are damaged
}

_FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskBackend(Backend):
    """Frames as files in a folder that this process locks. `kvtier_disk.config` says what the settings mean."""

    def __init__(self, path: Path, ctx: OpenContext, *, direct: str, io: str, min_free: int, quarantine: int):
        self._path = path
        self._asked = {"direct": direct, "io": io}
        self._min_free = Nbytes(min_free)
        self._quarantine_nbytes = quarantine
        self._namespace = ctx.namespace
        self._name = namespace_folder_name(ctx.namespace)
        self._capacity = ctx.capacity
        self._longest = ctx.max_frame_nbytes or ctx.capacity
        self._lock = FolderLock(path)
        with self._errors():
            root = self._lock.take()
            try:
                # At once, so that in a sticky folder no other user makes it first.
                make_namespace_folder(root, ctx.namespace)
                others = sweep(root, self._name, self._fits)
                used = sum(found.nbytes for found in [*others, *self._frames(root)])
                #: Files that anything else removes count as used until the folder is opened again.
                self.space = SpaceAccount(
                    ctx.capacity - used, ((found.place, found.nbytes) for found in others), self._remove_other
                )
                self._access = effective_access(path, root, direct=direct, io=io)
            except BaseException:
                self._lock.release()
                raise

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with self._errors():
            folder = self._namespace_folder(self._lock.folder())
            return [folder is not None and place_of(key).nbytes(folder) > 0 for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        with self._errors():
            folder = self._namespace_folder(root := self._lock.folder())
            if root is None or folder is None:
                return [0] * len(keys)
            return self._separate_errors(root, keys, read_frames(folder, list(map(place_of, keys)), into, self._access))

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        with self._errors():
            root = self._lock.folder_again()
            folder = self._namespace_folder(root) or make_namespace_folder(root, self._namespace)
            self._check_free(root, sum(map(len, frames)))
            self._write(folder, list(map(place_of, keys)), frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._errors():
            folder = self._namespace_folder(self._lock.folder())
            if folder is not None:
                self._each(keys, lambda key: self._remove(folder, place_of(key)))

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Keep damaged frames as far as there is room. From then on they count as frames of other namespaces."""
        with self._errors():
            folder = self._namespace_folder(root := self._lock.folder())
            if root is not None and folder is not None:
                self._each(keys, lambda key: self._quarantine(root, folder, key))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        with self._errors():
            root = self._lock.folder()
            found = [] if root is None else sorted(self._frames(root))
            return iter([(each.key, each.nbytes) for each in found])

    def namespaces(self) -> Iterator[Namespace]:
        with self._errors():
            root = self._lock.folder()
            others = [] if root is None else [name for name in namespace_folders(root) if name != self._name]
            return iter([facts for name in others if (facts := read_facts(root, name)) is not None])

    def facts(self) -> Mapping[str, str]:
        return {
            "direct": f"{self._asked['direct']} -> {'on' if self._access.direct else 'off'}",
            "io": f"{self._asked['io']} -> {'io_uring' if self._access.ring else 'calls'}",
        }

    def close(self) -> None:
        with self._errors():
            self._lock.release()

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
        failures = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        for failure in failures:
            if failure.errno not in _OF_ONE_FRAME:
                raise failure
        if failures:
            try:
                probe_device(root)
            except OSError:
                raise failures[0] from None
        return [
            self._of_one_frame(key, outcome) if isinstance(outcome, OSError) else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    def _of_one_frame(self, key: ChunkKey, failure: OSError) -> BackendError:
        return BackendError(f"{place_of(key).under(self._path / self._name)}: {failure.strerror}")

    def _write(self, folder: Folder, places: Sequence[Place], frames: Sequence[memoryview]) -> None:
        growths = [len(frame) - self._nbytes(folder, place) for place, frame in zip(places, frames, strict=True)]
        needed = [max(0, growth) for growth in growths]
        self.space.take(sum(needed))
        published = 0
        try:
            write_unfinished(folder, places, frames, self._access)
            for place, growth in zip(places, growths, strict=True):
                publish(folder, place)
                self.space.give(max(0, -growth))
                published += 1
        except BaseException as error:  # OSError, or BackendError for a folder that others may write to
            discard(folder, places[published:])
            self.space.give(sum(needed[published:]))
            if isinstance(error, OSError) and error.errno in _FULL:
                raise StoreFull(f"{self._path}: {error.strerror}", missing=sum(map(len, frames))) from error
            raise

    def _remove(self, folder: Folder, place: Place) -> None:
        nbytes = self._nbytes(folder, place)
        place.remove(folder)
        self.space.give(nbytes)

    def _quarantine(self, root: Folder, folder: Folder, key: ChunkKey) -> None:
        nbytes = self._nbytes(folder, place_of(key))
        with contextlib.suppress(OSError, BackendError):  # what cannot be kept is removed
            kept = sum(found.nbytes for found in quarantined(root))
            if nbytes and kept + nbytes <= self._quarantine_nbytes:
                self.space.hand_over(move_to_quarantine(root, self._name, key), nbytes)
                return
        self._remove(folder, place_of(key))

    def _each(self, keys: Sequence[ChunkKey], act: Callable[[ChunkKey], None]) -> None:
        """Do it for every key, even if it fails for some; then raise the first failure."""
        failures: list[Exception] = []
        for key in keys:
            try:
                act(key)
            except (OSError, BackendError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _frames(self, root: Folder) -> list[Found]:
        """The frames of this namespace."""
        found = [found for _, found in everything_of(root, self._name)]
        return [each for each in found if each is not None and self._fits(each)]

    def _fits(self, found: Found) -> bool:
        """Can a frame have this length? A sparse file can have any."""
        return found.nbytes <= (self._longest if found.namespace_folder == self._name else self._capacity)

    def _nbytes(self, folder: Folder, place: Place) -> int:
        """What the account holds for the frame at this place."""
        return min(place.nbytes(folder), self._longest)

    def _remove_other(self, place: Place) -> None:
        if (root := self._lock.folder()) is not None:
            place.remove(root)

    def _check_free(self, root: Folder, nbytes: int) -> None:
        free = free_of(root)
        if free - nbytes < self._min_free:
            raise StoreFull(
                f"{self._path}: {Nbytes(nbytes)} to write and {Nbytes(free)} free, "
                f"of which min_free keeps {self._min_free}",
                missing=self._min_free + nbytes - free,
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the system become BackendErrors that name the file."""
        try:
            yield
        except OSError as error:
            raise BackendError(f"{error.filename or self._path}: {error.strerror}") from error
