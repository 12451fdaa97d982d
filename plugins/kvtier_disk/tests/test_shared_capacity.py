"""One capacity for all engines of a folder: what lies there never exceeds it, and the oldest frames leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from patience import HANG
from servers.stopping import stop
from test_disk import NBYTES, file_of, write
from test_shared_disk import open_shared

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.format import verify
from kvtier_disk import shared, shared_account
from kvtier_disk.shared_account import FolderAccount, recount_folder
from kvtier_testing.samples import make_frame, make_key, make_keys, make_namespace

ROOM = 24
CAPACITY = ROOM * NBYTES
#: Seconds by which the time of a file may differ from that of the clock: a tick of the kernel, and more.
TICK = 0.02
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def engine(tmp_path):
    """Opens the folder for one more engine; all are closed afterwards."""
    opened = []

    def engine(capacity=CAPACITY, **settings):
        opened.append(open_shared(tmp_path / "kv", capacity=capacity, **settings))
        return opened[-1]

    yield engine
    for each in opened:
        each.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


def frames_in(path):
    return {file.stem for file in path.glob("*/??/*.kv")}


def stored(path):
    """Bytes of all frames, and of files that are not finished."""
    return sum(file.stat().st_size for file in path.glob("*/??/*"))


def used(path):
    """The bytes in the account."""
    taken, freed = (path / ".kvtier-shared").read_text().split()
    return int(taken) - int(freed)


def age(path, frames):
    """Make the frames of these keys and models old, the first the oldest."""
    for seconds, (key, model) in enumerate(frames):
        os.utime(file_of(path, key, model), (seconds, seconds))


# -- one after the other ---------------------------------------------------------------------------


def test_the_oldest_leave_of_whatever_namespace_and_writer(path, engine):
    ours, theirs = engine(), engine(model="theirs")
    keys = make_keys(ROOM)
    write(ours, *keys[::2])
    write(theirs, *keys[1::2])
    age(path, [(key, "theirs" if number % 2 else "tiny") for number, key in enumerate(keys)])
    write(engine(), *make_keys(ROOM + 5)[ROOM:])
    stayed = [key.hex() in frames_in(path) for key in keys]
    assert stayed == sorted(stayed) and 5 <= stayed.count(False) <= 6, "the oldest, and one more for headroom"
    assert stored(path) == used(path) <= CAPACITY


def test_replaced_and_deleted_frames_return_their_space(path, engine):
    ours, theirs = engine(), engine()
    keys = make_keys(ROOM // 2)
    for _ in range(3):
        for each in (ours, theirs):
            write(each, *keys)
    assert used(path) == stored(path) == len(keys) * NBYTES
    theirs.delete([*keys[:4], make_key(99)])
    assert used(path) == stored(path) == (len(keys) - 4) * NBYTES


def test_a_frame_that_is_longer_than_the_one_it_replaces(path, engine):
    ours, key = engine(), make_key(0)
    for pages in (4, 9, 2, 16):
        ours.write([key], [make_frame(key, nbytes=pages * 4096)])
        assert used(path) == stored(path) == pages * 4096


def test_an_engine_without_a_capacity_removes_nothing(path, engine):
    bounded, unbounded = engine(), engine(capacity=0)
    keys = make_keys(2 * ROOM)
    write(bounded, *keys[:ROOM])
    write(unbounded, *keys[ROOM:])
    assert len(frames_in(path)) == 2 * ROOM
    write(bounded, *keys[:1])
    write(bounded, make_key(99))
    assert stored(path) <= CAPACITY, "what it wrote is found when the folder is listed"


def test_a_capacity_counts_the_frames_that_are_already_there(path, engine):
    write(engine(capacity=0), *make_keys(ROOM))
    write(engine(), make_key(99))
    assert 0.9 * CAPACITY < stored(path) == used(path) <= CAPACITY


@pytest.mark.parametrize("content", [b"", b"garbage", b"1" * 41, b"\0" * 42])
def test_a_damaged_account_is_replaced(path, engine, content):
    write(engine(), *make_keys(ROOM))
    (path / ".kvtier-shared").write_bytes(content)
    write(engine(), *make_keys(2 * ROOM)[ROOM:])
    assert 0.9 * CAPACITY < stored(path) == used(path) <= CAPACITY


def test_a_failed_write_gives_back_what_it_took(path, engine, monkeypatch):
    ours, keys = engine(io="calls"), make_keys(3)
    write(ours, *keys)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(BackendError, match="Input/output error"):
            write(ours, *keys)
    assert used(path) == stored(path) == 3 * NBYTES


def test_a_frame_that_was_replaced_since_it_was_listed_stays(path, engine, monkeypatch):
    """It was the oldest, and is the newest now."""
    ours, theirs, keys = engine(), engine(), make_keys(ROOM + 1)
    write(ours, *keys[:ROOM])
    age(path, [(key, "tiny") for key in keys[:ROOM]])
    listed = FolderAccount.oldest

    def listed_and_then_replaced(account):
        frames = list(listed(account))
        os.utime(file_of(path, keys[0]))
        return frames

    monkeypatch.setattr(FolderAccount, "oldest", listed_and_then_replaced)
    write(theirs, keys[ROOM])
    assert keys[0].hex() in frames_in(path) and keys[1].hex() not in frames_in(path)
    assert used(path) == stored(path) <= CAPACITY


def test_an_eviction_of_a_large_folder_lists_a_bounded_number_of_frames(path, engine, monkeypatch):
    for module in (shared, shared_account):
        monkeypatch.setattr(module, "MOST_LISTED", 32)
    capacity = 200 * NBYTES
    ours, keys = engine(capacity), make_keys(230)
    write(ours, *keys[:200])
    age(path, [(key, "tiny") for key in keys[:200]])
    listed = []
    everything_in = shared_account.everything_in

    def counted(*shard):
        for place, found in everything_in(*shard):
            listed.append(found)
            yield place, found

    monkeypatch.setattr(shared_account, "everything_in", counted)
    most = 0
    for key in keys[200:]:
        listed.clear()
        write(ours, key)
        most = max(most, len(listed))
        assert stored(path) <= capacity
    assert 0 < most < 50, "33 frames, the rest of the last folder, and the next one"
    assert {key.hex() for key in keys[200:]} <= frames_in(path), "the newest stay"
    assert used(path) >= stored(path)
    ours.close()
    recount_folder(path, capacity)
    assert used(path) == stored(path)


def test_a_folder_of_another_namespace_that_others_may_write_to_is_passed_over(path, engine):
    write(engine(model="theirs"), *make_keys(2))
    file_of(path, make_key(0), "theirs").parents[1].chmod(0o777)
    ours = engine()
    for key in make_keys(2 * ROOM):
        write(ours, key)
    assert file_of(path, make_key(0), "theirs").exists()


# -- locks -----------------------------------------------------------------------------------------


def test_where_files_cannot_be_locked_a_capacity_is_refused(engine, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(BackendError, match="this file system has no locks, which a capacity needs; mount it with"):
        engine()
    write(engine(capacity=0), make_key(0))


@pytest.mark.parametrize("lock", [".kvtier-shared", ".kvtier-evicting"])
def test_an_engine_that_holds_a_lock_keeps_no_other_for_ever(path, engine, lock):
    """It may be stopped, or its machine may be cut off. Reads go on."""
    ours = engine(timeout=0.2)
    write(ours, *make_keys(ROOM))
    with open(path / lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BackendError, match=f"{lock}: another engine has held its lock for 0.2 seconds") as raised:
            write(ours, make_key(99))
        assert isinstance(raised.value, StoreFull) == (lock == ".kvtier-evicting"), "one that makes room breaks nothing"
        assert all(ours.contains(make_keys(ROOM)))
        fcntl.flock(held, fcntl.LOCK_UN)
    write(ours, make_key(99))
    assert used(path) == stored(path)


# -- several processes -----------------------------------------------------------------------------


def write_on(path, numbers, to_parent):
    """Open the folder and write a frame for each number; tell when each write began and ended."""
    engine = open_shared(Path(path), capacity=CAPACITY, timeout=HANG)
    to_parent.send("open")
    for number in numbers:
        key = make_key(number)
        began = time.time()
        engine.write([key], [make_frame(key, nbytes=NBYTES)])
        to_parent.send((key.hex(), began, time.time()))
    engine.close()
    to_parent.send("done")


class Writer:
    """A process that writes frames of its own."""

    def __init__(self, path, numbers):
        self.from_child, to_parent = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=write_on, args=(path, numbers, to_parent), daemon=True)
        self.process.start()
        to_parent.close()
        self.told = []

    def listen(self):
        """Take in what it has said; False once it says nothing more."""
        with contextlib.suppress(EOFError):
            while self.from_child.poll():
                self.told.append(self.from_child.recv())
            return True
        return False

    def stop(self):
        """Stop it, wherever it is."""
        with contextlib.suppress(ProcessLookupError):
            stop(self.process.pid)

    def go_on(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def writers(path, *numbers):
    """A process for each of these, all of which have opened the folder."""
    each = [Writer(path, of_one) for of_one in numbers]
    try:
        for writer in each:
            assert writer.from_child.poll(HANG)
        yield each
    finally:
        for writer in each:
            writer.process.kill()
            writer.process.join()
            writer.from_child.close()


def watch(path, writers):
    """Bytes in the folder, again and again until all have ended; nothing moves while they are counted."""
    seen = []
    while [writer.listen() for writer in writers] != [False] * len(writers):
        for writer in writers:
            writer.stop()
        seen.append(stored(path))
        for writer in writers:
            writer.go_on()
        time.sleep(0.002)
    return [*seen, stored(path)]


def test_three_processes_never_exceed_the_capacity_and_the_oldest_leave(path):
    ranges = [range(first, first + 100) for first in (0, 1000, 2000)]
    with writers(path, *ranges) as three:
        seen = watch(path, three)
    assert all(writer.told[-1] == "done" for writer in three)
    assert 0.9 * CAPACITY < max(seen) <= CAPACITY
    assert used(path) == stored(path)
    written = [each for writer in three for each in writer.told[1:-1]]
    left = frames_in(path)
    oldest_left = min(ended for name, _, ended in written if name in left)
    for name, began, _ in written:
        assert name in left or began < oldest_left + TICK, "a frame left that was younger than one that stayed"


def test_writers_that_are_killed_leave_no_torn_frame_and_never_too_much(path, engine):
    rng, seen = random.Random(0), []
    for round_ in range(4):
        numbers = [itertools.count(1000 * (3 * round_ + i)) for i in range(2)]
        with writers(path, *numbers) as (doomed, lives):
            deadline = time.monotonic() + rng.uniform(0.05, 0.2)
            while time.monotonic() < deadline:
                lives.listen()
            os.kill(doomed.process.pid, signal.SIGKILL)
            doomed.process.join()
            so_far = len(lives.told)
            while len(lives.told) < so_far + 2 * ROOM:  # it goes on, and evicts
                lives.stop()
                seen.append(stored(path))
                lives.go_on()
                time.sleep(0.002)
                assert lives.listen()
    assert max(seen) <= CAPACITY
    assert stored(path) <= used(path), "what the killed ones had taken counts as used"
    for file in path.glob("*/??/*.kv"):
        assert verify(memoryview(file.read_bytes()), make_namespace(), bytes.fromhex(file.stem)) is None
    write(engine(), make_key(0))
