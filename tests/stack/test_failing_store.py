"""A tier over a store that fails: frames that are lost, damaged or late, wrong answers, no room, a breaker."""

from __future__ import annotations

import pytest
from benches import FRAME, TierBench, sealed
from machine import NAMESPACE, SharedShelf, Shelf

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import Event, EventKind
from kvtier_testing.samples import make_keys

KEYS = A, B, C, D, E, F = make_keys(6)


@pytest.fixture
def bench():
    return TierBench()


# -- what went wrong below -----------------------------------------------------------------------------


def test_frames_that_the_store_lost_are_forgotten(bench):
    bench.write(A, B)
    bench.settle()
    bench.events()
    del bench.shelf.frames[A]
    bench.read(A, B)
    bench.settle()
    assert (bench.good, bench.bad) == ([B], [A])
    assert bench.events() == [("missing", [A]), ("read", [B])]
    assert bench.has(A, B) == [False, True]
    assert bench.tier.usage().nbytes == FRAME
    assert bench.tier.would_admit([A])


def test_a_damaged_frame_is_deleted_and_never_served(bench):
    bench.write(A, B)
    bench.settle()
    bench.tier.events.clear()
    bench.shelf.frames[A] = bench.shelf.frames[B]
    bench.read(A, B)
    bench.turn()
    assert (bench.good, bench.bad) == ([B], [A])
    assert bench.tier.events == [
        Event(EventKind.CORRUPT, "disk", (A,), why="a frame of another key"),
        Event(EventKind.READ, "disk", (B,), FRAME),
    ]
    assert bench.has(A) == [False]
    bench.settle()
    assert set(bench.shelf.frames) == {B}
    assert len(bench.tier.events) == 2
    assert bench.tier.usage().nbytes == FRAME
    assert bench.tier.would_admit([A])


def test_the_backend_quarantines_a_damaged_frame(bench, monkeypatch):
    aside = []
    monkeypatch.setattr(bench.shelf, "quarantine", lambda keys: aside.extend(bench.shelf.frames.pop(k) for k in keys))
    bench.write(A, B)
    bench.settle()
    bench.shelf.frames[A] = spoiled = bench.shelf.frames[B]
    bench.read(A, B)
    bench.settle()
    assert aside == [spoiled]
    assert set(bench.shelf.frames) == {B}


def test_remains_of_a_lost_frame_are_deleted(bench, monkeypatch):
    """A read may find a frame too short to be one, and say that it is not there."""
    bench.write(A)
    bench.settle()
    monkeypatch.setattr(bench.shelf, "read", lambda keys, into: [0] * len(keys))
    bench.read(A)
    bench.settle()
    assert (bench.shelf.frames, bench.tier.usage().nbytes) == ({}, 0)


def test_a_frame_that_cannot_be_read_fails_alone(bench, monkeypatch):
    """However often it happens: nobody else misses, and the breaker is not told."""
    bench.write(B, C)
    bench.settle()
    read = bench.shelf.read
    bad_sector = BackendError("sdb: Input/output error")

    def read_all_but_one(keys, into):
        return [bad_sector if key == A else count for key, count in zip(keys, read(keys, into), strict=True)]

    monkeypatch.setattr(bench.shelf, "read", read_all_but_one)
    for _ in range(5):
        bench.write(A)
        bench.settle()
        bench.tier.events.clear()
        bench.good, bench.bad = [], []
        slots = bench.read(A, B, C)
        bench.settle()
        assert (bench.good, bench.bad) == ([B, C], [A])
        assert (slots[B], slots[C]) == (sealed(B), sealed(C))
        assert bench.tier.events == [
            Event(EventKind.CORRUPT, "disk", (A,), why="sdb: Input/output error"),
            Event(EventKind.READ, "disk", (B, C), 2 * FRAME),
        ]
        assert set(bench.shelf.frames) == {B, C}
        assert bench.tier.would_admit([A]) == [A]


def test_an_error_is_distinguished_from_a_miss_and_from_a_length(bench, monkeypatch):
    """Only a BackendError is an answer; what else is returned is a plugin's mistake, and fails the call."""
    bench.write(A)
    bench.settle()
    bench.tier.events.clear()
    monkeypatch.setattr(bench.shelf, "read", lambda keys, into: [OSError(5, "no BackendError")])
    bench.read(A)
    bench.settle()
    assert [event.kind for event in bench.tier.events] == [EventKind.IO_ERROR]
    assert bench.has(A) == [True]


