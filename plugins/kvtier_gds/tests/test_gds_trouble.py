"""Drives in trouble, on real file systems: what fails is a BackendError, no other bytes come up, and trouble ends."""

from __future__ import annotations

import errno
import os

import pytest
from slabs import NBYTES, open_slabs, read, whole, write

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.format import verify
from kvtier_core.testing.disks import btrfs, ext4, tmpfs
from kvtier_core.testing.samples import make_keys, make_namespace

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
def test_a_disk_that_others_fill_is_none_of_our_trouble(disk, backend):
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


def test_a_place_that_takes_no_frame_is_not_tried_again(tmp_path, monkeypatch):
    """Simulated: no file system here has a block that can be read and not written."""
    backend = open_slabs(tmp_path, frames=16, io="calls")
    write(backend, *OLD)
    pwritev = os.pwritev
    bad = 9 * NBYTES

    def refuse(fd, views, at):
        if at == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwritev(fd, views, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    write(backend, NEW[0])
    with pytest.raises(BackendError, match="Input/output error"):
        write(backend, NEW[1])
    write(backend, *NEW[1:7])
    assert all(whole(backend, key) for key in [*OLD, *NEW[:7]])
    with pytest.raises(StoreFull):
        write(backend, NEW[7])
    backend.close()


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
