"""The disk keeps the laws, with the page cache and past it."""

import contextlib
import os

import pytest

from kvtier_core.storekit.folder import Folder
from kvtier_core.types import Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing import BackendLaws, SharedBackendLaws
from kvtier_testing.samples import make_context, make_frame, make_keys


class Spoiling:
    """How a file becomes one that cannot be read."""

    persistent = True

    def spoil(self, folder, key):
        (file,) = folder.rglob(f"{key.hex()}.kv")
        file.unlink()
        file.mkdir()
        return True


@pytest.mark.more
class TestBuffered(Spoiling, BackendLaws):
    def config(self, folder):
        return DiskConfig(path=folder / "kv", direct="off", min_free=Nbytes(0))


class TestDirect(Spoiling, BackendLaws):
    def config(self, folder):
        return DiskConfig(path=folder / "kv", direct="auto", min_free=Nbytes(0))


@pytest.mark.more
class TestSharedBuffered(Spoiling, SharedBackendLaws):
    def config(self, folder):
        return DiskConfig(path=folder / "kv", shared=True, direct="off", min_free=Nbytes(0))


class TestSharedDirect(Spoiling, SharedBackendLaws):
    def config(self, folder):
        return DiskConfig(path=folder / "kv", shared=True, direct="auto", min_free=Nbytes(0))


def test_a_frame_that_is_deleted_while_the_folder_is_listed_stops_no_scan(tmp_path, monkeypatch):
    backend = DiskConfig(path=tmp_path / "kv", min_free=Nbytes(0)).open(make_context(capacity=1 << 20))
    kept, deleted = make_keys(2)
    backend.write([kept, deleted], [make_frame(kept), make_frame(deleted)])
    list_entries = Folder.entries

    def listed_and_then_deleted(folder):
        entries = list_entries(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{deleted.hex()}.kv", dir_fd=folder.fd)
        return entries

    monkeypatch.setattr(Folder, "entries", listed_and_then_deleted)
    assert [key for key, _ in backend.scan()] == [kept]
    backend.close()
