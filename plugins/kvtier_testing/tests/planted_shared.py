"""A shared store that keeps the laws: a folder, which users in several processes may be kept from for a while."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time

import attrs
from patience import HANG
from planted_backends import PlantedConfig, Reference, SpoiltLaws

from kvtier_core.errors import BackendError
from kvtier_core.storekit.shared_space import Count, SharedSpace
from kvtier_testing import SharedBackendLaws


@contextlib.contextmanager
def locked(file, how=fcntl.LOCK_EX, timeout=HANG):
    """Hold the lock of a file, which is made if need be. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{file} is locked") from None
            time.sleep(0.001)
        yield fd
    finally:
        os.close(fd)


class SharedFolder(Reference):
    """Correct where several processes have one folder: names of its own for what is unfinished, nothing remembered."""

    shared = True

    def scan(self):
        return iter(())

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.timeout = ctx.timeout
        self.space = SharedSpace(FolderSpace(folder), ctx.capacity) if ctx.capacity else None

    @contextlib.contextmanager
    def served(self):
        """The store answers, unless somebody holds its lock; and its errors become BackendError."""
        if self.closed:
            raise BackendError("closed")
        try:
            with locked(self.folder / "lock", fcntl.LOCK_SH, self.timeout):
                yield
        except OSError as error:
            raise BackendError(str(error)) from error

    def contains(self, keys):
        with self.served():
            return [self.file(key).is_file() for key in keys]

    def read(self, keys, into):
        with self.served():
            return [self.outcome(self.read_one, *each) for each in zip(keys, into, strict=True)]

    def write(self, keys, frames):
        with self.served():
            return [self.outcome(self.store_one, *each) for each in zip(keys, frames, strict=True)]

    def delete(self, keys):
        with self.served():
            for key in keys:
                self.delete_one(key)

    def outcome(self, call, *args):
        """What is wrong with one key is that key's alone."""
        try:
            return call(*args)
        except (OSError, BackendError) as error:
            return BackendError(str(error))

    def read_one(self, key, view):
        try:
            with self.file(key).open("rb") as file:
                fits = os.fstat(file.fileno()).st_size <= len(view)
                return file.readinto(view) if fits else 0
        except FileNotFoundError:
            return 0

    def store_one(self, key, frame):
        self.take(len(frame))
        try:
            replaced = self.nbytes(key)
            self.write_one(key, frame)
        except OSError:
            self.give(len(frame))
            raise
        self.give(replaced)

    def write_one(self, key, frame):
        unfinished = self.home / f"{key.hex()}.{secrets.token_hex(8)}"
        unfinished.write_bytes(frame)
        unfinished.replace(self.file(key))

    def delete_one(self, key):
        nbytes = self.nbytes(key)
        with contextlib.suppress(FileNotFoundError):
            self.file(key).unlink()
            self.give(nbytes)

    def nbytes(self, key):
        try:
            return self.file(key).stat().st_size
        except FileNotFoundError:
            return 0

    def take(self, nbytes):
        if self.space:
            self.space.take(nbytes)

    def give(self, nbytes):
        if self.space:
            self.space.give(nbytes)


@attrs.frozen
class FolderSpace:
    """What `SharedSpace` needs of the folder: two numbers in a file, a lock, and the files by age."""

    folder: object

    def count(self, *, taken=0, freed=0):
        with locked(self.folder / "count") as fd:
            before = map(int, os.pread(fd, 64, 0).split() or (0, 0))
            count = Count(*map(sum, zip(before, (taken, freed), strict=True)))
            os.pwrite(fd, b"%31d %32d" % (count.taken, count.freed), 0)
        return count

    def evicting(self):
        return locked(self.folder / "evicting")

    def oldest(self):
        return list_oldest(self.folder)

    def remove(self, place):
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
            return True
        return False


def list_oldest(folder):
    """Files of all namespaces and their bytes. Somebody looks at how often this is done."""
    with open(folder / "listings", "ab") as listings:
        listings.write(b".")
    found = []
    for file in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if not file.suffix:
                found.append((file.stat().st_mtime_ns, file, file.stat().st_size))
    return [(file, nbytes) for _, file, nbytes in sorted(found)]


class SharedLaws(SharedBackendLaws):
    """The laws, with all that can be done to a folder."""

    persistent = True
    bounded = True
    spoil = SpoiltLaws.spoil
    stalled = SpoiltLaws.stalled

    def listings(self, folder):
        file = folder / "listings"
        return file.stat().st_size if file.exists() else 0

    def broken_key(self, folder, key):
        """A folder in place of the file can be neither read nor replaced."""
        (file,) = folder.rglob(key.hex())
        file.unlink()
        (file / "full").mkdir(parents=True)
        return True

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with locked(folder / "lock"):
            yield True

    @contextlib.contextmanager
    def interrupted(self, folder):
        away = folder.rename(folder.with_name("away"))
        try:
            yield True
        finally:
            away.rename(folder)


def laws_for(backend):
    class PlantedLaws(SharedLaws):
        def config(self, folder):
            return PlantedConfig(folder, backend)

    return PlantedLaws()
