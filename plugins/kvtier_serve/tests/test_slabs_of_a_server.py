"""Engines read the slabs of a server by themselves: each for itself, and nothing is taken from under a read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal

import attrs
import pytest
from engine_process import BLOCKS, LAYOUT, NAMESPACE, OWN, READS, Engine, filled
from patience import HANG, wait_until
from served import PATIENT, serving
from sizes import every_third
from test_kills import engine, erase, server
from test_shared_stack import OTHERS, busy, steps_until

from kvtier_core.config.attach import attach_reader
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.stack.outcomes import LoadLimit, Terms
from kvtier_core.types import EventKind, ReadStatus, Slot, StoredFrame
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.memory import reader_handle_of, served_store, served_tier
from kvtier_remote.protocol import Opening

PATIENCE = LoadLimit(100.0, 100.0)
PAGES = [list(range(BLOCKS))]


def slabs(folder, capacity="8MiB", mode="gds"):
    return {"type": "gds", "paths": [str(folder / name) for name in "ab"], "capacity": capacity, "mode": mode}


class Worker:
    """Of an engine: it has pages, and reaches what the server has."""

    def __init__(self, stack):
        self.stack = stack
        self.pages = filled()
        self.right = self.pages.everything()
        (handle,) = stack.handles.values()
        self.mover = served_tier(handle).config.attach(handle, self.pages.kv_cache())
        self.readers = {
            name: attach_reader(*served_store(name, handle), self.pages.kv_cache())
            for name, handle in stack.reader_handles.items()
        }

    def store(self, keys, holder="store"):
        """Every chunk has the same content."""
        slots = [slot.index for slot in self.stack.reserve(keys, holder).values()]
        self.mover.store(1, [PAGES] * len(slots), slots)
        self.mover.wait([1])
        self.stack.commit(holder)
        self.stack.drain(HANG)

    def read(self, frame):
        """What its reader says of a frame; then the pages have its bytes, or are as they were."""
        erase(self.pages)
        before = self.pages.everything()
        reader = self.readers[frame.tier]
        reader.load(1, [frame], [PAGES])
        reader.wait([1])
        (ended,) = reader.finished()
        assert self.pages.everything() == (self.right if ended.ok else before)
        return ended.unread

    def load(self, holder="request"):
        """Everything of a path; returns what could not be used."""
        frames = self.stack.lookup(OWN, holder, Terms(PATIENCE)).slots
        assert len(frames) == len(OWN) and all(isinstance(frame, StoredFrame) for frame in frames)
        self.stack.load_begins(frames, holder)
        unread = {key: read for frame in frames for key, read in self.read(frame).items()}
        self.stack.load_ended(holder, unread, ok=not unread)
        self.stack.release(holder)
        return unread

    def close(self):
        for reader in self.readers.values():
            reader.close()
        self.mover.close()


@pytest.fixture
def served(tmp_path):
    """A server whose slabs have `OWN`, and whose memory has none of it."""
    with serving(tmp_path, 8, slabs(tmp_path)) as served:
        with worker_of(served.stack()) as worker:
            worker.store(OWN)
            worker.store(OTHERS)
        yield served


@contextlib.contextmanager
def worker_of(stack):
    worker = Worker(stack)
    try:
        yield worker
    finally:
        worker.close()


def gds(served):
    """The tier in the server."""
    (space,) = served.server.spaces
    (tier,) = space.stack.tiers
    return tier


def leased(served):
    """Is some frame where it has to stay?"""
    return served.server.ask(lambda: gds(served).readable(OWN) < gds(served).leasable(OWN) == len(OWN)).result()


def test_workers_read_what_another_engine_stored(served):
    stack = served.stack()
    with worker_of(stack) as worker:
        assert not worker.load()
        events = []
        wait_until(lambda: events.extend(stack.step()) or any(each.kind is EventKind.READ for each in events))
        assert not leased(served)


def test_a_worker_opens_the_slabs_for_reading_alone(served, tmp_path):
    def modes():
        links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd)}
        opened = [fd for fd, target in links.items() if target.endswith("kvtier.slab")]
        return [int(flags_of(fd), 8) & os.O_ACCMODE for fd in opened]

    def exists(fd):
        return os.path.lexists(f"/proc/self/fd/{fd}")

    def flags_of(fd):
        with open(f"/proc/self/fdinfo/{fd}") as file:
            return next(line.split()[1] for line in file if line.startswith("flags:"))

    before = modes()
    with worker_of(served.stack()):
        after = modes()
    assert sorted(before) == [os.O_RDWR] * 2 and sorted(after) == [os.O_RDONLY] * 2 + [os.O_RDWR] * 2


@pytest.mark.parametrize("how", ["it fails requests whose load fails", "its workers cannot read the slabs"])
def test_frames_pass_through_memory_for_an_engine_without_direct_reads_alone(served, how):
    reads, other = served.stack(), served.stack(recomputes="fails" not in how)
    with worker_of(reads) as worker:
        if "cannot" in how:
            assert list(other.reader_handles) == ["gds"]
            assert isinstance(other.lookup(OWN, "request", Terms(PATIENCE)).slots[0], StoredFrame)
            other.stop_direct_reads("gds", "rank 0: no such folder")
        else:
            assert other.reader_handles == {} and "workers read it: no, the engine fails" in other.describe()[-1]
        found = other.lookup(OWN, "request", Terms(PATIENCE))
        assert found.pending == len(OWN) and not found.slots, "what it waited with is still to be read by its workers"
        steps_until(other, lambda: not other.still_pending("request"))
        slots = other.lookup(OWN, "request", Terms(PATIENCE)).slots
        assert len(slots) == len(OWN) and all(isinstance(slot, Slot) for slot in slots)
        other.release("request")
        worker.store(OTHERS)  # evicts them from memory again
        assert not worker.load()


def test_a_frame_that_workers_read_is_a_miss_for_an_engine_that_needs_it_in_memory(served):
    """That engine computes it, and stores it in memory, for all."""
    reads, other = served.stack(), served.stack(recomputes=False)
    reads.lookup(OWN, "request", Terms(PATIENCE))
    found = other.lookup(OWN, "request", Terms(PATIENCE))
    assert not found.slots and not found.pending and found.miss_reason == "its frame in gds is read by workers"
    assert len(other.reserve(OWN, "store")) == len(OWN)
    other.release("store")
    reads.release("request")
    wait_until(lambda: other.lookup(OWN, "request", Terms(PATIENCE)).pending == len(OWN))


def test_an_engine_that_begins_an_epoch_reads_to_the_end_what_it_had_begun(served):
    stays, moves = served.stack(), served.stack()
    with worker_of(moves) as worker:
        frames = moves.lookup(OWN, "request", Terms(PATIENCE)).slots
        moves.load_begins(frames, "request")
        attachment = moves.attachment
        (space,) = served.server.spaces
        (tier,) = space.stack.tiers
        moves.invalidate_all(NAMESPACE.renewed())
        steps_until(moves, lambda: moves.attachment != attachment)
        assert moves.reader_handles == {}, "the slabs are of the first namespace"
        assert tier.readable(OWN) < len(OWN) and not any(map(worker.read, frames))
        moves.load_ended("request", {}, ok=True)
        moves.release("request")
        steps_until(stays, lambda: tier.readable(OWN) == len(OWN))
        assert len(stays.lookup(OWN, "request", Terms(PATIENCE)).slots) == len(OWN)


def test_handed_over_frames_of_a_slab_are_read_into_memory(served):
    found = served.stack().lookup(OWN, "handover", Terms(PATIENCE, not_direct=["gds"]))
    assert found.pending == len(OWN) and not found.slots


def test_a_prefetch_brings_up_what_workers_do_not_read(served):
    (space,) = served.server.spaces
    served.stack().prefetch(OWN)
    served.stack().drain(HANG)
    assert not any(space.stack.arenas[0].has(key) for key in OWN)
    other = served.stack(recomputes=False)
    other.prefetch(OWN)
    wait_until(lambda: other.step() or space.stack.arenas[0].has(OWN[0]))


def test_an_answer_from_before_direct_reads_were_stopped_is_not_used(served):
    stack = served.stack(waits=Waits(lookup=0.0))
    with busy(served.server):
        assert stack.lookup(OWN, "request").pending
        stack.stop_direct_reads("gds", "rank 0: no such folder")
    stack.drain(HANG)
    assert not any(isinstance(slot, StoredFrame) for slot in stack.lookup(OWN, "request").slots)
    steps_until(stack, lambda: not leased(served))


def test_a_frame_that_is_damaged_after_it_was_found_is_no_longer_found(served, tmp_path):
    first, second = served.stack(), served.stack()
    with worker_of(first) as worker:
        frame = first.lookup(OWN, "held", Terms(PATIENCE)).slots[0]
        slab, at = frame.location.place
        with open(tmp_path / "ab"[slab] / "kvtier.slab", "r+b") as file:
            os.pwrite(file.fileno(), b"\xff", at + 5000)
        unread = worker.load()
    assert {key: read.status for key, read in unread.items()} == {OWN[0]: ReadStatus.CORRUPT}
    first.release("held")
    wait_until(lambda: not second.lookup(OWN, "request", Terms(PATIENCE)).slots)
    assert not second.lookup(OWN, "request", Terms(PATIENCE)).pending


def test_frames_of_a_dead_engine_may_leave_once_its_worker_has_ended(served):
    stack = served.stack()
    worker = Worker(stack)
    frames = stack.lookup(OWN, "request", Terms(PATIENCE)).slots
    stack.load_begins(frames, "request")
    (space,) = served.server.spaces
    stack.close()
    wait_until(lambda: served.server.ask(lambda: any(each.hung_up for each in space.sessions)).result())
    assert leased(served), "its worker may still read it"
    assert gds(served).chooser.silence == 0.0, "others wait for what nobody will tell"
    assert worker.read(frames[0]) == {}
    worker.close()
    wait_until(lambda: not leased(served))


@pytest.mark.parametrize("steps", every_third(range(len(READS))), ids=[step.__name__ for step in READS])
def test_an_engine_that_is_killed_while_it_reads_leaves_nothing_behind(served, steps):
    with engine(served.path, steps, "READS") as killed:
        killed.send_signal(signal.SIGKILL)
    wait_until(lambda: not leased(served))
    with worker_of(served.stack()) as worker:
        assert not worker.load()


@pytest.mark.parametrize("steps", every_third(range(1, len(READS))), ids=[step.__name__ for step in READS[1:]])
def test_an_engine_reads_on_when_its_server_is_killed(tmp_path, steps):
    """Its files are open, and what it was promised is verified. What it was not is computed."""
    path = tmp_path / "kvtier.sock"
    with serving(tmp_path, 8, slabs(tmp_path)) as served, worker_of(served.stack()) as worker:
        worker.store(OWN)
    with server(tmp_path, path, slabs(tmp_path)) as killed, engine(path, steps, "READS") as running:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        running.stdin.write("go\n")
        running.stdin.flush()
        assert "done" in running.stdout.read() or READS[steps] is Engine.attaches


def test_frames_found_on_a_replaced_server_are_verified(tmp_path):
    """Engines of the next server overwrite it. Its own workers reach that server's slabs anew."""
    few = {**slabs(tmp_path, capacity=f"{8 * LAYOUT.frame_nbytes}B"), "eviction": "lru"}
    with serving(tmp_path, 8, few) as served, worker_of(served.stack()) as worker:
        worker.store(OWN)
    path = tmp_path / "kvtier.sock"
    with contextlib.ExitStack() as closing:
        killed = closing.enter_context(server(tmp_path, path, few))
        stack = RemoteStack(path, Opening("model", "engine", NAMESPACE, LAYOUT), PATIENT)
        closing.callback(stack.close)
        worker = closing.enter_context(worker_of(stack))
        frames = stack.lookup(OWN, "request", Terms(PATIENCE)).slots
        attachment = stack.attachment
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        served = closing.enter_context(serving(tmp_path, 8, few))
        with worker_of(served.stack()) as another:
            another.pages.fill(random.Random(2))
            another.store(OTHERS)
        unread = {key: read.status for frame in frames for key, read in worker.read(frame).items()}
        assert unread and set(unread.values()) == {ReadStatus.CORRUPT}
        steps_until(stack, lambda: stack.attachment != attachment)
        stack.load_ended("request", {}, ok=False)
        stack.release("request")
        assert list(stack.reader_handles) == ["gds"]
        assert not stack.lookup(OWN, "request", Terms(PATIENCE)).slots


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "gds", "paths": ["/a b", "/c"], "capacity": "1GiB", "mode": "gds", "timeout": "500ms"},
        {"type": "disk", "path": "/d", "shared": True, "min_free": "0B"},
        {"type": "redis", "url": "rediss://host:6379/0", "password": "env:SECRET", "ttl": "1min"},
    ],
    ids=lambda settings: settings["type"],
)
def test_a_worker_has_the_settings_of_the_server(settings):
    tiers = [{"type": "heap", "capacity": "1GiB"}, settings]
    (tier,) = load_config({"version": 1, "tiers": tiers}, Registry.discover()).stores
    told, handle = served_store("another name", reader_handle_of(tier, "a handle"))
    assert told == attrs.evolve(tier, name="another name") and handle == "a handle"


def test_a_plugin_that_the_engine_has_not_is_reported():
    handle = json.dumps({"tier": {"type": "slabs", "capacity": "1GiB"}, "handle": ""})
    with pytest.raises(ConfigError, match="the server's file.*no tier 'slabs' is installed"):
        served_store("slabs", handle)
