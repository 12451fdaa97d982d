"""A tier and its three guards, with the interleavings chosen: limits, refusals, what is lost, damaged or late."""

from __future__ import annotations

import random
import threading
import time

import pytest
from benches import FRAME, TierBench, sealed
from machine import LAYOUT, NAMESPACE, SharedShelf, Shelf

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.policies.lru import Lru, LruConfig
from kvtier_core.stack.store_tier import deletes
from kvtier_core.types import Event, EventKind, Usage
from kvtier_core.work.io_pool import IOPool
from kvtier_policies.fifo import FifoConfig
from kvtier_policies.lfu import LfuConfig
from kvtier_policies.mru import MruConfig
from kvtier_testing.samples import make_keys

KEYS = A, B, C, D, E, F = make_keys(6)


class Fussy(Lru):
    """Least recently used, and some keys not at all."""

    def __init__(self, *refused):
        super().__init__()
        self.refused = refused

    def prefers(self, newcomer, victim):
        return newcomer not in self.refused


@pytest.fixture
def bench():
    return TierBench()


# -- down and up ---------------------------------------------------------------------------------------


def test_down_and_up_again(bench):
    bench.write(A, B)
    assert bench.has(A, B) == [False, False], "before it is whole"
    assert bench.tier.usage() == Usage("disk", chunks=2, nbytes=2 * FRAME, capacity=4 * FRAME, inflight=2 * FRAME)
    bench.settle()
    assert bench.released == [A, B]
    slots = bench.read(A, B)
    assert bench.has(A, B) == [False, False], "named by a call in flight"
    bench.settle()
    assert slots == {A: sealed(A), B: sealed(B)}
    assert (bench.good, bench.bad) == ([A, B], [])
    assert bench.tier.events == [
        Event(EventKind.WRITTEN, "disk", (A, B), 2 * FRAME),
        Event(EventKind.READ, "disk", (A, B), 2 * FRAME),
    ]
    assert bench.tier.usage() == Usage("disk", chunks=2, nbytes=2 * FRAME, capacity=4 * FRAME)


def test_calls_are_timed_on_their_thread(bench):
    """The time that they waited for a thread does not count."""

    def slow(call, seconds):
        def answer(*arguments):
            bench.now += seconds
            return call(*arguments)

        return answer

    bench.shelf.write, bench.shelf.read = slow(bench.shelf.write, 0.5), slow(bench.shelf.read, 0.25)
    bench.write(A)
    bench.now += 100.0
    bench.settle()
    bench.read(A)
    bench.now += 100.0
    bench.settle()
    assert [(event.kind.value, event.seconds) for event in bench.tier.events] == [("written", 0.5), ("read", 0.25)]


def test_a_breaker_that_is_open_shows_in_the_usage(bench):
    bench.write(A)
    bench.settle()
    assert (bench.tier.usage().can_read, bench.tier.usage().can_write) == (True, True)
    bench.shelf.fails = True
    for _ in range(3):
        bench.read(A)
        bench.settle()
    assert (bench.tier.usage().can_read, bench.tier.usage().can_write) == (False, True)


def test_a_stored_frame_is_not_written_again(bench):
    bench.write(A)
    bench.write(A)
    assert bench.released == [A], "what is being written is not wanted, and its view is free at once"
    bench.settle()
    bench.write(A)
    assert bench.released == [A, A, A]
    assert bench.events() == [("written", [A])]


def test_an_absent_frame_is_not_read(bench):
    assert bench.read(A) == {}
    assert bench.pool.jobs == 0


# -- how much is in flight -----------------------------------------------------------------------------


def test_a_write_beyond_what_may_be_in_flight_is_refused():
    bench = TierBench(inflight=2)
    bench.write(A, B, C)
    assert bench.events() == [("rejected", [C])]
    assert bench.released == [C]
    assert not bench.tier.would_admit([D])
    bench.write(D)
    assert bench.events() == [("rejected", [D])]
    bench.settle()
    assert bench.tier.would_admit([C])
    assert bench.has(A, B, C, D) == [True, True, False, False]
    assert bench.tier.usage().inflight == 0


