"""The disk keeps the laws, with the page cache and past it."""

from kvtier_core.testing import BackendLaws
from kvtier_core.types import Nbytes
from kvtier_disk.config import DiskConfig


class DiskLaws(BackendLaws):
    def spoil(self, folder, key):
        (file,) = folder.rglob(f"{key.hex()}.kv")
        file.unlink()
        file.mkdir()
        return True


class TestBuffered(DiskLaws):
    persistent = True

    def config(self, folder):
        return DiskConfig(path=folder / "kv", direct="off", min_free=Nbytes(0))


class TestDirect(DiskLaws):
    persistent = True

    def config(self, folder):
        return DiskConfig(path=folder / "kv", direct="auto", min_free=Nbytes(0))
