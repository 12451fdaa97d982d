"""All that lies in a folder of frames, for `kvtier fsck`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Stored
from kvtier_disk.claim import Claim
from kvtier_disk.folder import Found, everything, set_aside

_T = TypeVar("_T")


@contextlib.contextmanager
def everything_in(path: Path) -> Iterator[Iterator[Stored]]:
    """Every other process is kept out meanwhile. Raises BackendError."""
    if not path.is_dir():
        raise BackendError(f"{path}: no such folder", retryable=False)
    claim = Claim(path)
    claim.take()
    try:
        yield _walk(path)
    finally:
        claim.release()


def _walk(path: Path) -> Iterator[Stored]:
    for file, found in everything(path):
        yield _stored(file, found)
    for found in set_aside(path):
        yield _stored(found.path, found)


def _stored(file: Path, found: Found | None) -> Stored:
    return Stored(
        where=str(file),
        nbytes=file.lstat().st_size,
        home=bytes.fromhex(found.home) if found else None,
        key=found.key if found else None,
        read=functools.partial(_told, file.read_bytes),
        remove=functools.partial(_told, file.unlink),
    )


def _told(act: Callable[[], _T]) -> _T:
    try:
        return act()
    except OSError as error:
        raise BackendError(f"{error.filename}: {error.strerror}") from error