def test_a_read_beyond_what_may_be_in_flight_does_not_begin():
    bench = TierBench(inflight=2)
    for key in (A, B, C):
        bench.write(key)
        bench.settle()
    assert list(bench.read(A, B, C)) == [A, B]
    assert list(bench.read(C)) == []
    bench.settle()
    assert list(bench.read(C)) == [C]


# -- room ----------------------------------------------------------------------------------------------


def test_a_write_waits_until_its_victim_is_gone():
    bench = TierBench(frames=2)
    for key in (A, B):
        bench.write(key)
        bench.settle()
    bench.events()
    bench.write(C)
    assert len(bench.pool.queue) == 1, "the delete alone"
    assert bench.has(A, B) == [False, True], "a victim stays indexed until its delete ends, and is not read"
    assert not bench.tier.would_admit([A])
    bench.turn()
    assert set(bench.shelf.frames) == {B}
    bench.turn()
    assert set(bench.shelf.frames) == {B, C}
    assert bench.shelf.most == 2 * FRAME
    assert bench.events() == [("evicted", [A]), ("written", [C])]


def test_a_delete_that_fails_keeps_the_victim_and_refuses_the_newcomer():
    bench = TierBench(frames=1)
    bench.write(A)
    bench.settle()
    bench.shelf.fails = True
    bench.write(B)
    bench.turn()
    bench.shelf.fails = False
    assert bench.pool.jobs == 0
    assert bench.has(A, B) == [True, False]
    assert bench.released == [A, B]
    assert bench.tier.events[1:] == [
        Event(EventKind.IO_ERROR, "disk", (A,), why="BackendError: told to fail"),
        Event(EventKind.IO_ERROR, "disk", (B,), why="BackendError: no room: an earlier delete failed"),
    ]
    assert bench.tier.usage() == Usage("disk", chunks=1, nbytes=FRAME, capacity=FRAME)
    bench.write(B)
    bench.settle()
    assert bench.has(A, B) == [False, True]


@pytest.mark.parametrize("policy", [FifoConfig(), LfuConfig(), LruConfig(), MruConfig()], ids=lambda each: each.type)
def test_a_chunk_is_not_evicted_for_its_own_child(policy):
    """Without its parent a child is unreachable."""
    bench = TierBench(frames=3, policy=policy.open())
    for path in ([A, B], [D]):
        bench.write(*path)
        bench.settle()
    bench.tier.index.request([A, B, C], 1.0, {})
    bench.write(A, B, C)
    bench.settle()
    assert bench.has(A, B, C, D) == [True, True, True, False]


def test_more_than_the_capacity_is_refused_and_evicts_nothing():
    bench = TierBench(frames=2)
    bench.write(A, B, C)
    assert bench.events() == [("rejected", [C])]
    bench.settle()
    assert bench.has(A, B, C) == [True, True, False]


def test_a_chunk_that_the_policy_does_not_prefer_is_not_admitted():
    bench = TierBench(frames=1, policy=Fussy(B))
    assert bench.tier.would_admit([A]) == [A]
    bench.write(A)
    bench.settle()
    assert bench.tier.would_admit([B]) == []
    assert bench.tier.would_admit([C]) == [C]
    assert bench.pool.jobs == 0
    assert bench.has(A, B) == [True, False]


def test_a_rejection_says_why():
    bench = TierBench(frames=2, inflight=2)
    bench.write(A, B, C)
    assert bench.whys() == ["too many bytes are in flight"]
    bench.write(D)
    assert bench.whys() == ["too many bytes are in flight"]
    bench.settle()
    bench.read(A, B)
    bench.tier._inflight_limit = 100 * FRAME
    bench.write(C)
    assert bench.whys() == ["", "no room, and nothing can be evicted"]
    bench.settle()
    bench.write(C)  # evicts another one
    (leaving,) = {A, B} - {key for key in (A, B) if bench.tier.has(key)}
    bench.tier.events.clear()
    bench.write(leaving)
    assert bench.whys() == ["its last frame is still being deleted"]
    bench.settle()
    bench.shelf.fails = True
    for key in (D, E, F):
        bench.write(key)
        bench.settle()
    bench.whys()
    bench.write(D)
    assert bench.whys() == ["the store cannot be written now"]


