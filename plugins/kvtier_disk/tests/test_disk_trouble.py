"""Disks in trouble, on real filesystems: what fails is a BackendError, no other bytes come up, and trouble ends."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from disks import btrfs, ext4, tmpfs
from test_disk import NBYTES, file_of, files, open_disk, read, write

from kvtier_core.errors import BackendError
from kvtier_core.frames.format import verify
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_frame, make_keys, make_namespace, same

OLD, NEW = make_keys(40)[:20], make_keys(40)[20:]
ALL = 20


@pytest.fixture
def disk(tmp_path, kind):
    with kind(tmp_path, 8 << 20) as disk:
        yield disk


@pytest.fixture
def backend(disk, direct):
    """Keeps OLD in a folder of the disk."""
    backend = open_disk(disk.folder / "kv", direct=direct)
    write(backend, *OLD)
    yield backend
    backend.close()


def on(*kinds):
    """On these kinds of disks, past the page cache and through it."""
    each = [pytest.param(kind, direct, id=f"{kind.__name__}-{direct}") for kind in kinds for direct in ("auto", "off")]
    return pytest.mark.parametrize(("kind", "direct"), each)


def reads(backend, keys):
    """How often there was a hit, a miss, bytes that `verify` refuses, or a BackendError and which."""
    counted = Counter()
    for key in keys:
        try:
            found = memoryview(read(backend, key))
        except BackendError as error:
            counted[told(error)] += 1
            continue
        if not found:
            counted["miss"] += 1
        elif verify(found, make_namespace(), key, payload_nbytes=NBYTES - FRAME_ALIGNMENT) is not None:
            counted["rejected"] += 1
        else:
            assert same(found, make_frame(key, nbytes=NBYTES)), "other bytes, under a checksum that is right"
            counted["hit"] += 1
    return counted


def writes(backend, keys):
    return calls(backend, keys, write)


def deletes(backend, keys):
    return calls(backend, keys, lambda backend, key: backend.delete([key]))


def calls(backend, keys, call):
    """How often it was done, or a BackendError and which."""
    counted = Counter()
    for key in keys:
        try:
            call(backend, key)
            counted["done"] += 1
        except BackendError as error:
            counted[told(error)] += 1
    return counted


def told(error):
    """The error without the path."""
    return str(error).rpartition(": ")[2]


def works_again(disk, backend):
    assert {file.suffix for file in files(disk.folder / "kv")} <= {".kv"}, "what could not be finished is in the way"
    assert writes(backend, [*OLD, *NEW]) == {"done": 2 * ALL}
    assert reads(backend, [*OLD, *NEW]) == {"hit": 2 * ALL}


@on(tmpfs, ext4)
def test_a_full_disk_refuses_writes_and_still_reads(disk, backend, monkeypatch):
    disk.fill()
    assert writes(backend, NEW[:1]) == {"16KiB to write, 0B free, of which min_free reserves 0B": 1}
    # Space that was free when it was asked for may be gone when it is used.
    monkeypatch.setattr("kvtier_disk.folder_backend.free_of", lambda folder: 1 << 60)
    assert writes(backend, [*OLD, *NEW]) == {"No space left on device": 2 * ALL}
    assert reads(backend, [*OLD, *NEW]) == {"hit": ALL, "miss": ALL}
    disk.make_room()
    works_again(disk, backend)


@on(tmpfs, ext4)
def test_a_disk_that_becomes_read_only(disk, backend):
    disk.remount("ro")
    refused = "Read-only file system"
    assert writes(backend, [*OLD, *NEW]) == {refused: 2 * ALL}
    assert deletes(backend, OLD) == {refused: ALL}
    assert reads(backend, [*OLD, *NEW]) == {"hit": ALL, "miss": ALL}
    disk.remount("rw")
    works_again(disk, backend)


@on(tmpfs, ext4)
def test_a_folder_that_is_removed_and_something_else_in_its_place(disk, backend):
    shutil.rmtree(disk.folder / "kv")
    assert reads(backend, OLD) == {"miss": ALL}
    (disk.folder / "kv").touch()
    assert reads(backend, OLD) == deletes(backend, OLD) == {"Not a directory": ALL}
    assert writes(backend, NEW) == {"not a folder; name one": ALL}
    (disk.folder / "kv").unlink()
    works_again(disk, backend)


@on(ext4)
def test_a_device_that_fails_and_comes_back(disk, backend, direct):
    disk.forget()
    disk.fail()
    assert reads(backend, OLD) == {"Input/output error": ALL}
    assert reads(backend, NEW) == {"miss": ALL}
    written = writes(backend, [*OLD, *NEW])
    assert {why for why in written if why != "done"} <= {"Input/output error", "Cannot allocate memory"}
    # The page cache takes what the device will refuse when nobody listens any more. What comes up then is the kernel's
    # choice: an error, or bytes that were never written.
    assert direct == "off" or not written["done"]
    disk.forget()
    assert not reads(backend, [*OLD, *NEW])["hit"]

    disk.heal()
    disk.forget()
    found = reads(backend, OLD)
    assert direct == "off" or found == {"hit": ALL}
    works_again(disk, backend)


@on(btrfs)
@pytest.mark.parametrize("quarantine", [0, NBYTES])
def test_a_bad_sector_is_one_frames_alone(disk, direct, quarantine):
    """The rest of its batch is served; it leaves, and the next write puts it right."""
    backend = open_disk(disk.folder / "kv", direct=direct, quarantine=quarantine)
    write(backend, *OLD)
    bad = OLD[3]
    disk.spoil(file_of(disk.folder / "kv", bad))
    into = [memoryview(bytearray(NBYTES)) for _ in OLD]
    counts = backend.read(OLD, into)
    assert str(counts[3]) == f"{file_of(disk.folder / 'kv', bad)}: Input/output error"
    assert isinstance(counts[3], BackendError)
    assert [count for key, count in zip(OLD, counts, strict=True) if key != bad] == [NBYTES] * (ALL - 1)
    assert all(same(view, make_frame(key, nbytes=NBYTES)) for key, view in zip(OLD, into, strict=True) if key != bad)
    backend.quarantine([bad])
    assert reads(backend, [bad]) == {"miss": 1}
    assert len(list((disk.folder / "kv").glob("quarantine/*"))) == (1 if quarantine else 0)
    write(backend, bad)
    disk.forget()
    assert reads(backend, OLD) == {"hit": ALL}
    backend.close()
    again = open_disk(disk.folder / "kv", direct=direct, quarantine=quarantine)
    assert reads(again, OLD) == {"hit": ALL}
    again.close()


@on(tmpfs, ext4)
def test_a_start_on_a_full_disk(disk, backend, direct):
    """The facts of the namespace have no room, and are left out."""
    backend.close()
    for facts in disk.folder.rglob("namespace.json"):
        facts.unlink()
    disk.fill()
    again = open_disk(disk.folder / "kv", direct=direct)
    assert reads(again, OLD) == {"hit": ALL}
    assert [file.stat().st_size for file in disk.folder.rglob("namespace.*")] == []
    again.close()
    disk.make_room()
    again = open_disk(disk.folder / "kv", direct=direct)
    assert len(list(disk.folder.rglob("namespace.json"))) == 1
    again.close()


@on(ext4)
def test_a_start_on_a_device_that_fails(disk, backend, direct):
    backend.close()
    disk.forget()
    disk.fail()
    try:
        again = open_disk(disk.folder / "kv", direct=direct)
    except BackendError as error:
        assert told(error) == "Input/output error"
    else:
        assert reads(again, OLD) == {"Input/output error": ALL}
        again.close()
    disk.heal()
    again = open_disk(disk.folder / "kv", direct=direct)
    assert dict(again.scan()) == dict.fromkeys(OLD, NBYTES)
    assert reads(again, OLD) == {"hit": ALL}
    works_again(disk, again)
    again.close()
