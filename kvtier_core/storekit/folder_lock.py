"""Locks a folder for one process at a time. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.forks import ProcessBound
from kvtier_core.storekit.folder import Folder, must_be_makeable


class FileLock(ProcessBound, closing={"release": lambda: None}):
    """Locks an open file, or folder, until `release`. Raises BlockingIOError if it is locked already."""

    def __init__(self, fd: int):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._fd = fd

    def release(self) -> None:
        """Call it before the file is closed: a process that was forked meanwhile has it open, too."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class FolderLock:
    """A folder of this user, locked by this process from `take` to `release`."""

    def __init__(self, path: Path, check: Callable[[Folder], None] = lambda folder: None, *, looking: bool = False):
        """``check`` raises BackendError for a locked folder that must not be used. ``looking``: see `Folder.at`."""
        self.path = path
        self._looking = looking
        self._check = check
        self._locked: tuple[Folder, FileLock] | None = None

    def take(self) -> Folder:
        """Make the folder if it is missing, lock it, and return it."""
        folder = Folder.at(self.path, make=True, looking=self._looking)
        before, self._locked = self._locked, (folder, self._lock(folder))
        if before is not None:
            before[1].release()
        return folder

    def try_out(self) -> None:
        """Raise the errors that `take` would, and make nothing."""
        try:
            folder = Folder.at(self.path, looking=True)
        except FileNotFoundError:
            must_be_makeable(self.path)
        else:
            self._lock(folder).release()

    def _lock(self, folder: Folder) -> FileLock:
        try:
            lock = FileLock(folder.fd)
        except BlockingIOError:
            raise BackendError(
                f"{self.path}: another engine or tier keeps its frames here; stop it, or give each its own path"
            ) from None
        try:
            self._check(folder)
        except BaseException:
            lock.release()
            raise
        return lock

    def release(self) -> None:
        """Unlock the folder. May be called twice."""
        if self._locked is not None:
            (_, lock), self._locked = self._locked, None
            lock.release()

    def folder(self) -> Folder | None:
        """The locked folder; None if its path is gone.

        Raises NotADirectoryError or BackendError if something else is at the path: it is never read.
        """
        held = self._held()
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if os.path.samestat(status, os.fstat(held.fd)):
            return held
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        raise BackendError(f"{self.path}: not the folder that was opened; nothing in it is used")

    def folder_again(self) -> Folder:
        """The locked folder. If it was removed, it is made and locked again.

        An empty folder at its path, on the same device, is treated as one that was made again.
        """
        held = self._held()
        try:
            return self.folder() or self.take()
        except NotADirectoryError:
            return self.take()  # raises an error that names what is there
        except BackendError:
            other = Folder.at(self.path)
            if os.fstat(other.fd).st_dev != os.fstat(held.fd).st_dev or other.entries():
                raise
            return self.take()

    def _held(self) -> Folder:
        """The locked folder. Raises BackendError after `release`: another process may then use the folder."""
        if self._locked is None:
            raise BackendError(f"{self.path}: the tier is closed")
        return self._locked[0]
