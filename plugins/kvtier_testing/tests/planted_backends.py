"""A backend that keeps the laws, for the planted bugs to differ from in one thing each: a file per frame."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, BackendConfig, Stored, SupportsDirectReads, SupportsListing
from kvtier_core.transfer.staged_reader import StagedReader
from kvtier_core.types import Location
from kvtier_testing import BackendLaws


class Reference(Backend, SupportsListing):
    """Correct. A dict would not outlive a killed process."""

    def __init__(self, folder, ctx):
        self.folder = folder
        self.home = folder / ctx.namespace.digest.hex()
        self.home.mkdir(parents=True, exist_ok=True)
        self.capacity = ctx.capacity
        self.closed = False

    def file(self, key):
        return self.home / key.hex()

    def contains(self, keys):
        return [self.file(key).exists() for key in keys]

    def read(self, keys, into):
        return [self.read_one(key, view) for key, view in zip(keys, into, strict=True)]

    def read_one(self, key, view):
        if self.closed:
            raise BackendError("closed")
        if not self.file(key).exists() or self.file(key).stat().st_size > len(view):
            return 0
        stored = self.file(key).read_bytes()
        view[: len(stored)] = stored
        return len(stored)

    def write(self, keys, frames):
        self.make_room(sum(map(len, frames)))
        for key, frame in zip(keys, frames, strict=True):
            self.write_one(key, frame)

    def make_room(self, nbytes):
        """Frames of other namespaces go first; the tier sees to its own."""
        others = [file for file in self.folder.glob("*/*") if file.parent != self.home]
        while others and sum(file.stat().st_size for file in self.folder.glob("*/*")) + nbytes > self.capacity:
            others.pop().unlink()

    def write_one(self, key, frame):
        unfinished = self.home / f"{key.hex()}.tmp"
        unfinished.write_bytes(frame)
        unfinished.replace(self.file(key))

    def delete(self, keys):
        for key in keys:
            self.file(key).unlink(missing_ok=True)

    def scan(self):
        found = []
        for file in self.home.iterdir():
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                if not file.suffix:
                    found.append((file.stat().st_mtime_ns, bytes.fromhex(file.name), file.stat().st_size))
        return iter([(key, nbytes) for _, key, nbytes in sorted(found)])

    def close(self):
        self.closed = True


class SlabFile:
    def __init__(self, handle):
        self.file = open(handle, "rb")  # noqa: SIM115 - until close

    def read(self, ranges, into):
        return [self.read_one(*each) for each in zip(ranges, into, strict=True)]

    def read_one(self, wanted, view):
        (at,) = wanted.frame.location.place
        return os.preadv(self.file.fileno(), [view], at + wanted.offset)

    def facts(self):
        return {}

    def close(self):
        self.file.close()


class Slab(Reference, SupportsDirectReads):
    """The same with a copy of each frame in one file, from which workers read it."""

    reader = StagedReader
    source = SlabFile

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.places = {}
        open(self.reader_handle(), "ab").close()

    def reader_handle(self):
        return str(self.folder / "slab")

    def write_one(self, key, frame):
        super().write_one(key, frame)
        at = self.place() * len(frame)
        self.places[key] = Location((at,), len(frame))
        with open(self.reader_handle(), "r+b") as file:
            file.seek(at)
            file.write(frame)

    def place(self):
        """The first that is free, where all frames are of one length."""
        taken = {at // nbytes for (at,), nbytes in self.places.values()}
        return next(place for place in itertools.count() if place not in taken)

    def delete(self, keys):
        super().delete(keys)
        for key in keys:
            self.places.pop(key, None)

    def locate(self, keys):
        return [self.places.get(key) for key in keys]


@attrs.frozen
class PlantedConfig(BackendConfig):
    type: ClassVar[str] = "planted"

    folder: Path
    backend: type[Reference]

    def open(self, ctx):
        return self.backend(self.folder, ctx)

    def attach_reader(self, handle, cache, timeout):
        return self.backend.reader(self.backend.source(handle), cache, timeout)

    @contextlib.contextmanager
    def walk(self):
        yield (Stored(str(file), nbytes, None, None, None, None) for file, nbytes in self.files())

    def files(self):
        for file in self.folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                yield file, file.stat().st_size


@attrs.frozen
class UnlistedConfig(PlantedConfig):
    """Its store cannot be listed as a whole."""

    type: ClassVar[str] = "unlisted"
    walk = None


class SpoiltLaws(BackendLaws):
    persistent = True

    def spoil(self, folder, key):
        (file,) = folder.rglob(key.hex())
        file.write_bytes(b"")
        for slab in folder.rglob("slab"):
            slab.write_bytes(bytes(slab.stat().st_size))
        return True

    @contextlib.contextmanager
    def stalled(self, folder, key):
        """A pipe in place of the file: who opens it waits for one that writes."""
        (file,) = folder.rglob(key.hex())
        file.unlink()
        os.mkfifo(file)
        try:
            yield True
        finally:
            os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
