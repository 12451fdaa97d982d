"""Beyond the laws, for slabs: their files, what survives, room, and what else lies there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import stat
import time

import attrs
import pytest
from disks import tmpfs
from patience import HANG
from slabs import NBYTES, dies, held, open_slabs, place_of, read, records, whole, write

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.format import verify
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_gds import plugin, slab
from kvtier_gds.config import GdsConfig
from kvtier_gds.device_reads import gpudirect
from kvtier_gds.extents import Extents
from kvtier_gds.table import RECORD_NBYTES, Table
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

KEYS = make_keys(16)


@pytest.fixture
def three(tmp_path):
    """The folders of three drives."""
    return [tmp_path / name for name in "abc"]


def test_the_plugin_offers_the_slabs():
    assert plugin.kvtier_backends() == [GdsConfig]


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_paths_that_make_no_sense(tmp_path, names):
    with pytest.raises(ValueError, match="'paths'"):
        GdsConfig(paths=tuple(tmp_path / name for name in names))


# -- files -----------------------------------------------------------------------------------------


def test_all_blocks_are_there_from_the_start_and_no_other_user_may_look(three):
    backend = open_slabs(*three, frames=8)
    files = [path / "kvtier.slab" for path in three]
    assert [file.stat().st_size for file in files] == [3 * NBYTES, 3 * NBYTES, 2 * NBYTES]
    assert all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files)
    assert backend.facts()["preallocated"] == "on"
    assert {stat.S_IMODE(each.stat().st_mode) for path in three for each in path.glob("*.json")} == {0o1600}
    assert {stat.S_IMODE(each.stat().st_mode) for path in three for each in path.glob("kvtier.[st]*")} == {0o1600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in three} == {0o4700}
    backend.close()


def test_where_blocks_cannot_be_had_before_the_slab_has_holes(tmp_path, monkeypatch):
    """Simulated: this kernel's file systems can all do it."""
    monkeypatch.setattr(slab, "_fallocate", lambda *_: -1)
    monkeypatch.setattr(slab.ctypes, "get_errno", lambda: slab.errno.EOPNOTSUPP)
    backend = open_slabs(tmp_path / "kv")
    assert backend.facts()["preallocated"] == "off"
    write(backend, *KEYS[:8])
    assert all(whole(backend, key) for key in KEYS[:8])
    backend.close()


def test_a_folder_belongs_to_one_engine(three):
    backend = open_slabs(*three[:2])
    for paths in (three[:1], three[1:]):
        with pytest.raises(BackendError, match="another engine or tier keeps its frames here"):
            open_slabs(*paths)
    backend.close()
    open_slabs(*three).close()


def test_replicas_have_folders_of_their_own(tmp_path):
    ctx = attrs.evolve(make_context(capacity=8 * NBYTES), replicas=2)
    config = GdsConfig(paths=(tmp_path,))
    first, second = config.open(ctx), config.open(attrs.evolve(ctx, replica=1))
    write(first, KEYS[0])
    assert (held(first), held(second)) == ([KEYS[0]], [])
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["kvtier.slab", "kvtier.table"])
def test_something_else_of_the_name_is_refused(tmp_path, name):
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    (path / name).mkdir()
    with pytest.raises(BackendError, match=re.escape(f"{path / name}: ")):
        open_slabs(path)
    (path / name).rmdir()
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendError, match=re.escape(f"{path / name}: ")):
        open_slabs(path)
    assert not (tmp_path / "elsewhere").exists()
    (path / name).unlink()
    open_slabs(path).close()


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes").write_text("not ours")
    backend = open_slabs(tmp_path)
    write(backend, KEYS[0])
    backend.close()
    assert (tmp_path / "notes").read_text() == "not ours"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o770)
    with pytest.raises(BackendError, match="others can write to it"):
        open_slabs(tmp_path / "kv")


# -- modes -----------------------------------------------------------------------------------------


def test_asked_and_effective_settings(tmp_path):
    for mode in ("auto", "bounce", "gds"):
        backend = open_slabs(tmp_path, mode=mode, direct="off", io="calls")
        facts = {"mode": mode, "direct": "off -> off", "io": "calls -> calls", "preallocated": "on"}
        if mode != "bounce":
            facts["GPUDirect Storage"] = gpudirect()
        assert backend.facts() == facts
        backend.close()


def test_missing_requirements_of_gpudirect_storage_are_reported(tmp_path, monkeypatch):
    assert gpudirect(tmp_path) == "no: no NVIDIA GPU is here"
    for name in ("nvidia", "nvidia-fs"):
        (tmp_path / name).mkdir()
    (tmp_path / "nvidia/version").touch()
    monkeypatch.setattr("importlib.util.find_spec", {"kvikio": None}.get)
    assert gpudirect(tmp_path) == "no: KvikIO is not installed"
    monkeypatch.setattr("importlib.util.find_spec", {"kvikio": "found"}.get)
    assert gpudirect(tmp_path).startswith(
        "perhaps: the kernel module nvidia-fs is not loaded, and each worker tries PCI "
    )
    (tmp_path / "nvidia-fs/version").touch()
    assert gpudirect(tmp_path) == "perhaps: each worker tries it"


