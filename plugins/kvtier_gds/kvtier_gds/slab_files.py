"""The files of slabs as a worker process of the engine opens them, for reading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.storekit.disk_access import raise_if_store_failed
from kvtier_core.storekit.files import read_files, ring_works
from kvtier_core.storekit.folder import Folder, NoFile, backend_errors, why_no_file
from kvtier_core.transfer.own_shard import FrameRange
from kvtier_gds.slab import FRAMES, Extent


class SlabFiles:
    """The files of all slabs, open for reading: the `FrameSource` of a worker."""

    def __init__(self, described: Sequence[Sequence]):
        """``described``: each slab as in `Slab.description`. Raises BackendError."""
        with contextlib.ExitStack() as undoing:
            self._files = [_open(undoing, *each) for each in described]
            self._closing = undoing.pop_all()
        self._direct = any(file.direct for file in self._files)
        self._ring = all(file.ring for file in self._files) and ring_works()

    @property
    def fds(self) -> list[int]:
        """By the number of the slab."""
        return [file.fd for file in self._files]

    def read(self, ranges: Sequence[FrameRange], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        return self.read_extents([Extent.of(each) for each in ranges], into)

    def read_extents(self, extents: Sequence[Extent], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        """As `read`."""
        files = [self._files[extent.slab] for extent in extents]
        fds, at = [file.fd for file in files], [extent.at for extent in extents]
        outcomes = read_files(fds, into, ring=self._ring, direct=self._direct, at=at)
        for file in self._files:
            with backend_errors(file.folder.path):
                its = [outcome for each, outcome in zip(files, outcomes, strict=True) if each is file]
                raise_if_store_failed(its, file.folder)
        self.must_be_ours()
        return [
            BackendError(f"{file.folder.path}: at {extent.at}: {outcome.strerror}")
            if isinstance(outcome, OSError)
            else outcome
            for file, extent, outcome in zip(files, extents, outcomes, strict=True)
        ]

    def must_be_ours(self) -> None:
        """Raise NoFile if others could have written what was read. Call it after a read, and before that counts."""
        for file in self._files:
            file.must_be_ours()

    def facts(self) -> Mapping[str, str]:
        return {"read with": f"{'O_DIRECT' if self._direct else 'page cache'}, {'io_uring' if self._ring else 'calls'}"}

    def leave_open(self) -> None:
        """A call that hangs may still use the files: `close` does not close them."""
        self._closing = contextlib.ExitStack()

    def close(self) -> None:
        self._closing.close()


@attrs.define
class _File:
    folder: Folder
    fd: int
    direct: bool
    ring: bool
    _opened: str = ""  # why it is not used any more

    def must_be_ours(self) -> None:
        """As `Slab.must_be_ours`: a file without a name is one that was opened to others, or removed."""
        status = os.fstat(self.fd)
        self._opened = self._opened or why_no_file(status) or ("" if status.st_nlink else "it was removed")
        if self._opened:
            raise NoFile(
                f"{self.folder.path / FRAMES}: {self._opened}; it is no longer used; a restart begins a new file"
            )


def _open(undoing: contextlib.ExitStack, path: str, device: int, inode: int, direct: bool, ring: bool) -> _File:
    """A slab, if it is still the one of the tier's process."""
    with backend_errors(Path(path)):
        folder = Folder.at(Path(path))
        fd = folder.open(FRAMES, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        undoing.callback(os.close, fd)
        status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (device, inode):
        raise BackendError(f"{path}: another file has replaced the slab; restart the engine")
    return _File(folder, fd, direct, ring)