def test_one_that_can_never_be_deleted_keeps_no_other(bench, monkeypatch):
    """Neither the others that are to go with it, nor those that are to be written."""
    bench.write(A, B, C)
    bench.settle()
    delete, asked = bench.shelf.delete, []

    def stubborn(keys):
        asked.append(list(keys))
        if A in keys:
            raise BackendError("immutable")
        delete(keys)

    monkeypatch.setattr(bench.shelf, "delete", stubborn)
    bench.tier.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    for _ in range(100):
        bench.now += 1.0
        bench.tier.poll()
        bench.settle()
    assert set(bench.shelf.frames) == {A}
    assert bench.tier.usage().nbytes == FRAME, "what is left counts"
    assert len(asked) < 30, "it is not asked for all the time"
    assert "breaker_open" not in [kind for kind, _ in bench.events()]
    assert bench.tier.would_admit([A, B, C]) == [B, C]


# -- a store that is full before its tier ------------------------------------------------------------


class Cramped(Shelf):
    """Has room for so many frames, whatever its tier was granted."""

    def __init__(self, frames, missing=FRAME):
        super().__init__()
        self.room = frames
        self.missing = missing

    def write(self, keys, frames):
        if len(self.frames.keys() | set(keys)) > self.room:
            raise StoreFull("no room", missing=self.missing)
        super().write(keys, frames)


def test_a_full_store_takes_newcomers_and_evicts_its_own():
    bench = TierBench(frames=100, shelf=Cramped(3))
    for _ in range(10):
        for key in (A, B, C, D, E, F):
            bench.tier.index.request([key], bench.now, {})
            bench.write(key)
            bench.settle()
    kinds = [kind for kind, _ in bench.events()]
    assert "breaker_open" not in kinds
    assert kinds.count("io_error") == 1, "it is learned once"
    assert kinds.count("written") > 50
    assert F in bench.shelf.frames, "the newest is there"
    assert bench.tier.usage().nbytes == FRAME * len(bench.shelf.frames)


def test_a_store_with_room_again_is_filled_again():
    bench = TierBench(frames=5, shelf=Cramped(3))
    for key in (A, B, C, D, E):
        bench.write(key)
        bench.settle()
    assert len(bench.shelf.frames) < 4
    bench.shelf.room = 5
    bench.now += 61.0
    for key in (A, B, C, D, E):
        bench.write(key)
        bench.settle()
    assert set(bench.shelf.frames) == {A, B, C, D, E}


def test_a_frame_larger_than_the_tier_evicts_nothing():
    """Somebody else filled the store: to delete the own frames would change nothing."""
    bench = TierBench(frames=5, shelf=Cramped(2, missing=2 * FRAME))
    for key in (A, B, C, D):
        bench.write(key)
        bench.settle()
    assert bench.has(A, B, C, D) == [True, True, False, False]
    assert bench.tier.would_admit([C]) == []
    kinds = [kind for kind, _ in bench.events()]
    assert "breaker_open" not in kinds and "evicted" not in kinds
    bench.shelf.room = 5
    bench.now += 61.0
    bench.write(C)
    bench.settle()
    assert bench.has(A, B, C) == [True] * 3


class Contested(Cramped):
    """Somebody else takes what is deleted."""

    def delete(self, keys):
        self.room -= len(self.frames.keys() & set(keys))
        super().delete(keys)


def test_a_store_is_not_emptied_for_room_that_others_take():
    """It is full after one round of evictions, and tried again each minute, until a write succeeds."""
    bench = TierBench(frames=100, shelf=Contested(6))
    keys = make_keys(200)
    for number, key in enumerate(keys[:100]):
        if number > 50:
            bench.now += 61.0
        bench.write(key)
        bench.settle()
    assert len(bench.shelf.frames) == 4
    assert bench.tier.would_admit(keys[100:101]) == []
    bench.events()
    bench.write(keys[100])
    assert bench.whys() == ["the store is full"]
    bench.shelf.room = 100
    bench.now += 61.0
    for key in keys[-10:]:
        bench.write(key)
        bench.settle()
    assert bench.has(*keys[-10:]) == [True] * 10


def test_a_store_without_any_room_is_full_and_not_broken():
    bench = TierBench(frames=100, shelf=Cramped(0))
    for key in (A, B, C, D, E, F):
        bench.write(key)
    bench.settle()
    assert [kind for kind, _ in bench.events()] == ["io_error"] * 6
    assert bench.tier.usage().can_write


def test_frames_that_wait_while_the_store_turns_out_to_be_full_are_no_failure():
    bench = TierBench(frames=100, shelf=Cramped(2))
    for key in (A, B, C, D, E, F):
        bench.write(key)
    bench.settle()
    assert "breaker_open" not in [kind for kind, _ in bench.events()]
    assert sorted(bench.released) == sorted([A, B, C, D, E, F])
    assert bench.tier.usage().nbytes == FRAME * len(bench.shelf.frames) <= 2 * FRAME
    bench.write(F)
    bench.settle()
    assert bench.has(F) == [True]


class Lazy:
    """As many answers as were asked for, until somebody looks at them."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __iter__(self):
        raise OSError("the connection is gone")


class Torn(list):
    """Like an array of numpy's, of which nobody may ask whether it is true."""

    def __bool__(self):
        raise ValueError("ambiguous")