@pytest.mark.parametrize("io", ["io_uring", "calls"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_batch_comes_back_however_it_is_moved(three, io, direct):
    backend = open_slabs(*three, frames=16, io=io, direct=direct)
    write(backend, *KEYS)
    assert all(whole(backend, key) for key in KEYS)
    backend.close()


# -- what survives ---------------------------------------------------------------------------------


def test_a_restart_is_warm_in_the_order_of_writing(three):
    backend = open_slabs(*three, frames=9)
    write(backend, *KEYS[:4])
    write(backend, *KEYS[4:6])
    write(backend, KEYS[1])
    backend.close()
    again = open_slabs(three[2], three[0], three[1], frames=9)
    assert held(again) == [KEYS[0], *KEYS[2:6], KEYS[1]]
    assert all(whole(again, key) for key in KEYS[:6])
    write(again, KEYS[7])
    again.close()
    last = open_slabs(*three, frames=9)
    assert held(last)[-1] == KEYS[7]
    last.close()


def test_the_drives_share_the_frames(three):
    backend = open_slabs(*three, frames=9)
    write(backend, *KEYS[:6])
    assert [len(records(path)) for path in three] == [2, 2, 2]
    backend.close()


def _write_and_delete(path):
    backend = open_slabs(path)
    write(backend, *KEYS[:3])
    backend.delete([KEYS[1]])
    os.kill(os.getpid(), signal.SIGKILL)


def test_deleted_frames_stay_deleted_after_a_kill(tmp_path):
    dies(_write_and_delete, tmp_path)
    backend = open_slabs(tmp_path)
    assert held(backend) == [KEYS[0], KEYS[2]]
    backend.close()


def _write_and_delete_for_ever(paths, seed, started):
    """In slabs that are always nearly full, so that every place is used again and again, by frames of all lengths."""
    backend, rng, there = open_slabs(*paths), random.Random(seed), _keys_in(paths)
    while True:
        if len(there) > 5:
            backend.delete([there.pop(rng.randrange(len(there)))])
        key = rng.choice(KEYS)
        with contextlib.suppress(StoreFull):
            backend.write([key], [make_frame(key, rng.randrange(2, 13) * FRAME_ALIGNMENT, seed=rng.getrandbits(32))])
            there = [*(other for other in there if other != key), key]
        started.set()


def _keys_in(paths):
    return [record.key for path in paths if path.exists() for record in records(path).values()]


@pytest.mark.more
def test_every_frame_left_by_a_kill_is_whole(three):
    spawn = multiprocessing.get_context("spawn")
    rng = random.Random(0)
    found = 0
    for seed in range(6):
        started = spawn.Event()
        writer = spawn.Process(target=_write_and_delete_for_ever, args=(three[:2], seed, started), daemon=True)
        writer.start()
        assert started.wait(HANG)
        time.sleep(rng.uniform(0, 0.1))
        writer.kill()
        writer.join()
        backend = open_slabs(*three[:2])
        for key, nbytes in backend.scan():
            assert verify(memoryview(read(backend, key, nbytes)), make_namespace(), key) is None
            found += 1
        backend.close()
    assert found > 6


def _die_half_way_through_the_frame(path):
    backend = open_slabs(path, frames=2, io="calls", direct="off")
    write(backend, *KEYS[:2])
    pwritev = os.pwritev

    def half(fd, views, at):
        pwritev(fd, [views[0][: NBYTES // 2]], at)
        os.kill(os.getpid(), signal.SIGKILL)

    os.pwritev = half
    backend.delete([KEYS[0]])
    write(backend, KEYS[2])


def _die_between_frame_and_record(path):
    backend = open_slabs(path, frames=2)
    write(backend, *KEYS[:2])
    Table.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    backend.delete([KEYS[0]])
    write(backend, KEYS[2])


@pytest.mark.parametrize("work", [_die_half_way_through_the_frame, _die_between_frame_and_record])
def test_a_kill_in_an_overwrite_leaves_neither_frame(tmp_path, work):
    dies(work, tmp_path)
    backend = open_slabs(tmp_path, frames=2)
    assert held(backend) == [KEYS[1]]
    assert whole(backend, KEYS[1])
    write(backend, KEYS[2])
    assert whole(backend, KEYS[2])
    backend.close()


def _die_replacing(path):
    backend = open_slabs(path, frames=1, io="calls", direct="off")
    write(backend, KEYS[0])
    os.pwritev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    write(backend, KEYS[0])


def test_of_a_frame_that_is_replaced_all_or_nothing(tmp_path):
    dies(_die_replacing, tmp_path)
    backend = open_slabs(tmp_path, frames=1)
    assert held(backend) == []
    write(backend, KEYS[0])
    assert whole(backend, KEYS[0])
    backend.close()


def _change_record(path, of, **changes):
    entry, record = next(pair for pair in records(path).items() if pair[1].key == of)
    with open(path / "kvtier.table", "r+b") as file:
        Table(file.fileno()).put(entry, record._replace(**changes))


@pytest.mark.parametrize("offset", [-FRAME_ALIGNMENT, 0, FRAME_ALIGNMENT])
def test_of_records_that_overlap_the_newer_counts(tmp_path, offset):
    """As after a power cut, when the table reached the disk in part."""
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    backend.close()
    _change_record(tmp_path, KEYS[0], at=place_of(KEYS[1], tmp_path)[1].at + offset)
    backend = open_slabs(tmp_path)
    assert held(backend) == [KEYS[1]]
    assert [record.key for record in records(tmp_path).values()] == [KEYS[1]], "what is dropped is not found again"
    write(backend, *KEYS[2:9])
    assert all(whole(backend, key) for key in KEYS[1:9])
    backend.close()


def test_of_two_records_of_a_key_the_newer_counts(tmp_path):
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    backend.close()
    _change_record(tmp_path, KEYS[0], key=KEYS[1])
    backend = open_slabs(tmp_path)
    assert whole(backend, KEYS[1])
    assert len(records(tmp_path)) == 1
    write(backend, *KEYS[2:9])
    assert all(whole(backend, key) for key in KEYS[1:9])
    backend.close()


@pytest.mark.parametrize("changes", [{"at": 1 << 40}, {"at": 7}, {"nbytes": 0}, {"nbytes": 1 << 40}])
def test_a_record_of_an_impossible_frame_is_ignored(tmp_path, changes):
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    backend.close()
    _change_record(tmp_path, KEYS[0], **changes)
    backend = open_slabs(tmp_path)
    assert held(backend) == [KEYS[1]]
    write(backend, *KEYS[2:9])
    backend.close()


def test_every_bit_of_a_record_counts(tmp_path):
    backend = open_slabs(tmp_path)
    write(backend, KEYS[0])
    backend.close()
    table = tmp_path / "kvtier.table"
    good = table.read_bytes()
    for bit in range(8 * len(good[:RECORD_NBYTES].rstrip(b"\0"))):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        table.write_bytes(bad)
        assert not records(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", random.Random(0).randbytes(100_000)])
def test_another_table_is_a_cold_start(tmp_path, content):
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    backend.close()
    (tmp_path / "kvtier.table").write_bytes(content)
    backend = open_slabs(tmp_path)
    assert held(backend) == []
    write(backend, *KEYS[:8])
    assert all(whole(backend, key) for key in KEYS[:8])
    backend.close()


@pytest.mark.parametrize("left", [0, NBYTES // 2])
def test_a_slab_that_is_cut_serves_nothing_that_was_cut_off(tmp_path, left):
    backend = open_slabs(tmp_path)
    write(backend, *KEYS[:2])
    os.truncate(tmp_path / "kvtier.slab", left)
    assert [read(backend, key) for key in KEYS[:2]] == [b"", b""]
    backend.close()
    backend = open_slabs(tmp_path)
    assert held(backend) == []
    backend.close()


def test_files_that_are_removed_are_used_until_the_end(tmp_path):
    backend = open_slabs(tmp_path)
    write(backend, KEYS[0])
    for file in tmp_path.iterdir():
        file.unlink()
    assert whole(backend, KEYS[0])
    write(backend, KEYS[1])
    assert whole(backend, KEYS[1])
    backend.close()
    backend = open_slabs(tmp_path)
    assert held(backend) == []
    backend.close()


# -- room ------------------------------------------------------------------------------------------


def test_the_capacity_to_the_last_frame_however_it_is_divided(three):
    backend = open_slabs(*three, frames=8)
    write(backend, *KEYS[:8])
    with pytest.raises(StoreFull, match="no 49152 contiguous bytes are free") as full:
        write(backend, KEYS[8])
    assert full.value.missing == NBYTES
    backend.delete([KEYS[3]])
    write(backend, KEYS[8])
    assert sum(whole(backend, key) for key in KEYS[:9]) == 8
    assert sum((path / "kvtier.slab").stat().st_size for path in three) == 8 * NBYTES
    backend.close()


def test_more_drives_than_frames(three):
    backend = open_slabs(*three, frames=1)
    write(backend, KEYS[0])
    assert whole(backend, KEYS[0])
    with pytest.raises(StoreFull):
        write(backend, KEYS[1])
    backend.close()


def test_a_batch_that_does_not_fit_leaves_its_room(tmp_path):
    backend = open_slabs(tmp_path, frames=4)
    write(backend, *KEYS[:2])
    with pytest.raises(StoreFull):
        write(backend, *KEYS[2:5])
    write(backend, *KEYS[2:4])
    assert all(whole(backend, key) for key in KEYS[:4])
    backend.close()


def test_frames_of_others_leave_for_what_has_no_room_oldest_first(three):
    theirs = open_slabs(*three, model="theirs", frames=6)
    write(theirs, *KEYS[:6], model="theirs")
    theirs.close()
    ours = open_slabs(*three, model="ours", frames=6)
    assert held(ours) == []
    write(ours, *KEYS[8:10], model="ours")
    ours.close()
    theirs = open_slabs(*three, model="theirs", frames=6)
    assert held(theirs) == KEYS[2:6]
    theirs.close()


def test_a_smaller_capacity_drops_what_is_beyond_it_and_a_larger_one_nothing(tmp_path):
    backend = open_slabs(tmp_path, frames=4)
    write(backend, *KEYS[:4])
    backend.close()
    backend = open_slabs(tmp_path, frames=2)
    assert held(backend) == KEYS[:2]
    assert (tmp_path / "kvtier.slab").stat().st_size == 2 * NBYTES
    backend.close()
    backend = open_slabs(tmp_path, frames=6)
    assert held(backend) == KEYS[:2]
    write(backend, *KEYS[2:6])
    assert all(whole(backend, key) for key in KEYS[:6])
    backend.close()


def test_a_capacity_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    with tmpfs(tmp_path, 1 << 20) as disk:
        path = disk.folder / "kv"
        backend = open_slabs(path, frames=4)
        write(backend, *KEYS[:4])
        backend.close()
        with pytest.raises(BackendError, match="does not fit on this file system .*; free some space there"):
            open_slabs(path, frames=1000)
        backend = open_slabs(path, frames=4)
        assert all(whole(backend, key) for key in KEYS[:4])
        backend.close()


def test_free_bytes_are_found_again_whatever_the_order():
    rng = random.Random(0)
    for _ in range(200):
        total = rng.randrange(1, 64) * FRAME_ALIGNMENT
        extents, taken = Extents([(0, total)]), {}
        for _ in range(100):
            if taken and rng.random() < 0.5:
                at = rng.choice(list(taken))
                extents.give(at, taken.pop(at))
            else:
                nbytes = rng.randrange(1, 9) * FRAME_ALIGNMENT
                gaps = _gaps(taken, total)
                at = extents.take(nbytes)
                assert (at is None) == (not any(gap >= nbytes for gap in gaps.values()))
                if at is not None:
                    assert min(gap for gap in gaps.values() if gap >= nbytes) == gaps[at], "not the shortest"
                    taken[at] = nbytes
            assert extents.free == total - sum(taken.values())
        gaps = _gaps(taken, total).items()
        assert Extents((at, at + nbytes) for at, nbytes in gaps).free == extents.free


def _gaps(taken, total):
    """Where each free extent begins, and its length."""
    gaps, end = {}, 0
    for at, nbytes in [*sorted(taken.items()), (total, 0)]:
        if at > end:
            gaps[end] = at - end
        end = at + nbytes
    return gaps


# -- namespaces ------------------------------------------------------------------------------------


def test_the_namespaces_of_others_are_reported(three):
    for model in ("first", "second", "without frames"):
        backend = open_slabs(*three, model=model)
        if model != "without frames":
            write(backend, *KEYS[:2], model=model)
        backend.close()
    backend = open_slabs(*three, model="ours")
    told = sorted(backend.namespaces(), key=lambda namespace: namespace.facts)
    assert told == [make_namespace("first"), make_namespace("second")]
    backend.close()


def test_odd_facts_are_passed_over(tmp_path):
    backend = open_slabs(tmp_path, model="theirs")
    write(backend, KEYS[0], model="theirs")
    backend.close()
    (facts,) = tmp_path.glob("kvtier.*.json")
    for odd in (b"", b"{", b'{"model": "another"}'):
        facts.write_bytes(odd)
        backend = open_slabs(tmp_path, model="ours")
        assert list(backend.namespaces()) == []
        backend.close()


def test_a_frame_longer_than_any_of_ours_is_dropped(tmp_path):
    backend = open_slabs(tmp_path)
    backend.write([KEYS[0]], [make_frame(KEYS[0], 2 * NBYTES)])
    write(backend, KEYS[1])
    backend.close()
    ctx = attrs.evolve(make_context(capacity=8 * NBYTES), max_frame_nbytes=NBYTES)
    backend = GdsConfig(paths=(tmp_path,)).open(ctx)
    assert held(backend) == [KEYS[1]]
    write(backend, *KEYS[2:9])
    backend.close()
