"""Files by io_uring and by plain calls, against what is written there."""

from __future__ import annotations

import errno
import mmap
import os
import random

import pytest

from kvtier_core.storekit.files import read_files, ring_works, write_files

PIECE = 512 << 10  #: a request of io_uring asks for no more
LENGTHS = [0, 1, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77] * 6  # more pieces than are under way at once

each_way = pytest.mark.parametrize("ring", [True, False], ids=["ring", "calls"])


@pytest.fixture
def opened():
    fds = []

    def open_file(path, flags):
        fds.append(os.open(path, flags, 0o600))
        return fds[-1]

    yield open_file
    for fd in fds:
        os.close(fd)


def noise(nbytes, seed=0):
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def test_io_uring_works_on_this_machine():
    """The other tests would compare calls with calls."""
    assert ring_works()


@each_way
def test_files_hold_what_was_written(tmp_path, opened, ring):
    views = [noise(nbytes, i) for i, nbytes in enumerate(LENGTHS)]
    fds = [opened(tmp_path / str(i), os.O_WRONLY | os.O_CREAT) for i in range(len(views))]
    write_files(fds, [view.toreadonly() for view in views], ring=ring)
    assert [(tmp_path / str(i)).read_bytes() for i in range(len(views))] == views


@each_way
def test_views_hold_what_was_in_the_files(tmp_path, opened, ring):
    held = [noise(nbytes, i) for i, nbytes in enumerate(LENGTHS)]
    for i, content in enumerate(held):
        (tmp_path / str(i)).write_bytes(content)
    fds = [opened(tmp_path / str(i), os.O_RDONLY) for i in range(len(held))]
    into = [memoryview(bytearray(len(content))) for content in held]
    assert read_files(fds, into, ring=ring) == LENGTHS
    assert into == held


@each_way
@pytest.mark.parametrize("there", [0, 4096, PIECE + 4096])
def test_a_file_may_end_before_its_view(tmp_path, opened, ring, there):
    (tmp_path / "short").write_bytes(noise(there))
    into = memoryview(bytearray(b"\xa5" * 4 * PIECE))
    assert read_files([opened(tmp_path / "short", os.O_RDONLY)], [into], ring=ring) == [there]
    assert into[:there] == noise(there)
    assert into[there:] == b"\xa5" * (4 * PIECE - there)


@each_way
def test_past_the_page_cache(tmp_path, opened, ring):
    view = memoryview(mmap.mmap(-1, 3 * PIECE))
    view[:] = noise(3 * PIECE)
    write_files([opened(tmp_path / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)], [view], ring=ring)
    into = memoryview(mmap.mmap(-1, 3 * PIECE))
    assert read_files([opened(tmp_path / "direct", os.O_RDONLY | os.O_DIRECT)], [into], ring=ring) == [3 * PIECE]
    assert into == view


@each_way
@pytest.mark.parametrize("direct", [False, True])
def test_places_in_one_file(tmp_path, opened, ring, direct):
    """More than are under way at once, in no order, from and into memory that is not aligned."""
    flags = os.O_DIRECT if direct else 0
    fd = opened(tmp_path / "file", os.O_RDWR | os.O_CREAT | flags)
    nbytes = [PIECE, 4096, PIECE + 4096] * 12
    ends = [sum(nbytes[: i + 1]) for i in range(len(nbytes))]
    places = [end - length for end, length in zip(ends, nbytes, strict=True)]
    views = [noise(length, i).toreadonly() for i, length in enumerate(nbytes)]
    order = random.Random(0).sample(range(len(views)), len(views))
    write_files([fd] * len(order), [views[i] for i in order], ring=ring, direct=direct, at=[places[i] for i in order])
    assert (tmp_path / "file").read_bytes() == b"".join(views)
    into = [memoryview(bytearray(nbytes[i] + 1))[1:] for i in order]
    counts = read_files([fd] * len(order), into, ring=ring, direct=direct, at=[places[i] for i in order])
    assert counts == [nbytes[i] for i in order]
    assert into == [views[i] for i in order]


@each_way
def test_one_that_cannot_be_read_is_reported_beside_the_others(tmp_path, opened, ring):
    for i, name in enumerate("ab"):
        (tmp_path / name).write_bytes(noise(2 * PIECE, i))
    good = [opened(tmp_path / name, os.O_RDONLY) for name in "ab"]
    folder = opened(tmp_path, os.O_RDONLY)
    views = [memoryview(bytearray(2 * PIECE)) for _ in range(3)]
    first, failed, last = read_files([good[0], folder, good[1]], views, ring=ring)
    assert (first, last) == (2 * PIECE, 2 * PIECE)
    assert isinstance(failed, IsADirectoryError)
    assert [views[0], views[2]] == [noise(2 * PIECE, 0), noise(2 * PIECE, 1)]


@each_way
def test_one_that_cannot_be_written_is_raised_when_all_have_ended(tmp_path, opened, ring):
    good = [opened(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    views = [noise(2 * PIECE, i) for i in range(3)]
    with pytest.raises(OSError) as failure:
        write_files([good[0], opened("/dev/full", os.O_WRONLY), good[1]], views, ring=ring)
    assert failure.value.errno == errno.ENOSPC
    assert (tmp_path / "a").read_bytes() == views[0]


def test_only_what_may_be_written_is_read_into(tmp_path, opened):
    (tmp_path / "file").write_bytes(b"x")
    fd = opened(tmp_path / "file", os.O_RDONLY)
    for ring in (True, False):
        with pytest.raises((BufferError, TypeError)):
            read_files([fd], [memoryview(b"-")], ring=ring)


def test_another_number_of_files_than_views_is_refused(tmp_path, opened):
    for ring in (True, False):
        with pytest.raises(ValueError):
            read_files([0, 0], [noise(1)], ring=ring)
