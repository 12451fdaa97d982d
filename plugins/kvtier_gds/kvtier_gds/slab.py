"""One preallocated file with frames, and the table beside it, in a folder that this process locks. Raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple, Self, cast

import numpy as np

from kvtier_core.errors import BackendError
from kvtier_core.storekit import trial
from kvtier_core.storekit.disk_access import FULL, effective_access, remove_probes
from kvtier_core.storekit.files import bounce, write_files
from kvtier_core.storekit.folder import Folder, NoFile, why_no_file
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.transfer.own_shard import FrameRange
from kvtier_core.types import size
from kvtier_gds.extents import Extents
from kvtier_gds.table import RECORD_NBYTES, Found, Record, Table, gaps, without_overlaps

logger = logging.getLogger("kvtier")

FRAMES = "kvtier.slab"
TABLE = "kvtier.table"

#: Errors of a file system that cannot allocate the blocks of a file before they are written.
_CANNOT = {errno.EOPNOTSUPP, errno.ENOSYS}

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class Extent(NamedTuple):
    """Some bytes of a slab."""

    slab: int  #: its number, from 0
    at: int  #: a multiple of `FRAME_ALIGNMENT`
    nbytes: int

    @classmethod
    def of(cls, some: FrameRange) -> Self:
        """The place of these bytes of a frame."""
        slab, at = cast(tuple[int, int], some.frame.location.place)
        return cls(slab, at + some.offset, some.nbytes)


class Place(NamedTuple):
    """Where a frame is, or will be."""

    slab: Slab
    entry: int  #: in the slab's table
    at: int
    nbytes: int


class Slab:
    """`reserve` and `release` are called by one thread at a time; `publish` and `clear` wait for the disk."""

    def __init__(self, path: Path, nbytes: int, frame_nbytes: int, *, direct: str, io: str, checking: bool = False):
        """Make or open the slab in this folder, with room for ``nbytes``, in frames of mostly ``frame_nbytes``.

        Frames beyond that room are dropped. With ``checking`` nothing changes, and nothing is allocated. Also raises
        BackendError.
        """
        self.path = path
        self._checking = checking
        self._lock = FolderLock(path, trial=checking)
        self._opened = ""  # why the file is not used any more
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._lock.release)
            self.folder: Folder = self._lock.take()
            remove_probes(self.folder)
            self.direct, self.ring = effective_access(path, self.folder, direct=direct, io=io)
            flags = os.O_RDWR | os.O_CREAT
            self.fd = self.folder.open(FRAMES, flags | (os.O_DIRECT if self.direct else 0))
            undoing.callback(os.close, self.fd)
            self._table_fd = self.folder.open(TABLE, flags)
            undoing.callback(os.close, self._table_fd)
            self._table = Table(self._table_fd)
            self._found = self._recover(nbytes)
            resize = functools.partial(self._would_resize, undoing) if checking else self._resize
            self.preallocated = resize(self.fd, nbytes)
            self._entries = int(self._found["entry"].max(initial=-1)) + 1  # the first that was never used
            resize(self._table_fd, RECORD_NBYTES * max(nbytes // frame_nbytes, self._entries))
            self._closing = undoing.pop_all()
        self._extents = Extents(gaps(self._found, nbytes))
        unused = np.delete(np.arange(self._entries), self._found["entry"])
        self._free_entries: list[int] = unused[::-1].tolist()

    @property
    def free(self) -> int:
        return self._extents.free

    @property
    def description(self) -> list[str | int]:
        """How another process opens its file: path, device, inode, with O_DIRECT, with io_uring."""
        status = os.fstat(self.fd)
        return [str(self.path), status.st_dev, status.st_ino, self.direct, self.ring]

    def take_found(self) -> Found:
        """The frames that were here at the start; only the first call returns them."""
        found, self._found = self._found, np.empty(0, self._found.dtype)
        return found

    def reserve(self, nbytes: int) -> Place | None:
        """A place for a frame; None if no free extent is long enough."""
        at = self._extents.take(nbytes)
        if at is None:
            return None
        if self._free_entries:
            return Place(self, self._free_entries.pop(), at, nbytes)
        self._entries += 1
        return Place(self, self._entries - 1, at, nbytes)

    def release(self, place: Place) -> None:
        """Free the place again; its record is cleared, or was never written."""
        self._extents.give(place.at, place.nbytes)
        self._free_entries.append(place.entry)

    def publish(self, place: Place, record: Record) -> None:
        """Record that the frame at this place is whole: it is found after a restart."""
        self._table.put(place.entry, record)

    def clear(self, place: Place) -> None:
        """The frame at this place is no longer found, not even after a restart."""
        self._table.clear(place.entry)

    def erase(self, place: Place) -> None:
        """As `clear`, after overwriting the place with zeros."""
        write_files([self.fd], [bounce(place.nbytes)], ring=self.ring, direct=self.direct, at=[place.at])
        self.clear(place)

    def must_be_ours(self) -> None:
        """Raise NoFile if others can read or write the frames, or could when this was called before.

        They may still have the file open. Call it after a read or write, and before its outcome counts.
        """
        if not self._opened and (why := why_no_file(os.fstat(self.fd))):
            self._opened = why
            logger.warning(
                "kvtier: %s: others were given access to it, as kubelet does with fsGroup when another pod starts; "
                "they may have read frames, and no frame in it is used any more; a restart begins a new file",
                self.path / FRAMES,
            )
            self._abandon()
        if self._opened:
            raise NoFile(f"{self.path / FRAMES}: {self._opened}; it is no longer used; a restart begins a new file")

    def _abandon(self) -> None:
        """Workers and the next start do not use it either, even if somebody has closed it to others by then."""
        with contextlib.suppress(OSError):
            for name, fd in ((FRAMES, self.fd), (TABLE, self._table_fd)):
                if os.path.samestat(self.folder.status(name), os.fstat(fd)):
                    self.folder.remove_made(name)
            os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close the files and unlock the folder. May be called twice."""
        self._closing.close()

    def _recover(self, nbytes: int) -> Found:
        """The frames that are here. Other records in the table are cleared before their places are used."""
        found = self._table.records()
        kept = without_overlaps(found, min(nbytes, os.fstat(self.fd).st_size))
        if len(kept) < len(found) and not self._checking:
            for entry in np.setdiff1d(found["entry"], kept["entry"]).tolist():
                self._table.clear(entry)
        return kept

    def _resize(self, fd: int, nbytes: int) -> bool:
        """Give a file of the slab this length and its blocks. Returns False if this file system cannot allocate blocks.

        Raises BackendError if there is no room; then the file is as it was.
        """
        before = os.fstat(fd).st_size
        if before > nbytes:
            os.ftruncate(fd, nbytes)
        try:
            return _allocated(fd, nbytes)
        except OSError as error:
            os.ftruncate(fd, min(before, nbytes))
            if error.errno not in FULL:
                raise
            raise self._too_large(nbytes, str(error.strerror)) from error

    def _would_resize(self, undoing: contextlib.ExitStack, fd: int, nbytes: int) -> bool:
        """The result of `_resize`, which another slab that is open for a check may leave no room. Changes nothing."""
        status, system = os.fstat(fd), os.fstatvfs(fd)
        needed = -(-nbytes // system.f_frsize) * system.f_frsize - 512 * status.st_blocks
        if needed > 0:
            new = trial.nameless(".", os.O_RDWR, dir_fd=self.folder.fd)
            try:
                if not _allocated(new, 1):
                    return False
            finally:
                os.close(new)
        room = system.f_bavail * system.f_frsize - trial.taken[status.st_dev]
        if needed > max(0, room):
            raise self._too_large(nbytes, f"it has {size(room)}")
        trial.taken.update({status.st_dev: needed})
        undoing.callback(trial.taken.subtract, {status.st_dev: needed})
        return True

    def _too_large(self, nbytes: int, why: str) -> BackendError:
        why = f"{size(nbytes)} does not fit on this file system ({why})"
        return BackendError(f"{self.path}: {why}; free some space there, or lower the capacity")


def remove_slab(path: Path) -> None:
    """Remove the folder of a slab that no engine uses, and what kvtier made in it. What else is there stays."""
    with contextlib.suppress(OSError, BackendError):
        folder = Folder.at(path)
        for entry in folder.entries():
            with contextlib.suppress(NoFile):
                folder.remove_made(entry.name)
        path.rmdir()


def _allocated(fd: int, nbytes: int) -> bool:
    """Not `os.posix_fallocate`: where the file system cannot allocate, that writes to every block, for minutes."""
    while nbytes and _fallocate(fd, 0, 0, nbytes):
        error = ctypes.get_errno()
        if error in _CANNOT:
            os.ftruncate(fd, nbytes)
            return False
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))
    return True
