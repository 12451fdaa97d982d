"""The account of a shared folder's capacity: counted in a file, which is locked for every change."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.storekit.folder import Folder, backend_errors
from kvtier_core.storekit.folder_lock import FileLock
from kvtier_core.storekit.shared_space import Count, recount
from kvtier_disk.frames import (
    Found,
    Place,
    everything_in,
    is_unfinished,
    namespace_folders,
    oldest_first,
    quarantined,
    shards_of,
)
from kvtier_disk.shared_folder import SHARED

#: Frames among which an eviction looks for the oldest: a few seconds of calls, however many frames there are.
MOST_LISTED = 1 << 16
_EVICTING = ".kvtier-evicting"
_COUNT = re.compile(rb"(\d{20}) (\d{20})\n")
_PAUSE = 0.001  # seconds between two tries to get a lock; it doubles up to
_LONGEST_PAUSE = 0.02
_PATIENCE = 60.0  # seconds that `kvtier fsck` waits for an engine that evicts


class _Held(BackendError):
    """Another user of the folder has held a lock for too long."""


class FolderAccount:
    """A `SharedStore` of files. The locks are those of flock: NFS and Lustre pass them on to their server."""

    def __init__(self, path: Path, folder: Callable[[], Folder], *, longest: int, timeout: float):
        """``path`` names the folder in errors. Files longer than ``longest`` are not frames.

        A lock is waited for ``timeout`` seconds at most.
        """
        self._path = path
        self._folder = folder
        self._longest = longest
        self._timeout = timeout

    def count(self, *, taken: int = 0, freed: int = 0) -> Count:
        with self._locked(SHARED) as file:
            before = _COUNT.fullmatch(os.pread(file, 64, 0))
            count = Count(int(before[1]) + taken, int(before[2]) + freed) if before else Count(taken, freed)
            if taken or freed:
                os.pwrite(file, b"%020d %020d\n" % (count.taken, count.freed), 0)
        return count

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        with contextlib.ExitStack() as locked:
            try:
                locked.enter_context(self._locked(_EVICTING))
            except _Held as error:  # it may be listing millions of files: there is no room yet, but nothing is broken
                raise StoreFull(str(error), missing=0) from None
            yield

    def oldest(self) -> Iterator[tuple[Found | None, int]]:
        """Frames of every namespace, and unfinished files, which stay.

        If there are very many, first more than `MOST_LISTED` of them, from randomly drawn shards, oldest first.
        """
        with self._errors() as root:
            shards = list(_shards(root))
            random.shuffle(shards)
            frames, unfinished = quarantined(root), []
            while shards and len(frames) <= MOST_LISTED:
                for place, found in _everything_in(root, *shards.pop()):
                    if found is not None:
                        frames.append(found)
                    elif is_unfinished(place.name):
                        unfinished.append(place.nbytes(root))
            yield from ((found, found.nbytes) for found in oldest_first(frames) if found.nbytes <= self._longest)
            yield from ((None, nbytes) for nbytes in unfinished)
            for shard in shards:
                yield from ((found, found.nbytes) for _, found in _everything_in(root, *shard) if found is not None)

    def remove(self, found: Found) -> bool:
        with self._errors() as root:
            return found.is_unchanged(root) and found.place.remove(root)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Folder]:
        """The folder, and errors of the system become BackendErrors."""
        with backend_errors(self._path):
            yield self._folder()

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """A descriptor of the file of that name, locked against all other users of the folder."""
        with self._errors() as root:
            file = root.open(name, os.O_RDWR | os.O_CREAT)
            try:
                lock = _lock(file, self._path / name, self._timeout)
                try:
                    yield file
                finally:
                    lock.release()
            finally:
                os.close(file)


def _shards(root: Folder) -> Iterator[tuple[str, str]]:
    """Namespace and shard of every folder of frames."""
    for name in namespace_folders(root):
        with contextlib.suppress(BackendError, NotADirectoryError):  # what others may write to is not counted
            for shard in shards_of(root, name):
                yield name, shard


def _everything_in(root: Folder, name: str, shard: str) -> Iterator[tuple[Place, Found | None]]:
    with contextlib.suppress(BackendError):  # a folder that others may write to is not counted
        yield from everything_in(root, name, shard)


def recount_folder(path: Path, capacity: int) -> None:
    """Make the account of a shared folder match what is there now. Raises BackendError."""
    recount(FolderAccount(path, lambda: Folder.at(path), longest=capacity, timeout=_PATIENCE))


def _lock(file: int, path: Path, timeout: float) -> FileLock:
    """Lock the file. It tries again and again: a call that waits for the lock could not be given up."""
    deadline, pause = time.monotonic() + timeout, _PAUSE
    while True:
        try:
            return FileLock(file)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _Held(
                    f"{path}: another engine has held its lock for {timeout:g} seconds; is it stopped?"
                ) from None
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                why = "this file system has no locks, which a capacity needs; mount it with locks, or omit capacity"
                raise BackendError(f"{path}: {why}") from None
            raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
