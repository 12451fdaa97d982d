"""One file per frame in a folder."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.files import ring_works
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey, Nbytes
from kvtier_disk.claim import Claim
from kvtier_disk.config import DiskConfig
from kvtier_disk.files import (
    Access,
    discard,
    nbytes_of,
    probe_direct,
    publish,
    read_frames,
    remove_probe,
    write_unfinished,
)
from kvtier_disk.folder import Found, Home, everything, set_aside
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
        self._claim = Claim(config.path)
        self._home = Home(config.path, ctx.namespace)
        with self._errors():
            self._claim.take()
            try:
                self._home.make()
                others = self._sweep()
                used = sum(found.nbytes for found in [*others, *self._home.frames()])
                self._room = Room(ctx.capacity - used, ((found.path, found.nbytes) for found in others))
                self._access = self._effective_access()
            except BaseException:
                self._claim.release()
                raise

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with self._errors():
            return [nbytes_of(self._home.file(key)) > 0 for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        with self._errors():
            return read_frames([self._home.file(key) for key in keys], into, self._access)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        with self._errors():
            self._check_open()
            if not self._claim.still_there():
                self._claim.take()
            self._check_free(sum(map(len, frames)))
            self._write([self._home.file(key) for key in keys], frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._errors():
            self._check_open()
            for key in keys:
                file = self._home.file(key)
                nbytes = nbytes_of(file)
                file.unlink(missing_ok=True)
                self._room.give(nbytes)

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Damaged frames are moved aside as long as there is room for them, and count as others' from then on."""
        with self._errors():
            self._check_open()
            for key in keys:
                file = self._home.file(key)
                nbytes = nbytes_of(file)
                if nbytes and self._aside_nbytes() + nbytes <= self._config.quarantine:
                    self._room.leave(self._home.put_aside(key), nbytes)
                else:
                    file.unlink(missing_ok=True)
                    self._room.give(nbytes)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        with self._errors():
            return iter([(found.key, found.nbytes) for found in self._home.frames()])

    def facts(self) -> Mapping[str, str]:
        return {
            "direct": f"{self._config.direct} -> {'on' if self._access.direct else 'off'}",
            "io": f"{self._config.io} -> {'io_uring' if self._access.ring else 'calls'}",
        }

    def close(self) -> None:
        with self._errors():
            self._claim.release()

    def _write(self, files: Sequence[Path], frames: Sequence[memoryview]) -> None:
        growths = [len(frame) - nbytes_of(file) for file, frame in zip(files, frames, strict=True)]
        self._room.take(sum(growths))
        published = 0
        try:
            try:
                write_unfinished(files, frames, self._access)
            except FileNotFoundError:
                self._home.make_places(files)
                write_unfinished(files, frames, self._access)
            for file in files:
                publish(file)
                published += 1
        except OSError:
            discard(files[published:])
            self._room.give(sum(growths[published:]))
            raise

    def _sweep(self) -> list[Found]:
        """Remove what is no frame, in every namespace; what is not this one's, oldest first."""
        remove_probe(self._config.path)
        others = set_aside(self._config.path)
        for file, found in everything(self._config.path):
            if found is None:
                file.unlink()
            elif found.home != self._home.name:
                others.append(found)
        return sorted(others)

    def _aside_nbytes(self) -> int:
        """Of the damaged frames that are kept."""
        return sum(found.nbytes for found in set_aside(self._config.path))

    def _check_open(self) -> None:
        """What is closed may already be another process's."""
        if not self._claim.held:
            raise BackendError(f"{self._config.path}: the tier is closed", retryable=False)

    def _check_free(self, nbytes: int) -> None:
        free = free_of(self._config.path)
        if free - nbytes < self._config.min_free:
            raise BackendError(
                f"{self._config.path}: {Nbytes(nbytes)} to write and {Nbytes(free)} free, "
                f"of which min_free keeps {self._config.min_free}"
            )

    def _effective_access(self) -> Access:
        direct = self._effective_direct()
        if self._config.io == "calls" or (self._config.io == "auto" and not direct):
            return Access(direct, ring=False)  # through the page cache a ring only adds a thread of the kernel's
        ring = ring_works()
        if self._config.io == "io_uring" and not ring:
            raise BackendError(
                f"{self._config.path}: io is io_uring, and there is none here: kvtier was built without it, or the "
                "kernel or a container's rules forbid it; with io: auto plain calls are used",
                retryable=False,
            )
        return Access(direct, ring)

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
