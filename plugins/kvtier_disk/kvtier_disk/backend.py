"""One file per frame in a folder."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_disk.files import nbytes_of, probe_direct, read_frame, write_frame
from kvtier_disk.folder import Folder
from kvtier_disk.room import Room, free_of

#: What no second attempt changes; everything else (full, busy, stale, I/O error) may pass.
_LASTING = {
    errno.EACCES,
    errno.EFBIG,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class DiskBackend(Backend):
    def __init__(self, config: DiskConfig, ctx: OpenContext):
        self._config = config
        self._folder = Folder(config.path, ctx.namespace)
        with self._errors():
            self._folder.claim()
            try:
                others = self._folder.sweep()
                used = sum(found.nbytes for found in [*others, *self._folder.frames()])
                self._room = Room(ctx.capacity - used, ((found.path, found.nbytes) for found in others))
                self._direct = self._effective_direct()
            except BaseException:
                self._folder.release()
                raise

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with self._errors():
            return [nbytes_of(self._folder.file(key)) > 0 for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        with self._errors():
            return [
                read_frame(self._folder.file(key), view, direct=self._direct)
                for key, view in zip(keys, into, strict=True)
            ]

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        with self._errors():
            self._check_open()
            if not self._folder.still_there():
                self._folder.claim()
            self._check_free(sum(map(len, frames)))
            for key, frame in zip(keys, frames, strict=True):
                self._write_one(key, frame)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._errors():
            self._check_open()
            for key in keys:
                file = self._folder.file(key)
                nbytes = nbytes_of(file)
                file.unlink(missing_ok=True)
                self._room.give(nbytes)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        with self._errors():
            return iter([(found.key, found.nbytes) for found in self._folder.frames()])

    def facts(self) -> Mapping[str, str]:
        return {"direct": f"{self._config.direct} -> {'on' if self._direct else 'off'}"}

    def close(self) -> None:
        with self._errors():
            self._folder.release()

    def _write_one(self, key: ChunkKey, frame: memoryview) -> None:
        file = self._folder.file(key)
        growth = len(frame) - nbytes_of(file)
        self._room.take(growth)
        try:
            try:
                write_frame(file, frame, direct=self._direct)
            except FileNotFoundError:
                self._folder.make_place(key)
                write_frame(file, frame, direct=self._direct)
        except OSError:
            self._room.give(growth)
            raise

    def _check_open(self) -> None:
        """What is closed may already be another process's."""
        if not self._folder.claimed:
            raise BackendError(f"{self._config.path}: the tier is closed", retryable=False)

    def _check_free(self, nbytes: int) -> None:
        free = free_of(self._config.path)
        if free - nbytes < self._config.min_free:
            raise BackendError(
                f"{self._config.path}: {Nbytes(nbytes)} to write and {Nbytes(free)} free, "
                f"of which min_free keeps {self._config.min_free}"
            )

    def _effective_direct(self) -> bool:
        if self._config.direct == "off":
            return False
        try:
            probe_direct(self._config.path)
        except OSError as error:
            if self._config.direct == "on":
                raise BackendError(
                    f"{self._config.path}: direct is on, but no page can be written past the page cache: "
                    f"{error.strerror}; with direct: auto the page cache is used",
                    retryable=False,
                ) from error
            return False
        return True

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{error.filename or self._config.path}: {error.strerror}"
            raise BackendError(why, retryable=error.errno not in _LASTING) from error
