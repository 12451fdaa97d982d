"""Locks a folder for one process at a time. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.forks import ProcessBound
from kvtier_core.storekit.folder import Folder, nearest
from kvtier_core.storekit.trial import TrialFolder

_LOCK = ".kvtier-lock"


class FileLock(ProcessBound, closing={"release": lambda: None}):
    """Locks an open file until `release`. Raises BlockingIOError if it is locked already."""

    def __init__(self, fd: int):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._fd = fd

    def release(self) -> None:
        """Call it before the file is closed: a process that was forked meanwhile has it open, too."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class _Locked:
    """Closes its file when the last reference is gone, so that no thread finds another one under its number."""

    def __init__(self, folder: Folder, file: int):
        self.folder, self.file = folder, file
        self.lock = FileLock(file)

    def __del__(self) -> None:
        os.close(self.file)


class FolderLock:
    """A folder of this user, locked by this process from `take` to `release`.

    A file in it is locked, which only this user can open: whoever may read the folder could lock the folder itself.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[Folder], None] = lambda folder: None,
        *,
        looking: bool = False,
        trial: bool = False,
    ):
        """``check`` raises BackendError for a folder that must not be used.

        ``looking``: see `Folder.at`; in a ``trial`` it is a `TrialFolder`.
        """
        self.path = path
        self._kind = TrialFolder if trial else Folder
        self._looking = looking
        self._check = check
        self._locked: _Locked | None = None
        self._relocking = threading.Lock()

    def take(self) -> Folder:
        """Make the folder if it is missing, lock it, and return it."""
        held = self._lock(self._kind.at(self.path, make=True, looking=self._looking), looking=self._looking)
        self.release()
        self._locked = held
        return held.folder

    def try_out(self) -> None:
        """Raise the errors that `take` would, and make nothing."""
        lock = FolderLock(self.path, self._check, trial=True)
        lock.take()
        lock.release()

    def _lock(self, folder: Folder, flags: int = 0, *, looking: bool = False) -> _Locked:
        self._check(folder)
        file = _unchanged(folder, flags) if looking else folder.open(_LOCK, os.O_CREAT | flags)
        try:
            return _Locked(folder, file)
        except OSError as error:
            if error.errno == errno.EBADF and not flags & os.O_RDWR:  # NFS; elsewhere a disk could not become read-only
                return self._lock(folder, os.O_RDWR, looking=looking)
            raise (self._taken() if isinstance(error, BlockingIOError) else error) from None

    def _taken(self) -> BackendError:
        return BackendError(
            f"{self.path}: another engine or tier keeps its frames here; stop it, or give each its own path"
        )

    def release(self) -> None:
        """Unlock the folder. May be called twice."""
        held, self._locked = self._locked, None
        if held is not None:
            held.lock.release()

    def folder(self) -> Folder | None:
        """The locked folder; None if its path is gone.

        Raises NotADirectoryError or BackendError if something else is at the path: it is never read. The same if
        another process has locked the folder, and if its file system is not mounted any more.
        """
        held = self._held()
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            if nearest(self.path).stat().st_dev == os.fstat(held.folder.fd).st_dev:
                return None
            why = f"{self.path}: not on the file system that was opened; is it mounted?"
            raise BackendError(why) from None
        if os.path.samestat(status, os.fstat(held.folder.fd)):
            if not self._looking and self._kind is Folder and _is_lost(held.file):
                self._lock_again()
            return held.folder
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        raise BackendError(f"{self.path}: not the folder that was opened; nothing in it is used")

    def _lock_again(self) -> None:
        """Others may lock a file that was opened to them, once this process ends: another takes its place."""
        with self._relocking:
            held = self._held()
            if not _is_lost(held.file):
                return
            if os.fstat(held.file).st_nlink:
                held.folder.remove(_LOCK)
            try:
                self._locked = self._lock(held.folder, os.O_EXCL)
            except FileExistsError:  # of a process that has found the other one opened
                raise self._taken() from None
            held.lock.release()

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
            if not self.path.exists():
                raise
            other = Folder.at(self.path)
            if os.fstat(other.fd).st_dev != os.fstat(held.folder.fd).st_dev or other.entries():
                raise
            return self.take()

    def _held(self) -> _Locked:
        """Raises BackendError after `release`: another process may then use the folder."""
        if self._locked is None:
            raise BackendError(f"{self.path}: the tier is closed")
        return self._locked


def remove_if_unused(path: Path) -> None:
    """Remove a folder that is empty but for the file of a lock that no process has. Raises OSError, or BackendError."""
    if os.listdir(path) == [_LOCK]:
        FolderLock(path).try_out()
        path.joinpath(_LOCK).unlink()
    path.rmdir()


def _is_lost(file: int) -> bool:
    """Was the file of a lock removed, or opened to others?"""
    status = os.fstat(file)
    return not status.st_nlink or bool(status.st_mode & 0o077)


def _unchanged(folder: Folder, flags: int) -> int:
    """The file of the lock as it is; without one no process has locked the folder, and none is made."""
    try:
        return os.open(_LOCK, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    except FileNotFoundError:
        return os.dup(folder.fd)
