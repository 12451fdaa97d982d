"""Lists everything in a folder of frames, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Stored
from kvtier_disk.folder import Folder
from kvtier_disk.folder_lock import FolderLock
from kvtier_disk.frames import Found, Place, everything, quarantined

_T = TypeVar("_T")


@contextlib.contextmanager
def everything_in(path: Path) -> Iterator[Iterator[Stored]]:
    """Everything in the folder, which is locked meanwhile. Raises BackendError, also when an engine uses it."""
    if not path.is_dir():
        raise BackendError(f"{path}: no such folder")
    lock = FolderLock(path)
    root = _with_path(path, lock.take)
    try:
        yield _walk(root)
    finally:
        lock.release()


def _walk(root: Folder) -> Iterator[Stored]:
    for place, found in everything(root):
        yield _stored(root, place, found)
    for found in quarantined(root):
        yield _stored(root, found.place, found)


def _stored(root: Folder, place: Place, found: Found | None) -> Stored:
    path = place.under(root.path)
    return Stored(
        where=str(path),
        nbytes=place.nbytes(root),
        home=bytes.fromhex(found.namespace_folder) if found else None,
        key=found.key if found else None,
        read=functools.partial(_read, root, place, path),
        remove=functools.partial(_with_path, path, functools.partial(place.remove, root)),
    )


def _read(root: Folder, place: Place, path: Path, offset: int, nbytes: int) -> bytes:
    def read() -> bytes:
        fd = place.folder(root).open(place.name, os.O_RDONLY)
        try:
            return os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)

    return _with_path(path, read)


def _with_path(path: Path, act: Callable[[], _T]) -> _T:
    try:
        return act()
    except OSError as error:
        raise BackendError(f"{error.filename or path}: {error.strerror}") from error
