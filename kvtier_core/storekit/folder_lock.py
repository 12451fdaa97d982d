"""Locks a folder for one process at a time. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder


class FolderLock:
    """A folder of this user, locked by this process from `take` to `release`."""

    def __init__(self, path: Path, check: Callable[[Folder], None] = lambda folder: None):
        """``check`` raises BackendError for a folder that is not to be used; it is called when the folder is locked."""
        self.path = path
        self._check = check
        self._folder: Folder | None = None

    def take(self) -> Folder:
        """Make the folder if it is missing, lock it, and return it."""
        before, self._folder = self._folder, self._locked()
        if before is not None:
            _unlock(before)
        return self._folder

    def release(self) -> None:
        """Unlock the folder. May be called twice."""
        if self._folder is not None:
            folder, self._folder = self._folder, None
            _unlock(folder)

    def folder(self) -> Folder | None:
        """The locked folder; None if its path is gone.

        Raises NotADirectoryError or BackendError when something else lies at the path: it is never read.
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
        raise BackendError(f"{self.path}: another folder than the one that was opened; nothing in it is used")

    def folder_again(self) -> Folder:
        """The locked folder. If it was removed, it is made and locked again.

        An empty folder at its path, on the same device, is taken for one that was made again.
        """
        held = self._held()
        try:
            return self.folder() or self.take()
        except NotADirectoryError:
            return self.take()  # raises an error that says what is there
        except BackendError:
            other = Folder.at(self.path)
            if os.fstat(other.fd).st_dev != os.fstat(held.fd).st_dev or other.entries():
                raise
            return self.take()

    def _held(self) -> Folder:
        """The locked folder. Raises BackendError after `release`: another process may then use the folder."""
        if (held := self._folder) is None:
            raise BackendError(f"{self.path}: the tier is closed")
        return held

    def _locked(self) -> Folder:
        folder = Folder.at(self.path, make=True)
        try:
            fcntl.flock(folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackendError(
                f"{self.path}: another engine or tier keeps its frames here; give each a path of its own"
            ) from None
        try:
            self._check(folder)
        except BaseException:
            _unlock(folder)
            raise
        return folder


def _unlock(folder: Folder) -> None:
    # A process forked from this one holds the lock too; closing the descriptor alone would leave it locked.
    fcntl.flock(folder.fd, fcntl.LOCK_UN)