def test_a_write_that_fails_half_way_leaves_nothing_behind(bench, monkeypatch):
    def write(keys, frames):
        bench.shelf.frames[keys[0]] = bytes(frames[0])
        raise BackendError("full")

    monkeypatch.setattr(bench.shelf, "write", write)
    bench.write(A, B)
    bench.settle()
    assert bench.shelf.frames == {}
    assert bench.released == [A, B]
    assert bench.tier.events == [Event(EventKind.IO_ERROR, "disk", (A, B), why="BackendError: full")]
    assert bench.tier.usage() == Usage("disk", chunks=0, nbytes=0, capacity=4 * FRAME)


# -- after a restart -----------------------------------------------------------------------------------


class Survivor(Shelf):
    """A store that knows what it holds, oldest first."""

    def __init__(self, *keys):
        super().__init__()
        self.frames = {key: bytes(sealed(key)) for key in keys}

    def scan(self):
        return iter([(key, len(held)) for key, held in self.frames.items()])


def test_frames_are_found_after_a_restart():
    bench = TierBench(shelf=Survivor(A, B))
    assert bench.has(A, B) == [True, True]
    assert bench.tier.usage().nbytes == 2 * FRAME
    assert bench.pool.jobs == 0


class Stammerer(Survivor):
    def scan(self):
        return iter([*super().scan(), *super().scan()])


def test_a_frame_that_a_scan_names_twice_is_held_once():
    bench = TierBench(shelf=Stammerer(A, B))
    assert bench.has(A, B) == [True, True]
    assert bench.tier.usage().nbytes == 2 * FRAME


def test_frames_beyond_the_capacity_leave_at_start_oldest_first():
    bench = TierBench(frames=2, shelf=Survivor(A, B, C, D))
    assert bench.has(A, B, C, D) == [False, False, True, True]
    bench.settle()
    assert list(bench.shelf.frames) == [C, D]
    assert bench.events() == [("evicted", [A, B])]
    assert bench.tier.usage().nbytes == 2 * FRAME


def test_a_frame_that_is_deleted_at_start_is_not_written_meanwhile():
    bench = TierBench(shelf=Survivor(A, B), frames=1)
    bench.write(A)
    bench.settle()  # in the unlikely order
    assert bench.has(A) == [A in bench.shelf.frames], "two calls in flight named the same key"


# -- a store that others use ---------------------------------------------------------------------------


@pytest.fixture
def shared():
    return TierBench(shelf=SharedShelf())


def test_presence_is_asked(shared):
    shared.shelf.frames[A] = bytes(sealed(A))
    assert shared.has(A) == [False]
    assert shared.tier.remote.request([A])
    assert shared.pool.jobs == 0, "a query moves nothing"
    shared.tier.poll()
    assert shared.pool.jobs == 1
    assert not shared.tier.would_admit([A]), "named by a call in flight"
    shared.settle()
    assert shared.has(A) == [True]
    assert not shared.tier.remote.request([A])
    slots = shared.read(A)
    shared.settle()
    assert slots == {A: sealed(A)}


def test_absence_is_believed_for_a_second(shared):
    assert shared.tier.remote.request([A])
    shared.tier.poll()
    shared.settle()
    assert not shared.tier.remote.request([A])
    shared.now = 0.99
    assert not shared.tier.remote.request([A])
    shared.tier.poll()
    assert shared.pool.jobs == 0
    shared.now = 1.0
    shared.shelf.frames[A] = bytes(sealed(A))
    assert shared.tier.remote.request([A])
    shared.tier.poll()
    shared.settle()
    assert shared.has(A) == [True]


def test_a_question_is_asked_once(shared):
    for _ in range(3):
        assert shared.tier.remote.request([A])
    shared.tier.poll()
    assert shared.tier.remote.request([A]), "still on its way"
    shared.tier.poll()
    assert shared.pool.jobs == 1


def test_a_key_that_is_written_meanwhile_is_not_asked_for(shared):
    assert shared.tier.remote.request([A])
    shared.write(A)
    shared.tier.poll()
    assert shared.pool.jobs == 1
    shared.settle()
    assert shared.has(A) == [True]


def test_a_private_store_is_not_asked(bench):
    bench.shelf.frames[A] = bytes(sealed(A))
    assert not bench.tier.remote.request([A])


