"""A folder that processes on several machines use at the same time. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder, NotOurs, nearest
from kvtier_core.storekit.trial import TrialFolder

#: The file that marks the folder as shared; it also holds the account of a capacity.
SHARED = ".kvtier-shared"


def is_shared(folder: Folder) -> bool:
    """Do several engines use this folder? Another user's file of that name says nothing."""
    try:
        return folder.status(SHARED).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def must_not_be_shared(folder: Folder) -> None:
    if is_shared(folder):
        raise BackendError(
            f"{folder.path}: several engines share this folder; write shared: true, "
            f"or remove {SHARED} from it once no engine uses it"
        )


class SharedFolder:
    """A folder of this user, from `take` to `release`.

    It is opened again for every call: over a network, a descriptor may outlive what it refers to, and only opening
    makes NFS ask its server whether the folder has changed.
    """

    def __init__(self, path: Path, *, trial: bool = False):
        """In a ``trial`` it is a `TrialFolder`."""
        self.path = path
        self._kind = TrialFolder if trial else Folder
        self._known: os.stat_result | None = None

    def take(self) -> Folder:
        """Make the folder if it is missing, mark it as shared, and return it. What kubelet has opened is removed."""
        folder = self._kind.at(self.path, make=True)
        self._know(folder)
        folder.clear_opened()
        return folder

    def release(self) -> None:
        """Stop using the folder. May be called twice."""
        self._known = None

    def folder(self) -> Folder | None:
        """The folder as it is now; None if it does not exist.

        Another folder at its path is used if it belongs to this user alone, and is on the same device or marked as
        shared: the empty mount point of an unmounted file system is neither.
        """
        known = self._must_be_known()
        try:
            folder = self._kind.at(self.path)
        except FileNotFoundError:
            if nearest(self.path).stat().st_dev != known.st_dev:
                raise self._unmounted() from None
            return None
        status = os.fstat(folder.fd)
        if not os.path.samestat(status, known):
            if status.st_dev != known.st_dev and not is_shared(folder):
                raise self._unmounted()
            self._know(folder)
        return folder

    def folder_again(self) -> Folder:
        """The folder as it is now; made again if it was removed, or opened to a group."""
        with contextlib.suppress(NotOurs):
            if (folder := self.folder()) is not None:
                return folder
        return self.take()

    def _know(self, folder: Folder) -> None:
        os.close(folder.open(SHARED, os.O_RDWR | os.O_CREAT))
        self._known = os.fstat(folder.fd)

    def _must_be_known(self) -> os.stat_result:
        if (known := self._known) is None:
            raise BackendError(f"{self.path}: the tier is closed")
        return known

    def _unmounted(self) -> BackendError:
        return BackendError(f"{self.path}: not on the file system that was opened; is it mounted?")
