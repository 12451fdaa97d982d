"""Plain file I/O: the baseline that a tier on the same disk is compared to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier_core.storekit.files import read_files, write_files
from kvtier_core.types import ChunkKey


class RawFiles:
    """Files that are opened, read or written by one call, and closed, one after the other."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        for key, view in zip(keys, frames, strict=True):
            fd = os.open(self.folder / key.hex(), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            must(os.pwritev(fd, [view], 0) == len(view))
            os.close(fd)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            fd = os.open(self.folder / key.hex(), os.O_RDONLY | os.O_DIRECT)
            must(os.preadv(fd, [view], 0) == len(view))
            os.close(fd)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            (self.folder / key.hex()).unlink(missing_ok=True)


class RawPlaces:
    """One preallocated file, in which each key has a place; one call each, one after the other."""

    def __init__(self, file: Path, keys: Sequence[ChunkKey], nbytes: int):
        self._at = {key: number * nbytes for number, key in enumerate(keys)}
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes * len(keys))

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        for key, view in zip(keys, frames, strict=True):
            must(os.pwritev(self._fd, [view], self._at[key]) == len(view))

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            must(os.preadv(self._fd, [view], self._at[key]) == len(view))

    def close(self) -> None:
        os.close(self._fd)


class RingFiles:
    """Files that are opened once, and read or written all at once by one io_uring."""

    def __init__(self, folder: Path, count: int):
        folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self.fds = [os.open(folder / str(number), flags, 0o600) for number in range(count)]

    def empty(self) -> None:
        for fd in self.fds:
            os.ftruncate(fd, 0)

    def write(self, frames: Sequence[memoryview]) -> None:
        write_files(self.fds, frames, ring=True)

    def read(self, into: Sequence[memoryview]) -> None:
        must(read_files(self.fds, into, ring=True) == [len(view) for view in into])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def must(moved: bool) -> None:
    if not moved:
        raise RuntimeError("not everything was moved")
