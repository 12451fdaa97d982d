"""Slots: free, reserved, READY, pinned, doomed; and every sentence that a caller in the wrong is told."""

from __future__ import annotations

import pytest
from machine import Slots

from kvtier_core.errors import ContractError
from kvtier_core.policies.lru import Lru, LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import Slot, Usage
from kvtier_testing.samples import make_keys

A, B, C, D = make_keys(4)

NOT_RESERVED = "cpu: this chunk was not reserved, or was committed or aborted before"
NOT_READY = "cpu: pin of a chunk that is not READY"


@pytest.fixture
def arena():
    return open_arena()


def open_arena(policy=None):
    """Three slots, number 1 in its stack."""
    return Arena("cpu", 1, Slots(3), CacheIndex(policy or LruConfig().open()))


def fill(arena, *keys):
    arena.reserve(keys)
    assert arena.commit(keys, [None] * len(keys)) == list(keys)


def refusal(attempt, *args):
    with pytest.raises(ContractError) as caught:
        attempt(*args)
    return str(caught.value)


def counts(arena):
    return arena.free, arena.reserved, len(arena.index), arena.pins


def test_from_free_to_ready(arena):
    assert counts(arena) == (3, 0, 0, 0)
    arena.reserve([A, B])
    assert counts(arena) == (1, 2, 0, 0)
    assert (arena.is_reserved(A), arena.has(A), arena.has_slot(A)) == (True, False, True)
    assert arena.commit([A], [None]) == [A]
    assert counts(arena) == (1, 1, 1, 0)
    assert (arena.is_reserved(A), arena.has(A), arena.has_slot(A)) == (False, True, True)
    arena.abort([B])
    assert counts(arena) == (2, 0, 1, 0)
    assert (arena.is_reserved(B), arena.has(B), arena.has_slot(B)) == (False, False, False)


def test_a_chunk_stays_in_its_slot(arena):
    arena.reserve([A, B])
    slots = arena.slots([A, B])
    assert slots == [Slot(1, 0), Slot(1, 1)]
    arena.view(B)[:4] = b"here"
    arena.commit([B], [None])
    assert arena.slots([B]) == arena.pin([B], "test") == slots[1:]
    assert bytes(arena.memory.view(1)[:4]) == b"here"


def test_reserve_needs_free_slots(arena):
    fill(arena, A)
    assert refusal(arena.reserve, [B, C, D]) == "cpu: reserve needs 3 free slots and keys that have none"
    assert counts(arena) == (2, 0, 1, 0)


@pytest.mark.parametrize("state", ["reserved", "ready", "doomed"])
def test_reserve_needs_keys_without_a_slot(arena, state):
    arena.reserve([A])
    if state == "ready":
        arena.commit([A], [None])
    if state == "doomed":
        arena.invalidate_all()
    assert refusal(arena.reserve, [B, A]) == "cpu: reserve needs 2 free slots and keys that have none"
    assert not arena.has_slot(B), "all or nothing"


def test_commit_and_abort_need_a_reservation(arena):
    for attempt in (lambda: arena.commit([A], [None]), lambda: arena.abort([A])):
        assert refusal(attempt) == NOT_RESERVED
    fill(arena, A)
    for attempt in (lambda: arena.commit([A], [None]), lambda: arena.abort([A])):
        assert refusal(attempt) == NOT_RESERVED
    assert counts(arena) == (2, 0, 1, 0)
    arena.reserve([B])
    arena.abort([B])
    assert refusal(arena.abort, [B]) == NOT_RESERVED
    assert counts(arena) == (2, 0, 1, 0)


def test_pin_needs_a_ready_chunk(arena):
    assert refusal(arena.pin, [A], "test") == NOT_READY
    arena.reserve([A])
    assert refusal(arena.pin, [A], "test") == NOT_READY
    arena.commit([A], [None])
    slots = arena.pin([A], "test")
    arena.invalidate_all()
    assert refusal(arena.pin, [A], "test") == NOT_READY
    arena.unpin(slots, "test")
    assert refusal(arena.pin, [A], "test") == NOT_READY


def test_unpin_needs_a_pin(arena):
    fill(arena, A)
    slots = arena.slots([A])
    assert refusal(arena.unpin, slots, "test") == "cpu: unpin of a slot that test has not pinned"
    arena.pin([A], "test")
    arena.unpin(slots, "test")
    assert refusal(arena.unpin, slots, "test") == "cpu: unpin of a slot that test has not pinned"
    assert counts(arena) == (2, 0, 1, 0)


