"""Drives in trouble, on real file systems: what fails is a BackendError, no other bytes come up, and trouble ends."""

from __future__ import annotations

import errno
import os

import pytest
from disks import btrfs, ext4, tmpfs
from slabs import NBYTES, open_slabs, read, whole, write

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.format import verify
from kvtier_testing.samples import make_frame, make_keys, make_namespace

OLD, NEW = make_keys(16)[:8], make_keys(16)[8:]

each_way = pytest.mark.parametrize("direct", ["auto", "off"])


@pytest.fixture(params=[tmpfs, ext4], ids=lambda kind: kind.__name__)
def disk(request, tmp_path):
    with request.param(tmp_path, 8 << 20) as disk:
        yield disk


@pytest.fixture
def backend(disk, direct):
    """Has OLD, and room for as many again."""
    backend = open_slabs(disk.folder / "kv", frames=16, direct=direct)
    write(backend, *OLD)
    yield backend
    backend.close()


@each_way
def test_the_tier_has_its_space_on_a_disk_that_others_fill(disk, backend):
    """All that the tier will ever need is its own from the start."""
    disk.fill()
    write(backend, *NEW)
    assert all(whole(backend, key) for key in [*OLD, *NEW])


@each_way
def test_a_start_on_a_full_disk(disk, backend, direct):
    backend.close()
    for facts in disk.folder.rglob("*.json"):
        facts.unlink()
    disk.fill()
    again = open_slabs(disk.folder / "kv", frames=16, direct="off")
    assert all(whole(again, key) for key in OLD)
    write(again, *NEW)
    assert all(whole(again, key) for key in NEW)
    again.close()


@each_way
def test_a_device_that_fails_and_comes_back(tmp_path, direct):
    with ext4(tmp_path, 8 << 20) as disk:
        backend = open_slabs(disk.folder / "kv", frames=16, direct=direct)
        write(backend, *OLD)
        disk.forget()
        disk.fail()
        for key in OLD:
            with pytest.raises(BackendError, match="Input/output error"):
                read(backend, key)
        disk.heal()
        disk.forget()
        assert all(whole(backend, key) for key in OLD), "an error of the drive is no error of a frame"
        write(backend, *NEW)
        assert all(whole(backend, key) for key in NEW)
        backend.close()


def test_a_write_that_fails_leaves_its_room(tmp_path):
    with ext4(tmp_path, 8 << 20) as disk:
        backend = open_slabs(disk.folder / "kv", frames=16)
        write(backend, *OLD)
        disk.fail()
        with pytest.raises(BackendError, match="Input/output error"):
            write(backend, *NEW)
        disk.heal()
        disk.forget()
        write(backend, *NEW)
        assert all(whole(backend, key) for key in [*OLD, *NEW])
        backend.close()


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    """A slab with OLD in it and room for as many again, and the places in it that refuse to be written to.

    Simulated: no file system here has a block that can be read and not written.
    """
    backend = open_slabs(tmp_path, frames=16, io="calls")
    write(backend, *OLD)
    pwritev = os.pwritev
    bad = set()

    def refuse(fd, views, at):
        if at in bad and len(views[0]) == NBYTES:  # and no probe
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    yield backend, bad
    backend.close()


def outcomes(backend, *keys):
    """The outcome for each frame of one write."""
    return [error and str(error) for error in backend.write(keys, [make_frame(key, NBYTES) for key in keys])]


def test_a_place_that_takes_no_frame_is_not_tried_again(refusing, tmp_path):
    backend, bad = refusing
    bad.add(9 * NBYTES)
    write(backend, NEW[0])
    assert outcomes(backend, NEW[1]) == [f"{tmp_path}: at {9 * NBYTES}: Input/output error"]
    write(backend, *NEW[1:7])
    assert all(whole(backend, key) for key in [*OLD, *NEW[:7]])
    with pytest.raises(StoreFull):
        write(backend, NEW[7])


def test_of_a_batch_only_the_place_that_fails_is_retired(refusing, tmp_path):
    backend, bad = refusing
    bad.add(11 * NBYTES)
    failed = f"{tmp_path}: at {11 * NBYTES}: Input/output error"
    assert outcomes(backend, *NEW) == [None, None, None, failed, None, None, None, None]
    assert [whole(backend, key) for key in NEW] == [i != 3 for i in range(8)]
    backend.delete(NEW)
    assert outcomes(backend, *NEW[:7]) == [None] * 7


def test_a_place_is_tried_again_when_the_drive_has_recovered(refusing, monkeypatch):
    """Not at once, and only where there is no other."""
    backend, bad = refusing
    bad.update(range(8 * NBYTES, 16 * NBYTES, NBYTES))
    assert None not in outcomes(backend, *NEW)
    bad.clear()
    with pytest.raises(StoreFull):
        write(backend, NEW[0])
    monkeypatch.setattr("kvtier_gds.backend._RETIRED", 0.0)
    assert outcomes(backend, *NEW) == [None] * 8
    assert all(whole(backend, key) for key in [*OLD, *NEW])


def test_a_record_that_cannot_be_written_costs_its_own_frame(refusing, monkeypatch):
    backend, _ = refusing
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, raw, at: pwrite(fd, raw, at) if at != 9 * 128 else _fail())
    assert [error is None for error in outcomes(backend, *NEW)] == [True, False, *[True] * 6]
    assert [whole(backend, key) for key in NEW] == [True, False, *[True] * 6]


def _fail():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@each_way
def test_a_bad_sector_is_one_frames_alone(tmp_path, direct):
    with btrfs(tmp_path, 8 << 20) as disk:
        backend = open_slabs(disk.folder / "kv", frames=16, direct=direct)
        write(backend, *OLD)
        disk.spoil(disk.folder / "kv" / "kvtier.slab")  # its first block, where the first frame lies
        into = [memoryview(bytearray(NBYTES)) for _ in OLD]
        failed, *others = backend.read(OLD, into)
        assert str(failed) == f"{disk.folder / 'kv'}: at 0: Input/output error"
        assert others == [NBYTES] * (len(OLD) - 1)
        assert all(verify(view, make_namespace(), key) is None for key, view in list(zip(OLD, into, strict=True))[1:])
        backend.quarantine(OLD[:1])
        assert read(backend, OLD[0]) == b""
        write(backend, OLD[0])
        assert whole(backend, OLD[0])
        backend.close()
