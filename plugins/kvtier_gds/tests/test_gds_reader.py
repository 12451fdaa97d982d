"""Workers read the slabs themselves: where the tier says that a frame lies, in files that the tier's process owns."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from slabs import NBYTES, dies, files_of, open_slabs, write

from kvtier_core.errors import BackendError
from kvtier_core.storekit.files import bounce
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_gds.device_reads import DeviceMemory, DeviceReads
from kvtier_gds.slab import Extent
from kvtier_testing.samples import make_frame, make_keys

KEYS = make_keys(12)


@pytest.fixture
def three(tmp_path):
    return [tmp_path / name for name in "abc"]


def extents_of(backend, keys):
    return [Extent(*location.place, location.nbytes) for location in backend.locate(keys)]


def read(files, extent):
    into = bounce(extent.nbytes)
    (count,) = files.read_extents([extent], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


@pytest.mark.parametrize("io", ["io_uring", "calls"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_every_frame_is_where_the_tier_says(three, io, direct):
    backend = open_slabs(*three, frames=16, mode="gds", io=io, direct=direct)
    files = files_of(backend)
    write(backend, *KEYS)
    extents = extents_of(backend, KEYS)
    assert {extent.slab for extent in extents} == {0, 1, 2}
    assert [read(files, extent) for extent in extents] == [make_frame(key, NBYTES) for key in KEYS]
    (where,) = backend.locate(KEYS[1:2])
    backend.delete(KEYS[:1])
    assert backend.locate([*KEYS[:2], make_keys(13)[-1]]) == [None, where, None]
    files.close()
    files.close()
    backend.close()


def test_with_bounce_frames_pass_through_an_arena(tmp_path):
    backend = open_slabs(tmp_path, mode="bounce")
    assert backend.reader_handle() == ""
    backend.close()


def test_auto_wants_a_gpu_and_names_frames_to_compare_ways(tmp_path):
    for mode in ("auto", "gds"):
        backend = open_slabs(tmp_path, mode=mode)
        write(backend, *KEYS[:3])
        said = json.loads(backend.reader_handle())
        assert said["device_only"] == (mode == "auto")
        assert [Extent(*sample) for sample in said["samples"]] == extents_of(backend, KEYS[:3])
        backend.close()


def test_without_kvikio_no_file_is_read_into_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    backend = open_slabs(tmp_path, mode="auto")
    files = files_of(backend)
    with pytest.raises(BackendError, match="KvikIO is not installed"):
        DeviceReads(files.fds, DeviceMemory(0, 4096, 4096))
    files.close()
    backend.close()


def test_a_truncated_frame_is_short(tmp_path):
    backend = open_slabs(tmp_path, mode="gds")
    files = files_of(backend)
    write(backend, *KEYS[:4])
    (extent,) = extents_of(backend, KEYS[3:4])
    os.truncate(tmp_path / "kvtier.slab", extent.at + FRAME_ALIGNMENT)
    assert len(read(files, extent)) == FRAME_ALIGNMENT
    assert read(files, Extent(0, 1 << 30, NBYTES)) == b""
    files.close()
    backend.close()


def test_a_worker_reads_on_when_the_tier_is_closed(tmp_path):
    backend = open_slabs(tmp_path, mode="gds")
    files = files_of(backend)
    write(backend, KEYS[0])
    (extent,) = extents_of(backend, KEYS[:1])
    backend.close()
    assert read(files, extent) == make_frame(KEYS[0], NBYTES)
    files.close()


def test_another_file_in_the_place_of_a_slab_is_refused(tmp_path):
    backend = open_slabs(tmp_path, mode="gds")
    os.rename(tmp_path / "kvtier.slab", tmp_path / "moved")
    (tmp_path / "kvtier.slab").write_bytes(bytes(NBYTES))
    (tmp_path / "kvtier.slab").chmod(0o600)
    with pytest.raises(BackendError, match="another file has replaced the slab"):
        files_of(backend)
    backend.close()


def _store_and_die(path):
    backend = open_slabs(path, mode="gds")
    write(backend, *KEYS[:6])
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_read_frames_stored_before_a_kill(tmp_path):
    dies(_store_and_die, tmp_path)
    backend = open_slabs(tmp_path, mode="gds")
    files = files_of(backend)
    assert [read(files, extent) for extent in extents_of(backend, KEYS[:6])] == [
        make_frame(key, NBYTES) for key in KEYS[:6]
    ]
    files.close()
    backend.close()
