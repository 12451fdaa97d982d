"""Kept memory that another process truncates: nobody dies, nobody gets other bytes, and the server begins anew."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest
from engine_process import LAYOUT, OWN, STEPS, filled
from patience import HANG, wait_until
from served import serving
from servers.stopping import stopped
from test_kept_memory import CAPACITY, PAGES, SLOTS, Engine, adopted, attached, keep  # noqa: F401 - fixtures
from test_kills import engine, erase, server
from test_shared_stack import OTHERS

from kvtier_core import native
from kvtier_core.errors import BackendError
from kvtier_core.stack import write_through
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import FRAME_MAGIC
from kvtier_serve.kept import adoption

FILLED = filled().everything()
NBYTES = SLOTS * LAYOUT.frame_nbytes

pytestmark = pytest.mark.skipif(native.extension is None, reason="without the extension the process ends")


def truncate(folder, nbytes=0):
    os.truncate(folder / "memory", nbytes)


def attach_again(engine, attachment):
    """As a worker does when the server has hung up."""
    wait_until(lambda: engine.stack.step() or engine.stack.attachment > attachment)
    engine.mover.close()
    engine.attach()


def loads(engine, keys):
    """How many chunks are found and loaded, each with the bytes that were stored; the others' loads have failed."""
    loaded = 0
    for slot in engine.stack.lookup(keys, "request").slots:
        erase(engine.buffer)
        before = engine.buffer.everything()
        try:
            engine.mover.load(2, [slot.index], PAGES)
        except BackendError:
            continue
        engine.mover.wait([2])
        if engine.mover.finished()[0].ok:
            loaded += 1
            assert engine.buffer.everything() == FILLED != before, "other bytes than those that were stored"
    engine.stack.release("request")
    return loaded


