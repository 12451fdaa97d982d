"""Files that become writable for others while a tier runs, as kubelet makes them at the start of another pod."""

from __future__ import annotations

import pytest
from opened import attempt, before_line, kubelet_opens
from sizes import some

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT
KEYS = make_keys(3)


def open_disk(path, model="tiny", capacity=1 << 30, **settings):
    config = DiskConfig(path=path, direct="off", io="calls", min_free=Nbytes(0), **settings)
    return config.open(make_context(namespace=make_namespace(model), capacity=capacity))


def write(disk, *keys, model="tiny"):
    disk.write(keys, [make_frame(key, nbytes=NBYTES, namespace=make_namespace(model)) for key in keys])


def read(disk, key):
    into = memoryview(bytearray(NBYTES))
    (count,) = disk.read([key], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


def forge(folder):
    """Whoever may write to the files gives them other frames with the right checksums."""
    for key in KEYS:
        for path in (*folder.rglob(f"{key.hex()}.kv"), *folder.rglob(f"{key.hex()}.*tmp")):
            if path.stat().st_mode & 0o020:
                with open(path, "r+b") as file:
                    file.write(make_frame(key, nbytes=NBYTES, seed=7))


@pytest.mark.parametrize("shared", some([False, True]), ids=["private", "shared"])
def test_no_forged_frame_is_read_whenever_the_files_are_opened(tmp_path, shared):
    """At each step of a store and a load."""
    line, lines = 0, 1
    while line < lines:
        folder = tmp_path / str(line)
        disk = open_disk(folder, shared=shared)
        write(disk, *KEYS[:2])

        def attack(folder=folder):
            kubelet_opens(folder)
            forge(folder)

        found = []

        def store_and_load(disk=disk, found=found):
            attempt(write, disk, KEYS[2])
            found.extend((key, attempt(read, disk, key)) for key in KEYS)

        lines = before_line(line, attack, store_and_load)
        forge(folder)
        store_and_load()
        for key, each in found:
            assert isinstance(each, BackendError) or each in (b"", make_frame(key, nbytes=NBYTES)), line
        attempt(disk.close)
        line += 1
    assert lines > 50


def nbytes_in(folder):
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(size for size in sizes if size >= NBYTES)


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_capacity_holds_over_passes_and_models(tmp_path, shared):
    """What other models stored before a pass is of no use, and takes no space."""
    folder, most = tmp_path / "kv", 12 * NBYTES
    keys = make_keys(110)
    for start in range(100):
        disk = open_disk(folder, str(start % 5), most, shared=shared)
        write(disk, *keys[start : start + 10], model=str(start % 5))
        assert nbytes_in(folder) <= most
        disk.close()
        kubelet_opens(folder)
        assert nbytes_in(folder) == 10 * NBYTES


def test_a_running_disk_gets_back_the_bytes_of_opened_frames(tmp_path):
    disk = open_disk(tmp_path / "kv", capacity=4 * NBYTES)
    write(disk, *KEYS)
    free = disk.space.free
    kubelet_opens(tmp_path / "kv")
    assert not any(disk.contains(KEYS))
    write(disk, KEYS[0])
    assert disk.space.free == free
    disk.delete(KEYS)
    assert disk.space.free == 4 * NBYTES
    disk.close()


def test_a_running_shared_disk_begins_anew(tmp_path):
    disk = open_disk(tmp_path / "kv", shared=True)
    write(disk, *KEYS)
    kubelet_opens(tmp_path / "kv")
    write(disk, KEYS[0])
    assert read(disk, KEYS[0]) == make_frame(KEYS[0], nbytes=NBYTES)
    assert [attempt(read, disk, key) for key in KEYS[1:]] == [b""] * 2
    disk.close()
