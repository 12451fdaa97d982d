"""Whose a folder is. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from kvtier_core.errors import BackendError


class Claim:
    """A folder that belongs to this user, and to this process alone from `take` to `release`."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: int | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None

    def take(self) -> None:
        """Make the folder if it is not there. One that was removed and made again is claimed anew."""
        make_ours(self.path)
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise BackendError(f"{self.path}: this user may not write here", retryable=False)
        before, self._lock = self._lock, _lock(self.path)
        if before is not None:
            _unlock(before)

    def release(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            _unlock(lock)

    def still_there(self) -> bool:
        """Is the path still the folder that was claimed?"""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except FileNotFoundError:
            return False


def make_ours(path: Path) -> None:
    """Make a folder if it is not there, and those above it."""
    for folder in reversed((path, *path.parents)):  # mkdir would leave those above as open as the umask does
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    must_be_ours(path)


def must_be_ours(path: Path) -> None:
    """Nobody else may put a frame there, or another folder in its place: a checksum is no signature."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise BackendError(f"{path}: a link; name the folder itself", retryable=False)
    if not stat.S_ISDIR(status.st_mode):
        raise BackendError(f"{path}: not a folder", retryable=False)
    if status.st_uid != os.geteuid():
        raise BackendError(f"{path}: belongs to user {status.st_uid}; kvtier keeps to its own", retryable=False)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise BackendError(f"{path}: others may write to it; take that away with chmod go-w", retryable=False)


def _lock(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise BackendError(
            f"{folder}: another live process keeps its frames here; give each engine a path of its own",
            retryable=False,
        ) from None
    return lock


def _unlock(lock: int) -> None:
    # A process forked from this one has the lock too; closing alone would leave it there.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