@pytest.mark.parametrize("nbytes", [0, 100, NBYTES // 2, NBYTES - 4096, NBYTES - 1])
def test_an_engine_truncates_the_memory_of_others(nbytes, tmp_path, keep, attached):  # noqa: F811
    path = tmp_path / "kvtier.sock"
    half = [step.__name__ for step in STEPS].index("fills_the_rest")
    with server(tmp_path, path, keep=keep, capacity=CAPACITY) as running, engine(path, half) as storing:
        own = attached(path)
        own.store(OTHERS)
        assert loads(own, OTHERS) == len(OTHERS)
        with stopped(running.pid):  # until it has noticed
            truncate(keep, nbytes)
            with pytest.raises(BackendError, match="the memory of the server was truncated or opened to others"):
                own.mover.load(5, [0], PAGES)
        storing.stdin.write("go\n")
        storing.stdin.flush()
        attach_again(own, 1)
        assert not loads(own, OTHERS), "what was in the memory is found"
        own.store(OTHERS)
        assert loads(own, OTHERS) == len(OTHERS)
        assert (keep / "memory").stat().st_size == NBYTES
        storing.wait()
        assert running.poll() is None and storing.returncode >= 0, "a signal has ended one"


@pytest.mark.parametrize("left", [0, 4096 + 100, LAYOUT.frame_nbytes - 100], ids=["none", "some", "all-but-the-end"])
def test_a_load_that_meets_a_truncation_has_failed(left, tmp_path, keep, attached, monkeypatch):  # noqa: F811
    """``left`` bytes of the slot. The end of a page reads as zeros although the page is there."""
    load = HostMover.load
    with serving(tmp_path, SLOTS, keep=keep) as served:
        own = attached(served.path)
        slot = next(iter(own.store(OWN).values())).index

        def truncated_first(*arguments):
            truncate(keep, slot * LAYOUT.frame_nbytes + left)
            load(*arguments)

        monkeypatch.setattr(HostMover, "load", truncated_first)
        own.mover.load(2, [slot], PAGES)
        own.mover.wait([2])
        assert [each.ok for each in own.mover.finished()] == [False]


def test_what_was_sealed_in_truncated_memory_is_written_nowhere(tmp_path, keep, attached, monkeypatch):  # noqa: F811
    lost_before_it_is_sealed(tmp_path, keep, attached, monkeypatch, lambda: truncate(keep))


def lost_before_it_is_sealed(tmp_path, keep, attached, monkeypatch, lose):  # noqa: F811
    """Nothing is written of memory that ``lose`` truncates or opens while its chunks are sealed, and none is found."""
    seal, disk = write_through.seal_part, tmp_path / "disk"

    def lost_first(*arguments, **options):
        lose()
        seal(*arguments, **options)

    monkeypatch.setattr(write_through, "seal_part", lost_first)
    with serving(tmp_path, SLOTS, {"type": "disk", "path": str(disk), "capacity": "1MiB"}, keep=keep) as served:
        own = attached(served.path)
        own.store(OWN)
        attach_again(own, 1)
        monkeypatch.undo()
        assert not [each for each in disk.rglob("*") if each.is_file() and each.read_bytes().startswith(FRAME_MAGIC)]
        assert not loads(own, OWN)


def test_memory_that_is_truncated_while_it_is_adopted_is_lost(tmp_path, keep, attached, monkeypatch):  # noqa: F811
    with serving(tmp_path, SLOTS, keep=keep) as first:
        before = attached(first.path)
        before.store(OWN)
        before.close()
    verify = adoption.verify

    truncated = threading.Event()

    def truncated_last(*arguments, **options):
        found = verify(*arguments, **options)
        truncate(keep)
        truncated.set()
        return found

    monkeypatch.setattr(adoption, "verify", truncated_last)
    with serving(tmp_path, SLOTS, keep=keep) as second:
        assert truncated.wait(HANG)
        wait_until(lambda: (keep / "memory").stat().st_size == NBYTES)
        monkeypatch.undo()
        adopted(second)
        after = attached(second.path)
        assert not loads(after, OWN)
        after.store(OWN)
        assert loads(after, OWN) == len(OWN)


def test_truncations_at_any_moment(tmp_path, keep, attached):  # noqa: F811
    """Beside stores, loads, seals and writes to a disk."""
    drawn, path, ends = random.Random(0), tmp_path / "kvtier.sock", threading.Event()
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1MiB"}
    with server(tmp_path, path, disk, keep=keep, capacity=CAPACITY) as running:
        own = attached(path)

        def truncates():
            while not ends.wait(drawn.random() / 20):
                truncate(keep, drawn.choice([0, drawn.randrange(NBYTES)]))

        thread = threading.Thread(target=truncates)
        thread.start()
        try:
            for _ in range(300):
                attachment = own.stack.attachment
                own.stack.step()
                if own.stack.attachment != attachment:
                    own.mover.close()
                    try:
                        own.attach()
                    except BackendError:
                        continue
                loads(own, OWN)
                own.stack.on_request(OWN)
                slots = own.stack.reserve(OWN, "store")
                try:
                    own.mover.store(1, PAGES * len(slots), [slot.index for slot in slots.values()])
                except BackendError:
                    own.stack.release("store")
                    continue
                own.mover.wait([1])
                own.mover.finished()
                own.stack.commit("store")
        finally:
            ends.set()
            thread.join()
        assert running.poll() is None, "the server has ended"


GUARDED = """
import faulthandler, mmap, os, sys
from kvtier_remote.guarded_memory import GuardedMemory
file = os.memfd_create("file")
os.truncate(file, 1 << 20)
faulthandler.enable()
memory = GuardedMemory(file)
memory[:] = b"x" * len(memory)
plain = mmap.mmap(file, 0)
os.truncate(file, 4096)
assert memory.is_broken
assert memory[:4096] == b"x" * 4096 and memory[8192] == 0 and memory[0] == 0, "all of it becomes zeros"
memory[:] = b"y" * len(memory)
os.truncate(file, 1 << 20)
assert memory.is_broken, "for good"
assert plain[0:4096] == b"x" * 4096, "what was written since is nowhere else"
os.truncate(file, 4096)
print("lives", flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then", ["plain[8192]", "del memory; plain[8192]", "os.kill(os.getpid(), 7)"], ids=["another", "no-more", "sent"]
)
def test_other_bus_errors_end_the_process_as_before(then):
    ended = subprocess.run([sys.executable, "-c", GUARDED.format(then=then)], capture_output=True, text=True)
    assert ended.stdout == "lives\n", ended.stderr
    assert ended.returncode == -7 and "Fatal Python error: Bus error" in ended.stderr


def test_a_process_has_many_guarded_memories():
    script = """
import os
from kvtier_remote.guarded_memory import GuardedMemory
for round in range(10):
    files = [os.memfd_create("file") for _ in range(30)]
    for file in files:
        os.truncate(file, 8192)
    memories = [GuardedMemory(file) for file in files]
    for number in range(0, 30, 2):
        os.truncate(files[number], 0)
        assert memories[number][5000] == 0
    for number, memory in enumerate(memories):
        assert memory.is_broken == (number % 2 == 0)
    for file in files:
        os.close(file)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
