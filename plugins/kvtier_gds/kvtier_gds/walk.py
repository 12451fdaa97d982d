"""Everything in a slab, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Stored
from kvtier_core.storekit.folder import backend_errors
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_gds.slab import FRAMES, TABLE
from kvtier_gds.table import Record, Table, without_overlaps


@contextlib.contextmanager
def everything_in(path: Path) -> Iterator[Iterator[Stored]]:
    """The frames of the slab in this folder, which is locked meanwhile.

    Raises BackendError, also when an engine uses it.
    """
    if not os.path.isdir(path):
        raise BackendError(f"{path}: no such folder; is it mounted?")
    with contextlib.ExitStack() as closing:
        with backend_errors(path):
            found = _listed(path, closing)
        yield (each.stored() for each in found)


def _listed(path: Path, closing: contextlib.ExitStack) -> list[_Listed]:
    """The frames of the slab; its files stay open, and its folder locked, until ``closing`` closes."""
    lock = FolderLock(path, looking=True)
    folder = lock.take()
    closing.callback(lock.release)
    if not {FRAMES, TABLE} <= {entry.name for entry in folder.entries()}:
        return []
    frames = folder.open(FRAMES, os.O_RDONLY)
    closing.callback(os.close, frames)
    records = folder.open(TABLE, os.O_RDWR)
    closing.callback(os.close, records)
    table = Table(records)
    kept = without_overlaps(table.records(), os.fstat(frames).st_size)
    return [_Listed(path, frames, table, entry, Record(*fields)) for entry, *fields in kept.tolist()]


@attrs.frozen
class _Listed:
    """A frame in a slab."""

    path: Path
    frames: int
    table: Table
    entry: int
    record: Record

    def stored(self) -> Stored:
        where = f"{self.path / FRAMES} at {self.record.at}"
        return Stored(where, self.record.nbytes, self.record.namespace, self.record.key, self.read, self.remove)

    def read(self, offset: int, nbytes: int) -> bytes:
        with backend_errors(self.path):
            left = max(0, self.record.nbytes - offset)
            return os.pread(self.frames, min(nbytes, left), self.record.at + offset)

    def remove(self) -> None:
        with backend_errors(self.path):
            self.table.clear(self.entry)