def test_a_store_with_an_open_breaker_is_not_asked(shared):
    shared.shelf.fails = True
    for key in (A, B, C):
        assert shared.tier.remote.request([key])
        shared.tier.poll()
        shared.settle()
    assert shared.events()[-1] == ("breaker_open", [])
    assert not shared.tier.remote.request([D])
    shared.now = 1.0
    assert shared.tier.remote.request([D])


def test_frames_of_others_count_against_the_capacity():
    bench = TierBench(frames=2, shelf=SharedShelf())
    bench.shelf.frames = {key: bytes(sealed(key)) for key in KEYS}
    for key in KEYS:
        bench.tier.remote.request([key])
    bench.tier.poll()
    bench.settle()
    assert bench.tier.usage().nbytes <= bench.tier.usage().capacity


def test_a_shared_store_loses_no_frame_for_room():
    """An engine with less capacity, or in another epoch, knows less of the store; the others find all they stored."""
    shelf = SharedShelf()
    others = {key: bytes(sealed(key)) for key in KEYS}
    shelf.frames = dict(others)
    shelf.scan = lambda: pytest.fail("nobody lists a shared store")
    bench = TierBench(frames=2, shelf=shelf)
    for key in KEYS:
        bench.tier.remote.request([key])
    bench.tier.poll()
    bench.settle()
    bench.write(A)
    bench.settle()
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    assert bench.tier.usage().nbytes == 0
    assert shelf.frames == others


def test_a_frame_that_another_engine_deleted_is_only_forgotten(shared):
    shared.write(A)
    shared.settle()
    del shared.shelf.frames[A]
    shared.read(A)
    shared.settle()
    assert (shared.bad, shared.has(A)) == ([A], [False])
    assert not shared.tier.remote.request([A]), "a store whose answers contradict each other is not asked at once"
    shared.now = 1.0
    assert shared.tier.remote.request([A]), "and asked for again"


# -- endings -------------------------------------------------------------------------------------------


def test_clear_deletes_what_is_here(bench):
    bench.write(A, B)
    bench.settle()
    bench.tier.invalidate_all(NAMESPACE.renewed())
    assert bench.has(A, B) == [False, False]
    bench.settle()
    assert bench.shelf.frames == {}
    assert bench.tier.usage().nbytes == 0


def test_a_frame_written_during_an_invalidation_is_deleted_afterwards(bench):
    bench.write(A)
    bench.tier.invalidate_all(NAMESPACE.renewed())
    assert len(bench.pool.queue) == 1, "no delete beside the write"
    bench.turn()
    assert bench.released == [A]
    assert bench.has(A) == [False]
    bench.settle()
    assert bench.shelf.frames == {}
    bench.write(A)
    bench.settle()
    assert bench.has(A) == [True]


class Marked(FrameCodec):
    """Encodes to a frame that says under which namespace."""

    def encode(self, key, frame, salt):
        marked = memoryview(bytearray(frame))
        marked[-32:] = self.namespace.digest
        return marked


def test_a_waiting_write_keeps_the_namespace_of_its_key():
    bench = TierBench(frames=1)
    bench.tier._codec = Marked(NAMESPACE, LAYOUT, None)
    bench.write(A)
    bench.settle()
    written = []
    bench.shelf.write = lambda keys, frames: written.extend(bytes(frame[-32:]) for frame in frames)
    bench.write(B)  # waits for the delete of the first one
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    assert written == [NAMESPACE.digest]


def test_a_frame_read_during_an_invalidation_is_not_served(bench):
    bench.write(A)
    bench.settle()
    bench.read(A)
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.turn()
    assert (bench.good, bench.bad) == ([], [A])
    bench.settle()
    assert bench.shelf.frames == {}
    assert bench.tier.usage().nbytes == 0


def test_a_delete_that_fails_does_not_bring_back_what_was_cleared(bench):
    bench.write(A)
    bench.settle()
    bench.shelf.fails = True
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    bench.shelf.fails = False
    assert bench.has(A) == [False]
    assert bench.tier.usage().nbytes == FRAME, "it still lies in the store"


