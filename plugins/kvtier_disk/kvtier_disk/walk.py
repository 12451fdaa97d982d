"""Lists everything in a folder of frames, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError, Gone
from kvtier_core.interfaces import Stored
from kvtier_core.storekit.disk_access import PROBE
from kvtier_core.storekit.folder import Folder, backend_errors
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_disk.files import is_gone
from kvtier_disk.frames import Found, Place, everything_of, is_unfinished, namespace_folders, quarantined
from kvtier_disk.shared_folder import must_not_be_shared

#: Seconds after which no process is still writing an unfinished file.
_ABANDONED = 24 * 3600.0


@contextlib.contextmanager
def everything_in(path: Path) -> Iterator[Iterator[Stored]]:
    """Everything in the folder, which is locked meanwhile. Raises BackendError, also when an engine uses it."""
    _must_exist(path)
    lock = FolderLock(path, must_not_be_shared, looking=True)
    with backend_errors(path):
        root = lock.take()
    try:
        yield (listed.stored(found) for listed, found in _listed(root))
    finally:
        lock.release()


def everything_shared_in(path: Path) -> Iterator[Stored]:
    """Everything in a folder that engines may use meanwhile, except what they may still be writing.

    Raises BackendError, also during the iteration.
    """
    _must_exist(path)
    with backend_errors(path):
        root = Folder.at(path, looking=True)
    before = time.time() - _ABANDONED
    return (
        listed.stored(found)
        for listed, found in _listed(root, probes=True)
        if listed.status.st_mtime < before or not listed.is_unfinished
    )


def _must_exist(path: Path) -> None:
    if not os.path.isdir(path):
        raise BackendError(f"{path}: no such folder; is it mounted?")


def _listed(root: Folder, *, probes: bool = False) -> Iterator[tuple[_Listed, Found | None]]:
    """The entries of the folder; with ``probes`` also the probes that a killed process left."""
    with backend_errors(root.path):
        places = [(Place((), entry.name), None) for entry in root.entries() if probes and entry.name.startswith(PROBE)]
        frames = (each for name in namespace_folders(root) for each in everything_of(root, name))
        damaged = ((found.place, found) for found in quarantined(root))
        for place, found in itertools.chain(places, frames, damaged):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                yield _Listed(root, place, place.folder(root).status(place.name)), found


@attrs.frozen
class _Listed:
    """A file, or whatever is in place of one."""

    root: Folder
    place: Place
    status: os.stat_result

    @property
    def is_unfinished(self) -> bool:
        return is_unfinished(self.place.name) or self.place.name.startswith(PROBE)

    def stored(self, found: Found | None) -> Stored:
        return Stored(
            where=str(self.place.under(self.root.path)),
            nbytes=self.place.nbytes(self.root),
            home=bytes.fromhex(found.namespace_folder) if found else None,
            key=found.key if found else None,
            read=self.read,
            remove=self.remove,
        )

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._errors() as folder:
            file = folder.open(self.place.name, os.O_RDONLY)
            try:
                self._must_be(os.fstat(file))
                return os.pread(file, nbytes, offset)
            finally:
                os.close(file)

    def remove(self) -> None:
        with self._errors() as folder:
            self._must_be(folder.status(self.place.name))
            folder.remove(self.place.name)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Folder]:
        path = self.place.under(self.root.path)
        with backend_errors(path):
            try:
                yield self.place.folder(self.root)
            except OSError as error:
                if is_gone(error):
                    raise Gone(f"{path}: no longer there") from error
                raise

    def _must_be(self, status: os.stat_result) -> None:
        """Raise Gone if this is another file than the one that was listed."""
        if not os.path.samestat(status, self.status) or status.st_mtime_ns != self.status.st_mtime_ns:
            raise Gone(f"{self.place.under(self.root.path)}: replaced since it was listed")
