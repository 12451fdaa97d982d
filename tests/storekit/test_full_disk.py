"""A file system smaller than its tier's capacity, or full of other files: newcomers come in all the same."""

from __future__ import annotations

import pytest
from disks import ext4, tmpfs
from serving import FRAME, Serving, files

from kvtier_testing.samples import make_keys

CHUNKS = 8
KEYS = make_keys(200 * CHUNKS)
PATHS = [KEYS[i : i + CHUNKS] for i in range(0, len(KEYS), CHUNKS)]
NBYTES = 8 << 20  # of the file system
HALF = NBYTES // 2

each_kind = pytest.mark.parametrize("kind", [tmpfs, ext4])


def stack(folder, disk, min_free="0B"):
    file = folder / "kvtier.yaml"
    file.write_text(
        f"version: 1\ntiers:\n  - {{type: cpu, capacity: {CHUNKS * FRAME}B, eviction: lru}}\n"
        f"  - {{type: disk, path: {disk.folder / 'kv'}, capacity: 1GiB, min_free: {min_free}, eviction: lru}}\n"
    )
    return Serving(file)


def store(serving, paths):
    for path in paths:
        serving.ask(path)


def stored(serving, paths):
    """How many of the paths come back whole. Each is asked for once, so memory holds none of them."""
    return sum(serving.ask(path) == CHUNKS for path in paths)


def taken(disk):
    return sum(file.stat().st_size for file in files(disk.folder / "kv"))


@each_kind
def test_newcomers_come_in_though_the_file_system_is_full(tmp_path, kind):
    with kind(tmp_path, NBYTES) as disk, stack(tmp_path, disk) as serving:
        store(serving, PATHS[:100])
        assert "io_error" in serving.seen, "it was never full"
        assert "breaker_open" not in serving.seen
        assert taken(disk) > HALF
        assert stored(serving, PATHS[90:100]) >= 9
        store(serving, PATHS[100:140])
        assert stored(serving, PATHS[130:140]) >= 9
        assert "breaker_open" not in serving.seen


@each_kind
def test_other_files_come_and_go(tmp_path, kind):
    with kind(tmp_path, NBYTES) as disk, stack(tmp_path, disk) as serving:
        store(serving, PATHS[:20])
        assert taken(disk) == 20 * CHUNKS * FRAME
        disk.fill()
        store(serving, PATHS[20:60])
        assert stored(serving, PATHS[55:60]) >= 4, "what is newer takes the place of what is older"
        assert taken(disk) <= 20 * CHUNKS * FRAME
        disk.make_room()
        store(serving, PATHS[60:140])  # for more than a minute
        assert taken(disk) > 25 * CHUNKS * FRAME, "it grows again"
        assert stored(serving, PATHS[130:140]) >= 9
        assert "breaker_open" not in serving.seen


@each_kind
def test_min_free_is_kept_by_evicting(tmp_path, kind):
    with kind(tmp_path, NBYTES) as disk, stack(tmp_path, disk, min_free=f"{HALF}B") as serving:
        store(serving, PATHS[:100])
        assert stored(serving, PATHS[90:100]) >= 9
        assert "breaker_open" not in serving.seen
        assert 0 < taken(disk) <= HALF
