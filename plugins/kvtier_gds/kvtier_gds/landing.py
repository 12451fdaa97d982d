"""Reads frames in a worker process of the engine, from the slabs that the tier's process owns."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import DeviceMemory, Landing
from kvtier_core.storekit.disk_access import raise_if_store_failed
from kvtier_core.storekit.files import bounce, read_files, ring_works
from kvtier_core.storekit.folder import Folder, backend_errors
from kvtier_core.types import Extent
from kvtier_gds.device_reads import DeviceReads
from kvtier_gds.slab import FRAMES, Slab


def handle_of(slabs: Sequence[Slab], samples: Sequence[Extent], *, device_only: bool) -> str:
    """How a worker reaches these slabs. For the others see `Landing`."""
    slabs_there = [_described(slab) for slab in slabs]
    return json.dumps({"slabs": slabs_there, "samples": samples, "device_only": device_only})


def _described(slab: Slab) -> list[str | int]:
    status = os.fstat(slab.fd)
    return [str(slab.path), status.st_dev, status.st_ino, slab.direct, slab.ring]


class GdsLanding(Landing):
    """The files of all slabs, open for reading."""

    def __init__(self, handle: str):
        """``handle`` is what `handle_of` said. Raises BackendError."""
        said = json.loads(handle)
        self.device_only = said["device_only"]
        self.samples = [Extent(*sample) for sample in said["samples"]]
        self._device: DeviceReads | None = None
        with contextlib.ExitStack() as undoing:
            self._files = [_open(undoing, *described) for described in said["slabs"]]
            self._closing = undoing.pop_all()
        self._direct = any(file.direct for file in self._files)
        self._ring = all(file.ring for file in self._files) and ring_works()

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        files = [self._files[extent.file] for extent in extents]
        fds, at = [file.fd for file in files], [extent.at for extent in extents]
        outcomes = read_files(fds, into, ring=self._ring, direct=self._direct, at=at)
        for file in self._files:
            with backend_errors(file.folder.path):
                its = [outcome for each, outcome in zip(files, outcomes, strict=True) if each is file]
                raise_if_store_failed(its, file.folder)
        return [
            BackendError(f"{file.folder.path}: at {extent.at}: {outcome.strerror}")
            if isinstance(outcome, OSError)
            else outcome
            for file, extent, outcome in zip(files, extents, outcomes, strict=True)
        ]

    def reach_device(self, memory: DeviceMemory) -> None:
        self._device = DeviceReads([file.fd for file in self._files], memory)

    def read_to_device(self, extents: Sequence[Extent], into: Sequence[DeviceMemory]) -> Sequence[int | BackendError]:
        assert self._device, "only after `reach_device`"
        outcomes = self._device.read(extents, into)
        return [
            self._read_aside(extent, outcome.error) if outcome.error else outcome.value
            for extent, outcome in zip(extents, outcomes, strict=True)
        ]

    def _read_aside(self, extent: Extent, error: BaseException) -> int | BackendError:
        """The answer for a frame with which a read into the GPU failed: what the host would read of it.

        Raises BackendError if that is all of it: then the frame is good, and the way is not.
        """
        (count,) = self.read([extent], [bounce(extent.nbytes)])
        if count == extent.nbytes:
            raise BackendError(f"KvikIO cannot read what the host can: {error}") from error
        return count

    def facts(self) -> Mapping[str, str]:
        return {"landing": f"{'O_DIRECT' if self._direct else 'page cache'}, {'io_uring' if self._ring else 'calls'}"}

    def close(self) -> None:
        if self._device:
            self._device.close()
        self._closing.close()


class _File(NamedTuple):
    folder: Folder
    fd: int
    direct: bool
    ring: bool


def _open(undoing: contextlib.ExitStack, path: str, device: int, inode: int, direct: bool, ring: bool) -> _File:
    """A slab, if it is still the one of the tier's process."""
    with backend_errors(Path(path)):
        folder = Folder.at(Path(path))
        fd = folder.open(FRAMES, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        undoing.callback(os.close, fd)
        status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (device, inode):
        raise BackendError(f"{path}: another file has taken the place of the slab; restart the engine")
    return _File(folder, fd, direct, ring)