def test_a_pin_is_its_owners_alone(arena):
    fill(arena, A)
    slots = arena.pin([A], "one")
    arena.pin([A], "two")
    arena.pin([A], "two")
    assert arena.pins_by_holder() == {"one": 1, "two": 2}
    arena.unpin(slots, "one")
    assert refusal(arena.unpin, slots, "one") == "cpu: unpin of a slot that one has not pinned"
    assert arena.pins_by_holder() == {"two": 2}


def test_a_holder_without_pins_is_not_listed(arena):
    assert arena.pin([], "nobody") == []
    assert "nobody" not in arena.pins_by_holder()


def test_pins_are_counted(arena):
    fill(arena, A, B)
    slots = [*arena.pin([A], "test"), *arena.pin([A, B], "test")]
    assert arena.pins == 3
    for left, slot in zip((2, 1, 0), slots, strict=True):
        arena.unpin([slot], "test")
        assert arena.pins == left


def test_room_is_made_of_what_no_request_needs(arena):
    fill(arena, C)
    fill(arena, B)
    fill(arena, A)
    arena.pin([C], "test")
    assert arena.make_room(1, spared=[{B}]) == [A]
    assert arena.make_room(1) == [], "one is free"
    assert arena.make_room(3) == [B], "the last is pinned"
    assert counts(arena) == (2, 0, 1, 1)


class Content(Lru):
    """With what it has."""

    def prefers(self, newcomer, victim):
        return False


def test_a_policy_may_refuse_before_anything_is_copied():
    arena = open_arena(Content())
    fill(arena, A, B)
    assert arena.would_admit([C, D]) == [C], "there is room for one"
    assert arena.admit([C, D]) == ([C], [])
    assert counts(arena) == (1, 0, 2, 0)


def test_clear_frees_what_no_engine_uses(arena):
    fill(arena, A, B)
    arena.invalidate_all()
    assert counts(arena) == (3, 0, 0, 0)
    assert not arena.has(A)


def test_a_pinned_chunk_is_gone_at_once_and_its_slot_later(arena):
    fill(arena, A)
    slots = [*arena.pin([A], "test"), *arena.pin([A], "test")]
    arena.view(A)[:4] = b"here"
    arena.invalidate_all()
    assert (arena.has(A), arena.has_slot(A)) == (False, True)
    arena.unpin(slots[:1], "test")
    assert (arena.free, arena.has_slot(A)) == (2, True)
    assert bytes(arena.memory.view(slots[0].index)[:4]) == b"here"
    assert arena.make_room(3) == []
    arena.unpin(slots[1:], "test")
    assert (arena.free, arena.has_slot(A)) == (3, False)


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_chunks_being_filled_at_an_invalidation_are_never_found(arena, ending):
    arena.reserve([A])
    arena.invalidate_all()
    assert (arena.is_reserved(A), arena.has(A), arena.has_slot(A)) == (False, False, True)
    if ending == "commit":
        assert not arena.commit([A], [None])
    else:
        arena.abort([A])
    assert counts(arena) == (3, 0, 0, 0)


def test_a_slot_that_was_doomed_is_as_good_as_new(arena):
    """Each way out of doom leaves nothing of it behind."""
    fill(arena, A)
    slots = arena.pin([A], "test")
    arena.reserve([B, C])
    arena.invalidate_all()
    arena.unpin(slots, "test")
    arena.abort([B])
    arena.commit([C], [None])
    fill(arena, A, B, C)
    assert all(arena.has(key) for key in (A, B, C))
    arena.unpin(arena.pin([A], "test"), "test")
    assert arena.has(A)


def test_clear_twice_while_all_is_in_use(arena):
    fill(arena, A)
    slots = arena.pin([A], "test")
    arena.reserve([B])
    arena.invalidate_all()
    arena.invalidate_all()
    arena.unpin(slots, "test")
    assert not arena.commit([B], [None])
    assert counts(arena) == (3, 0, 0, 0)


def test_usage_tells_what_is_held(arena):
    fill(arena, A, B)
    arena.pin([A], "test")
    nbytes = arena.memory.slot_nbytes
    assert arena.usage() == Usage("cpu", chunks=2, nbytes=2 * nbytes, capacity=3 * nbytes, pins=1)