WRONG_ANSWERS = [
    (None, "TypeError: object of type 'NoneType' has no len()"),
    (7, "TypeError: object of type 'int' has no len()"),
    ([FRAME], "ContractError: 1 answers for 2 keys"),
    ([FRAME] * 3, "ContractError: 3 answers for 2 keys"),
    ([], "ContractError: 0 answers for 2 keys"),
    (Lazy(2), "OSError: the connection is gone"),
]


@pytest.mark.parametrize(("answer", "why"), WRONG_ANSWERS)
def test_a_wrong_answer_to_a_read_is_a_failure(bench, monkeypatch, answer, why):
    bench.write(A, B)
    bench.settle()
    bench.tier.events.clear()
    monkeypatch.setattr(bench.shelf, "read", lambda keys, into: answer)
    bench.read(A, B)
    bench.settle()
    assert (bench.good, bench.bad) == ([], [A, B])
    assert bench.tier.events == [Event(EventKind.IO_ERROR, "disk", (A, B), why=why)]
    assert bench.has(A, B) == [True, True], "nothing is known of the frames"


@pytest.mark.parametrize(("answer", "why"), WRONG_ANSWERS)
def test_a_wrong_answer_to_a_question_is_a_failure(monkeypatch, answer, why):
    bench = TierBench(shelf=SharedShelf())
    monkeypatch.setattr(bench.shelf, "contains", lambda keys: answer)
    assert bench.tier.remote.request([A])
    assert bench.tier.remote.request([B])
    bench.tier.poll()
    bench.settle()
    assert bench.tier.events == [Event(EventKind.IO_ERROR, "disk", (), why=why)]
    assert bench.has(A, B) == [False, False]


def test_answers_need_not_be_a_list(monkeypatch):
    bench = TierBench(shelf=SharedShelf())
    bench.shelf.frames[A] = bytes(sealed(A))
    monkeypatch.setattr(bench.shelf, "contains", lambda keys: Torn(key in bench.shelf.frames for key in keys))
    monkeypatch.setattr(bench.shelf, "read", lambda keys, into: Torn(Shelf.read(bench.shelf, keys, into)))
    for key in (A, B):
        assert bench.tier.remote.request([key])
    bench.tier.poll()
    bench.settle()
    assert bench.has(A, B) == [True, False]
    assert bench.read(A)
    bench.settle()
    assert bench.good == [A]


@pytest.mark.parametrize("count", [FRAME + 1, -1, 1 << 60])
def test_a_length_that_cannot_be_is_a_failure(bench, monkeypatch, count):
    bench.write(A)
    bench.settle()
    bench.tier.events.clear()
    monkeypatch.setattr(bench.shelf, "read", lambda keys, into: [count])
    bench.read(A)
    bench.settle()
    why = f"ContractError: read returned {count} bytes for a view of {FRAME}"
    assert bench.tier.events == [Event(EventKind.IO_ERROR, "disk", (A,), why=why)]
    assert bench.bad == [A]


# -- the breaker ---------------------------------------------------------------------------------------


def test_writes_rest_and_one_probe_decides(bench):
    bench.shelf.fails = True
    for key in (A, B, C):
        bench.write(key)
        bench.settle()
    assert bench.whys() == ["BackendError: told to fail"] * 3 + ["no writes for 1s"]
    assert not bench.tier.would_admit([D])
    bench.write(D)
    assert bench.events() == [("rejected", [D])]

    bench.now = 1.0
    assert bench.tier.would_admit([D])
    bench.write(D)
    assert not bench.tier.would_admit([E]), "one probe at a time"
    bench.settle()
    assert bench.events() == [("io_error", [D]), ("breaker_open", [])]

    bench.now = 2.9
    assert not bench.tier.would_admit([D])
    bench.now = 3.0
    bench.shelf.fails = False
    bench.write(D)
    bench.settle()
    assert bench.events() == [("breaker_closed", []), ("written", [D])]
    assert bench.tier.would_admit([E])


def test_reads_rest_while_writes_go_on(bench, monkeypatch):
    bench.write(A)
    bench.settle()
    bench.tier.events.clear()
    with monkeypatch.context() as patched:
        patched.setattr(bench.shelf, "read", lambda keys, into: None)
        for _ in range(3):
            assert bench.read(A)
            bench.settle()
    assert bench.events()[-1] == ("breaker_open", [])
    assert bench.has(A) == [False]
    assert bench.read(A) == {}
    bench.write(B)
    bench.settle()
    assert bench.events() == [("written", [B])]

    bench.now = 1.0
    assert bench.has(A, B) == [True, True]
    assert bench.read(A)
    assert bench.has(B) == [False], "one probe at a time"
    bench.settle()
    assert bench.events() == [("breaker_closed", []), ("read", [A])]
    assert bench.has(A, B) == [True, True]