def test_a_delete_that_failed_does_not_bar_its_key_for_ever(bench):
    """Liveness: the store is well again, and the prompt is stored again and again."""
    bench.write(A)
    bench.settle()
    bench.shelf.fails = True
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    bench.shelf.fails = False
    for _ in range(10):
        bench.now += 100.0
        bench.tier.poll()  # what a manager does in each step
        bench.settle()
        if bench.tier.would_admit([A]):
            bench.write(A)
            bench.settle()
    assert bench.has(A) == [True]


class Closing(Shelf):
    closed = 0

    def close(self):
        self.closed += 1
        raise BackendError("closing failed")


def test_close_closes_the_store():
    bench = TierBench(shelf=Closing())
    assert bench.tier.close(1.0)
    assert bench.shelf.closed == 1


def test_close_leaves_a_store_alone_that_is_still_at_work(monkeypatch):
    bench = TierBench(shelf=Closing())
    monkeypatch.setattr(bench.pool, "close", lambda timeout: False)
    assert not bench.tier.close(1.0)
    assert bench.shelf.closed == 0


def test_an_epoch_deletes_a_tier_in_many_calls(bench, monkeypatch):
    """One call for all would take so long that it counts as hanging."""
    monkeypatch.setattr(deletes, "_BATCH", 2)
    bench.write(A, B, C)
    bench.settle()
    calls, delete = [], bench.shelf.delete
    bench.shelf.delete = lambda keys: (calls.append(len(keys)), delete(keys))
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    assert (sorted(calls), bench.shelf.frames, bench.tier.usage().nbytes) == ([1, 2], {}, 0)


# -- the promise to a backend, on real threads ---------------------------------------------------------


class Jealous(Shelf):
    """Notes whoever names a key that another call in flight names."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.clashes = []
        self.calls = 0
        self._lock = threading.Lock()
        self._named = set()

    def _during(self, name, keys, *more):
        with self._lock:
            self.calls += 1
            self.clashes += [(name, key) for key in keys if key in self._named]
            self._named.update(keys)
        time.sleep(0.0003)
        try:
            with self._lock:
                return getattr(super(), name)(keys, *more)
        finally:
            with self._lock:
                self._named.difference_update(keys)

    def contains(self, keys):
        return self._during("contains", keys)

    def read(self, keys, into):
        return self._during("read", keys, into)

    def write(self, keys, frames):
        return self._during("write", keys, frames)

    def delete(self, keys):
        return self._during("delete", keys)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("seed", range(2))
def test_no_two_calls_in_flight_name_the_same_key(seed, shared):
    rng = random.Random(seed)
    bench = TierBench(frames=4, shelf=Jealous(shared), pool=IOPool("test", threads=4))
    moves = {
        "write": lambda keys: bench.write(*keys),
        "read": lambda keys: bench.read(*keys),
        "ask": lambda keys: [[bench.tier.remote.request([key]) for key in keys], bench.tier.poll()],
        "renew": lambda keys: bench.tier.invalidate_all(NAMESPACE),
        "pass time": lambda keys: setattr(bench, "now", bench.now + 0.5),
        "wait": lambda keys: bench.pool.wait(0.01),
    }
    for _ in range(3000):
        move = rng.choices(list(moves), weights=(6, 6, 3, 1, 1, 3))[0]
        moves[move](rng.sample(KEYS, rng.randrange(1, 4)))
        bench.step()
    bench.settle()
    assert bench.shelf.clashes == []
    assert bench.shelf.calls > 100
    assert bench.good, "nothing was ever read"
    if not shared:
        assert sum(map(len, bench.shelf.frames.values())) == bench.tier.usage().nbytes
    assert bench.tier.close(10.0)


def test_while_a_call_hangs_no_other_waits_for_the_store(bench):
    bench.write(A)
    bench.settle()
    bench.events()
    bench.pool.oldest = 10.1
    bench.tier.poll()
    assert (bench.has(A), bench.tier.would_admit([B]), bench.tier.remote.request([B])) == ([False], [], False)
    assert bench.read(A) == {}
    bench.tier.poll()
    assert bench.events() == [("breaker_open", [])]
    bench.pool.oldest = 0.0
    bench.tier.poll()
    assert (bench.has(A), bench.tier.would_admit([B])) == ([True], [B])
    assert bench.events() == [("breaker_closed", [])]
