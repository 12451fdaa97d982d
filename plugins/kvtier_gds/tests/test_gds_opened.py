"""Slabs that become writable for others while a tier runs, as kubelet makes them at the start of another pod.

The others forge frames with the right checksums, in the places of ours, and keep the files open.
"""

from __future__ import annotations

import os

import pytest
from opened import attempt, before_line, kubelet_opens, somebody_closes
from slabs import NBYTES, files_of, open_slabs, place_of, read, whole, write

from kvtier_core.errors import BackendError
from kvtier_core.storekit.files import bounce
from kvtier_gds.slab import Extent
from kvtier_testing.samples import make_frame, make_keys

KEYS = make_keys(4)
OPENED = "others can read or write it"


class Stranger:
    """Whoever may write to a volume that kubelet has opened to a group."""

    def __init__(self, folder):
        self.folder = folder
        self.slab = -1

    def forges(self):
        """Every frame that the table names, and those that may be under way."""
        if self.slab < 0:
            self.slab = os.open(self.folder / "kvtier.slab", os.O_RDWR)
        for number, key in enumerate(KEYS):
            os.pwrite(self.slab, make_frame(key, NBYTES, seed=7), number * NBYTES)

    def __call__(self):
        kubelet_opens(self.folder)
        self.forges()


@pytest.fixture
def stranger(tmp_path):
    stranger = Stranger(tmp_path)
    yield stranger
    if stranger.slab >= 0:
        os.close(stranger.slab)


def extent_of(backend, key):
    (location,) = backend.locate([key])
    return Extent(*location.place, location.nbytes)


def read_by_worker(files, extent):
    into = bounce(extent.nbytes)
    (count,) = files.read_extents([extent], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


@pytest.mark.parametrize("by", ["the tier", "a worker"])
def test_no_forged_frame_is_read_whenever_the_files_are_opened(tmp_path, by):
    """At each step of a store and a load."""
    line, lines = 0, 1
    while line < lines:
        folder = tmp_path / str(line)
        stranger = Stranger(folder)
        backend = open_slabs(folder, mode="gds", direct="off", io="calls")
        write(backend, *KEYS[:2])
        files = files_of(backend)
        found = []

        def store_and_load(backend=backend, files=files, found=found):
            attempt(write, backend, KEYS[2])
            for key in KEYS[:3]:
                if by == "the tier":
                    found.append((key, attempt(read, backend, key)))
                elif backend.contains([key])[0]:
                    found.append((key, attempt(read_by_worker, files, extent_of(backend, key))))

        lines = before_line(line, stranger, store_and_load)
        store_and_load()
        assert all(isinstance(each, BackendError) for _, each in found[-2:]), line
        for key, each in found:
            assert isinstance(each, BackendError) or each in (b"", make_frame(key, NBYTES)), line
        files.close()
        backend.close()
        os.close(stranger.slab)
        line += 1
    assert lines > 50


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("io", ["io_uring", "calls"])
def test_an_opened_slab_is_not_read_however_it_is_read(tmp_path, stranger, direct, io):
    backend = open_slabs(tmp_path, mode="gds", direct=direct, io=io)
    write(backend, *KEYS)
    files, extents = files_of(backend), [extent_of(backend, key) for key in KEYS]
    stranger()
    for outcome in (
        *[attempt(read_by_worker, files, extent) for extent in extents],
        *[attempt(read, backend, key) for key in KEYS],
        attempt(write, backend, KEYS[0]),
    ):
        assert OPENED in str(outcome)
    files.close()
    backend.close()


def test_a_slab_that_was_seen_open_is_never_used_again(tmp_path, stranger):
    """Whoever has opened it meanwhile can still write to it when it is closed again."""
    backend = open_slabs(tmp_path, mode="gds")
    write(backend, *KEYS)
    files, extent = files_of(backend), extent_of(backend, KEYS[0])
    stranger()
    assert OPENED in str(attempt(read, backend, KEYS[0]))
    somebody_closes(tmp_path)
    stranger.forges()
    assert OPENED in str(attempt(read, backend, KEYS[0]))
    assert OPENED in str(attempt(write, backend, KEYS[0]))
    assert isinstance(attempt(read_by_worker, files, extent), BackendError), "it saw nothing of that itself"
    files.close()
    backend.close()
    backend = open_slabs(tmp_path)
    stranger.forges()
    assert list(backend.scan()) == []
    write(backend, *KEYS)
    assert all(whole(backend, key) for key in KEYS)
    backend.close()


def test_a_worker_that_saw_a_slab_open_never_reads_it_again(tmp_path, stranger):
    backend = open_slabs(tmp_path, mode="gds")
    write(backend, *KEYS)
    files, extent = files_of(backend), extent_of(backend, KEYS[0])
    stranger()
    assert OPENED in str(attempt(read_by_worker, files, extent))
    somebody_closes(tmp_path)
    assert OPENED in str(attempt(read_by_worker, files, extent))
    files.close()
    backend.close()


def test_frames_are_stored_again_where_a_slab_was_open_once_the_tier_is_opened_again(tmp_path, stranger, caplog):
    backend = open_slabs(tmp_path, mode="gds")
    write(backend, *KEYS)
    slab, _ = place_of(KEYS[0], tmp_path)
    stranger()
    attempt(read, backend, KEYS[0])
    attempt(read, backend, KEYS[0])
    assert not slab.exists(), "its name is free for a new one"
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith(f"kvtier: {slab}: others were given access to it") and "may have read frames" in said
    backend.close()
