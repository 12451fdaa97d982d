"""The stack as an engine sees it: what goes down, what comes up, and what it is told meanwhile."""

from __future__ import annotations

import threading

import pytest
from benches import MISS, PENDING, READY, StackBench
from machine import LAYOUT, NAMESPACE, Shelf
from manual_pool import ManualPool
from outsiders import TEXTS, assert_tame
from patience import HANG

from kvtier_core.errors import ContractError
from kvtier_core.policies.lru import Lru
from kvtier_core.stack import write_through
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.lookup.leases import Lease
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import EventKind, Namespace
from kvtier_core.work.io_pool import IOPool
from kvtier_testing.samples import make_keys

#: Paths that share nothing.
KEYS = make_keys(12)
OURS, THEIRS, OTHERS = KEYS[:4], KEYS[4:8], KEYS[8:]


@pytest.fixture
def bench():
    return StackBench()


def told(events):
    return [(event.kind, event.tier, list(event.keys)) for event in events]


# -- down and up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [ManualPool, lambda: IOPool("test", 2)], ids=["chosen", "threads"])
def test_stored_chunks_come_back(pool):
    bench = StackBench(pool=pool)
    assert told(bench.store(OURS)) == [(EventKind.STORED, "cpu", OURS), (EventKind.WRITTEN, "disk", OURS)]
    assert told(bench.store(THEIRS))[0] == (EventKind.EVICTED, "cpu", OURS[::-1])
    assert bench.look(OURS) == [PENDING] * 4
    assert told(bench.settle()) == [
        (EventKind.EVICTED, "cpu", THEIRS[::-1]),
        (EventKind.PROMOTED, "cpu", OURS),
        (EventKind.READ, "disk", OURS),
    ]
    assert bench.look(OURS) == [READY] * 4
    assert bench.load(OURS) == ([0] * 4, ["cpu"] * 4)
    bench.at_rest()
    bench.manager.close()


def test_events_count_bytes(bench):
    stored, written = bench.store(OURS)
    assert stored.nbytes == 4 * LAYOUT.payload_nbytes
    assert written.nbytes == 4 * LAYOUT.frame_nbytes
    bench.store(THEIRS)
    (evicted, promoted, read), _ = bench.bring_up(OURS)
    assert (promoted.nbytes, promoted.why) == (4 * LAYOUT.payload_nbytes, "from disk")
    assert (evicted.kind, evicted.nbytes) == (EventKind.EVICTED, 4 * LAYOUT.payload_nbytes)
    assert evicted.why == "for room"
    assert (read.tier, read.nbytes) == ("disk", 4 * LAYOUT.frame_nbytes)


def test_an_eviction_is_free(bench):
    """It was written down when it was stored."""
    bench.store(OURS)
    assert bench.manager.reserve(THEIRS, "test").keys() == set(THEIRS)
    assert bench.manager.jobs == 0


def test_a_promoted_chunk_is_offered_to_the_tiers_it_passed():
    bench = StackBench(tiers=(4, 12))
    bench.store(OURS)
    bench.store(THEIRS)
    assert set(bench.shelves[0].frames) == set(THEIRS)
    events, _ = bench.bring_up(OURS)
    assert (EventKind.PROMOTED, "cpu", OURS) in told(events)
    assert (EventKind.WRITTEN, "disk", OURS) in told(events)
    assert {event.kind for event in events if event.tier == "disk1"} == {EventKind.READ}
    assert set(bench.shelves[0].frames) == set(OURS)
    bench.at_rest()


def test_a_damaged_frame_is_a_miss(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    bench.shelves[0].frames[OURS[1]] = bench.shelves[0].frames[OURS[2]]
    assert bench.look(OURS) == [PENDING] * 4
    assert (EventKind.CORRUPT, "disk", [OURS[1]]) in told(bench.settle())
    assert bench.look(OURS) == [READY, MISS, MISS, MISS]
    assert bench.load(OURS[:1])[0] == [0]
    bench.at_rest()


def test_a_frame_that_cannot_be_sealed_stays_where_it_is(bench, monkeypatch):
    def seal(*arguments):
        raise OSError("planned")

    monkeypatch.setattr(write_through, "seal_part", seal)
    assert told(bench.store(OURS)) == [(EventKind.STORED, "cpu", OURS), (EventKind.IO_ERROR, "cpu", OURS)]
    assert bench.look(OURS) == [READY] * 4
    bench.at_rest()


def test_sources_name_the_tier_that_saved_the_recompute(bench):
    bench.store(OURS)
    assert bench.load(OURS)[1] == ["cpu"] * 4
    bench.store(THEIRS)
    assert bench.bring_up(OURS)[1] == ["disk"] * 4
    assert bench.load(OURS)[1] == ["cpu"] * 4, "the second time it saved nothing"


def test_a_source_does_not_outlive_the_chunk(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    bench.look(OURS)
    bench.settle()
    bench.store(THEIRS)  # crowds it out, before it was ever used
    bench.store(OURS)
    assert bench.load(OURS)[1] == ["cpu"] * 4


def test_a_lower_arena_is_served_as_it_lies():
    bench = StackBench(arenas=(4, 8), tiers=())
    bench.store(OURS)
    bench.store(THEIRS)
    assert not any(bench.arenas[0].has(key) for key in OURS)
    assert bench.look(OURS) == [READY] * 4
    assert bench.load(OURS) == ([1] * 4, ["cpu1"] * 4)
    assert told(bench.settle()) == [], "copied, or brought up"
    assert bench.load(THEIRS)[0] == [0] * 4
    bench.at_rest()


# -- what an engine is told ----------------------------------------------------------------------------


def test_after_a_miss_everything_is_a_miss(bench):
    bench.store(OURS)
    assert bench.look([OURS[0], THEIRS[0], OURS[1]]) == [READY, MISS, MISS]
    assert bench.look([]) == []


def test_a_chunk_that_is_being_stored_is_pending(bench):
    bench.fill(OURS[:2])
    assert bench.look(OURS) == [PENDING, PENDING, MISS, MISS]
    bench.manager.release("store")
    assert bench.look(OURS) == [MISS] * 4
    bench.at_rest()


def test_a_lookup_moves_nothing(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    before = bench.manager.usage()
    for _ in range(3):
        assert bench.look(OURS) == [PENDING] * 4
    assert bench.manager.usage() == before
    assert bench.manager.jobs == 0


def test_found_chunks_stay_until_their_holder_is_released(bench):
    bench.store(OURS[:2])
    assert bench.look(OURS[:2], keep="reader") == [READY] * 2
    for _ in range(5):
        assert list(bench.manager.reserve(THEIRS, "writer")) == THEIRS[:2], "at the expense of what was found"
        bench.manager.release("writer")
        bench.manager.step()
    bench.manager.release("reader")
    assert list(bench.manager.reserve(THEIRS, "writer")) == THEIRS


def test_each_holder_has_a_lease_of_its_own(bench):
    bench.store(OURS)
    for holder in ("one", "other"):
        assert bench.look(OURS, keep=holder) == [READY] * 4
    assert bench.manager.pins_by_holder() == {"one": 4, "other": 4}
    bench.manager.release("one")
    bench.manager.release("one")
    assert bench.manager.pins_by_holder() == {"other": 4}
    assert bench.manager.reserve(THEIRS, "writer") == {}


def test_a_holder_that_asks_again_pins_nothing_twice(bench):
    bench.store(OURS[:2])
    assert bench.look(OURS, keep="reader") == [READY, READY, MISS, MISS]
    bench.fill(OURS)
    assert bench.look(OURS, keep="reader") == [READY, READY, PENDING, PENDING]
    bench.manager.commit("store")
    for _ in range(2):
        assert bench.look(OURS, keep="reader") == [READY] * 4
    assert bench.manager.pins_by_holder()["reader"] == 4


def test_another_path_of_a_holder_ends_what_it_had_found(bench):
    bench.store(OURS[:2])
    bench.store(THEIRS[:2])
    bench.look(OURS, keep="reader")
    assert bench.look(THEIRS[:2], keep="reader") == [READY] * 2
    assert bench.manager.pins_by_holder() == {"reader": 2}


def test_a_shorter_path_of_a_holder_keeps_nothing_beyond_it():
    bench = StackBench(arenas=(6,))
    bench.store(OURS)
    bench.store([*THEIRS, *OTHERS[:2]])  # crowds them out
    bench.store(OURS[2:])
    assert bench.look(OURS, keep="reader")[0] is PENDING
    assert bench.manager.pins_by_holder()["reader"] == 2
    bench.settle()
    assert bench.look(OURS[:1], keep="reader") == [READY]
    assert bench.manager.pins_by_holder() == {"reader": 1}
    bench.manager.release("reader")
    bench.at_rest()


def test_a_holder_does_not_find_again_what_was_invalidated(bench):
    bench.store(OURS[:2])
    assert bench.look(OURS[:2], keep="reader") == [READY] * 2
    bench.manager.invalidate_all(NAMESPACE.renewed())
    assert bench.look(OURS[:2], keep="reader") == [MISS] * 2
    assert not bench.manager.pins_by_holder()


def test_a_promoted_chunk_is_kept_for_the_request_that_asked(bench):
    """It is pinned as it arrives, so that nothing that happens before the next look can evict it."""
    bench.store(OURS)
    bench.store(THEIRS)
    assert bench.look(OURS, keep="reader") == [PENDING] * 4
    bench.settle()
    assert bench.manager.reserve(THEIRS, "writer") == {}
    assert bench.look(OURS, keep="reader") == [READY] * 4
    bench.manager.release("reader")
    bench.at_rest()


def test_chunks_after_a_gap_are_kept_while_the_gap_is_filled():
    bench = StackBench(arenas=(6,))
    bench.store(OURS)
    bench.store([*THEIRS, *OTHERS[:2]])  # crowds them out
    bench.store(OURS[2:])
    assert bench.look(OURS, keep="reader")[0] is PENDING
    assert bench.manager.pins_by_holder()["reader"] == 2, "those behind the gap"
    bench.settle()
    assert bench.look(OURS, keep="reader") == [READY] * 4
    assert bench.manager.pins_by_holder() == {"reader": 4}
    assert bench.load(OURS)[0] == [0] * 4
    bench.manager.release("reader")
    bench.at_rest()


def test_a_promotion_does_not_evict_held_chunks(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    assert bench.look(THEIRS, keep="reader") == [READY] * 4
    assert bench.look(OURS) == [PENDING] * 4
    bench.manager.step()
    assert bench.look(THEIRS) == [READY] * 4
    assert bench.look(OURS) == [MISS] * 4
    assert bench.manager.jobs == 0


def test_a_promotion_without_room_is_a_miss_with_a_reason(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    bench.look(THEIRS, keep="reader")
    assert bench.look(OURS) == [PENDING] * 4
    bench.manager.step()
    assert bench.look(OURS) == [MISS] * 4
    assert bench.why(OURS) == "no room in cpu to promote it"
    assert bench.why(OTHERS) == "not stored"
    bench.manager.release("reader")
    bench.manager.step()
    bench.bring_up(OURS)
    assert bench.load(OURS)[0] == [0] * 4


def test_a_frame_that_is_being_deleted_is_a_miss_with_a_reason():
    bench = StackBench(tiers=(4,))
    bench.store(OURS)
    bench.fill(THEIRS)
    bench.manager.commit("store")
    assert bench.work(1), "sealed: the deletes of their victims are under way"
    assert bench.why(OURS) == "its frame in disk is still being deleted"
    bench.settle()
    assert bench.why(OURS) == "not stored"


def test_promotion_goes_as_far_as_there_is_room(bench):
    bench.store(OURS)
    bench.store(THEIRS)
    bench.look(THEIRS[:2], keep="reader")
    bench.look(OURS)
    bench.settle()
    assert bench.look(OURS)[:2] == [READY] * 2, "the root first"


def test_an_arrival_does_not_wake_holders_of_other_chunks(bench):
    """Of a thousand requests that wait each arrival costs those that wait for it."""

    class Untouched(set):
        def __contains__(self, key):
            raise AssertionError("asked about a chunk that it does not wait for")

    bench.store(OURS)
    bench.store(THEIRS)
    assert bench.look(OURS, keep="reader") == [PENDING] * 4
    leases = bench.manager._leases
    leases._by_holder["another"] = Lease(awaited=Untouched([KEYS[8]]))
    bench.settle()
    assert not leases._by_holder["reader"].awaited and not leases._waiting
    del leases._by_holder["another"]
    assert bench.look(OURS, keep="reader") == [READY] * 4
    bench.manager.release("reader")


def test_a_promotion_beyond_what_may_be_in_flight_waits():
    bench = StackBench(inflight=2)
    for path in (OURS, THEIRS):
        bench.store(path[:2])
        bench.store(path)
        bench.manager.on_request(path)
        bench.store(path)
    bench.look(OURS, keep="reader")
    bench.manager.step()
    assert bench.tiers[0].usage().inflight == 2 * LAYOUT.frame_nbytes
    bench.work(1)
    assert bench.tiers[0].usage().inflight == 2 * LAYOUT.frame_nbytes
    assert bench.look(OURS, keep="reader") == [READY, READY, PENDING, PENDING]
    bench.settle()
    assert bench.look(OURS, keep="reader") == [READY] * 4
    bench.manager.release("reader")
    bench.at_rest()


def test_a_waiting_promotion_is_dropped_when_no_request_awaits_it():
    bench = below(inflight=2)
    bench.look(OURS)
    bench.settle()
    assert bench.look(OURS) == [READY, READY, PENDING, PENDING]


# -- holders that wait ---------------------------------------------------------------------------------


def below(inflight=100, **options):
    """A stack that holds a path in the tier below alone."""
    bench = StackBench(**options)
    bench.store(OURS)
    bench.arenas[0].make_room(bench.arenas[0].memory.slots)
    bench.tiers[0]._inflight_limit = inflight * LAYOUT.frame_nbytes
    return bench


@pytest.fixture
def waiter():
    """A stack of which one holder waits for a path."""
    bench = below()
    assert bench.look(OURS, keep="waiter") == [PENDING] * 4
    return bench


def test_a_holder_still_waits_until_all_has_come():
    bench = below(inflight=2)
    bench.look(OURS, keep="waiter")
    waits = []
    for _ in range(3):
        bench.manager.step()
        waits.append(bench.manager.still_pending("waiter"))
        bench.work(1)
    assert waits == [True, True, False]
    assert bench.look(OURS, keep="waiter") == [READY] * 4
    assert not bench.manager.still_pending("waiter")


def test_a_holder_that_waits_for_nothing_is_not_pending(waiter):
    assert not waiter.manager.still_pending("another")
    assert waiter.manager.still_pending("waiter")
    waiter.manager.release("waiter")
    assert not waiter.manager.still_pending("waiter")


def test_a_holder_looks_again_when_all_is_invalidated(waiter):
    waiter.manager.invalidate_all(NAMESPACE.renewed())
    assert not waiter.manager.still_pending("waiter")


def test_a_holder_looks_again_when_a_frame_is_lost(waiter):
    del waiter.shelves[0].frames[OURS[3]]
    waiter.settle()
    assert not waiter.manager.still_pending("waiter")
    assert waiter.look(OURS) == [READY, READY, READY, MISS]


def test_a_holder_looks_again_when_a_frame_is_evicted_before_it_is_read():
    bench = below(inflight=2)
    bench.look(OURS, keep="waiter")
    bench.manager.step()
    bench.tiers[0]._deletes.evict(OURS[3:], "for room")
    bench.settle()
    assert not bench.manager.still_pending("waiter")


def test_a_holder_looks_again_when_the_store_cannot_be_read():
    bench = below(inflight=2)
    bench.look(OURS, keep="waiter")
    bench.manager.step()
    for _ in range(3):
        bench.tiers[0]._health.reads.fail(bench.now)
    assert bench.manager.still_pending("waiter")
    bench.manager.step()
    assert not bench.manager.still_pending("waiter")


def test_a_holder_looks_again_when_there_is_no_room(waiter):
    assert waiter.fill(THEIRS)
    waiter.manager.step()
    assert not waiter.manager.still_pending("waiter")
    assert waiter.why(OURS) == "no room in cpu to promote it"


@pytest.mark.parametrize("filled", [True, False])
def test_a_holder_looks_again_when_the_slot_that_it_waits_for_is_filled_or_given_up(filled):
    bench = StackBench()
    bench.fill(OURS)
    assert bench.look(OURS, keep="waiter") == [PENDING] * 4
    bench.manager.step()
    assert bench.manager.still_pending("waiter")
    (bench.manager.commit if filled else bench.manager.release)("store")
    bench.manager.step()
    assert not bench.manager.still_pending("waiter")
    assert bench.look(OURS) == [READY if filled else MISS] * 4


def test_a_promotion_that_two_await_comes_though_one_lets_go():
    bench = below(inflight=2)
    for holder in ("waiter", "another"):
        bench.look(OURS, keep=holder)
    bench.manager.step()
    bench.manager.release("another")
    bench.settle()
    assert bench.look(OURS, keep="waiter") == [READY] * 4


def test_a_request_offers_again_what_a_tier_had_rejected():
    bench = StackBench(inflight=2)
    assert (EventKind.REJECTED, "disk", OURS[2:]) in told(bench.store(OURS))
    assert set(bench.shelves[0].frames) == set(OURS[:2])
    bench.manager.on_request(OURS)
    bench.settle()
    assert set(bench.shelves[0].frames) == set(OURS)
    bench.manager.on_request(OURS)
    assert bench.manager.jobs == 0, "nobody wants it any more"
    bench.at_rest()


class Content(Lru):
    """With what it has."""

    def prefers(self, newcomer, victim):
        return False


def test_a_chunk_that_a_tier_refuses_is_neither_sealed_nor_written():
    bench = StackBench(tiers=(4,), below=Content)
    bench.store(OURS)
    bench.manager.on_request(THEIRS)
    bench.fill(THEIRS)
    bench.manager.commit("store")
    assert bench.manager.jobs == 0
    assert [event.kind for event in bench.manager.step()] == [EventKind.EVICTED, EventKind.STORED]
    assert set(bench.shelves[0].frames) == set(OURS)
    bench.at_rest()


def test_a_chunk_that_every_tier_refuses_gets_no_slot():
    bench = StackBench(arenas=(4, 4), tiers=(4,), below=Content)
    for arena in bench.arenas:
        arena.index = CacheIndex(Content())
    bench.store(OURS)
    assert bench.manager.reserve(THEIRS, "test") == {}
    bench.at_rest()


@pytest.mark.parametrize("held, settings", [(4, {}), (0, {"store_after": 2})], ids=["content", "named once"])
def test_what_is_promised_gets_slots_whatever_the_arena_prefers(held, settings):
    bench = StackBench(tiers=())
    bench.arenas[0].index = CacheIndex(Content(), **settings)
    bench.store(OURS[:held])
    assert bench.manager.reserve(THEIRS, "test") == {}
    assert list(bench.manager.reserve(THEIRS, "store", promised_to="another engine")) == THEIRS
    bench.manager.release("store")
    bench.manager.release("another engine")
    bench.at_rest()


def test_what_is_promised_is_pinned_as_it_is_stored(bench):
    bench.manager.reserve(OURS[:2], "store", promised_to="another engine")
    assert not bench.manager.pins_by_holder()
    bench.manager.commit("store")
    assert bench.manager.pins_by_holder()["another engine"] == 2
    assert list(bench.manager.reserve(THEIRS, "writer")) == THEIRS[:2], "at the expense of what was promised"
    bench.manager.release("writer")
    assert bench.look(OURS[:2], keep="another engine") == [READY] * 2
    bench.manager.release("another engine")
    bench.settle()
    bench.at_rest()


def test_a_promise_takes_no_pinned_slot(bench):
    bench.store(OURS)
    bench.look(OURS[:3], keep="reader")
    assert list(bench.manager.reserve(THEIRS, "store", promised_to="another engine")) == THEIRS[:1]


@pytest.mark.parametrize("first", ["store", "another engine"])
def test_a_promise_ends_with_its_store_or_with_its_holder(bench, first):
    """Slots that are being filled are not free before their store has ended."""
    bench.manager.reserve(OURS, "store", promised_to="another engine")
    bench.manager.release(first)
    assert bench.arenas[0].reserved == (0 if first == "store" else 4)
    bench.manager.release("store")
    bench.store(OURS)
    assert not bench.manager.pins_by_holder() or first == "store"
    bench.manager.release("another engine")
    bench.at_rest()


def test_a_promise_ends_with_its_namespace(bench):
    bench.manager.reserve(OURS, "store", promised_to="another engine")
    bench.manager.invalidate_all(NAMESPACE.renewed())
    bench.manager.commit("store")
    bench.manager.release("another engine")
    bench.at_rest()


def test_a_request_keeps_a_path(bench):
    bench.store(OURS[:2])
    bench.store(THEIRS[:2])
    bench.manager.on_request(OURS[:2])
    bench.store(OTHERS[:2])
    assert [bench.arenas[0].has(key) for key in (OURS[0], THEIRS[0])] == [True, False]


def test_reserve_gives_slots_to_absent_keys_alone(bench):
    bench.store(OURS[:2])
    assert list(bench.manager.reserve(OURS, "test")) == OURS[2:]
    assert bench.manager.reserve(OURS, "test") == {}


def test_reserve_spares_its_own_path(bench):
    """The leading part of a path is of no use without what comes before it."""
    bench.store(OURS[:3])
    assert list(bench.manager.reserve([*OURS[:3], *THEIRS], "test")) == THEIRS[:1]


def test_no_room_is_made_for_more_than_may_be_in_flight():
    """A long prompt that lies below does not flush the arena for chunks that are not read yet."""
    bench = StackBench(arenas=(4,), inflight=2)
    bench.store(THEIRS[:2])
    bench.store(THEIRS)
    bench.store(OURS)
    assert bench.look(THEIRS) == [PENDING] * 4
    bench.manager.step()
    assert sum(bench.arenas[0].has(key) for key in OURS) == 2
    bench.settle()
    assert bench.look(THEIRS) == [READY] * 2 + [PENDING] * 2
    bench.settle()
    assert bench.look(THEIRS) == [READY] * 4


def test_only_reserved_chunks_can_be_committed(bench):
    with pytest.raises(ContractError) as caught:
        bench.manager.commit("nobody")
    assert str(caught.value) == "nobody has reserved nothing"


def test_self_test_slots_are_reserved_once(bench):
    slots = bench.manager.reserve_self_test_slots("a test")
    assert bench.manager.reserve_self_test_slots("a test") == slots
    bench.manager.release("a test")
    bench.manager.release("a test")
    bench.at_rest()


class Asked(Lru):
    """Counts how often it is asked about each newcomer."""

    def __init__(self):
        super().__init__()
        self.newcomers = []

    def prefers(self, newcomer, victim):
        self.newcomers.append(newcomer)
        return True


def test_a_policy_is_asked_once_about_a_chunk():
    """Before its slot is reserved; the decision travels with the chunk to its write."""
    policy = Asked()
    bench = StackBench(tiers=(4,), below=lambda: policy)
    bench.store(OURS)
    bench.store(THEIRS)
    assert policy.newcomers == THEIRS
    assert set(bench.shelves[0].frames) == set(THEIRS)


def test_a_stack_begins_with_an_arena(bench):
    for levels in ([], bench.tiers, [*bench.tiers, *bench.arenas]):
        with pytest.raises(ContractError) as caught:
            StorageManager(levels, namespace=NAMESPACE, layout=LAYOUT, pool=ManualPool())
        assert str(caught.value) == "a stack must begin with an arena"


def test_describe_lists_the_contents_of_each_tier(bench, monkeypatch):
    monkeypatch.setattr(bench.shelves[0], "facts", lambda: {"direct": "auto -> off"})
    bench.store(OURS)
    memory, disk = bench.manager.describe()
    assert memory == f"cpu: 32KiB, room for {bench.arenas[0].capacity} chunks, 4 held"
    assert disk == "disk: 96KiB, 4 chunks held; direct off"


def test_a_cold_start_is_explained_by_the_namespace_that_differs_least(bench, monkeypatch):
    near = Namespace.of({**dict(NAMESPACE.facts), "dtype": "float16"})
    far = Namespace.of({"model": "other", "dtype": "float16", "block": "32"})
    assert bench.manager.why_cold() == ""
    monkeypatch.setattr(bench.shelves[0], "drop_namespace", lambda: None, raising=False)
    monkeypatch.setattr(bench.shelves[0], "namespaces", lambda: iter([far, near]), raising=False)
    assert bench.manager.why_cold() == "disk holds another namespace: dtype was float16, is not there"
    monkeypatch.setattr(bench.shelves[0], "namespaces", lambda: iter([far]), raising=False)
    assert bench.manager.why_cold() == (
        "disk holds another namespace: block was 32, is not there, and 2 more facts differ"
    )
    bench.store(OURS)
    assert bench.manager.why_cold() == ""


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_facts_of_a_strangers_namespace_forge_no_line(bench, monkeypatch, text):
    foreign = [Namespace.of({text: "x"}), Namespace.of({**dict(NAMESPACE.facts), "dtype": text})]
    monkeypatch.setattr(bench.shelves[0], "drop_namespace", lambda: None, raising=False)
    for each in foreign:
        monkeypatch.setattr(bench.shelves[0], "namespaces", lambda each=each: iter([each]), raising=False)
        assert_tame(bench.manager.why_cold())


def test_a_store_that_cannot_tell_its_namespaces_explains_nothing(bench, monkeypatch):
    monkeypatch.setattr(bench.shelves[0], "drop_namespace", lambda: None, raising=False)
    monkeypatch.setattr(bench.shelves[0], "namespaces", lambda: 1 / 0, raising=False)
    assert bench.manager.why_cold() == ""


# -- invalidate -----------------------------------------------------------------------------------------


def gone(bench, path):
    """Is nothing of the path left, anywhere, and everything as it was at the start?"""
    bench.settle()
    assert bench.look(path) == [MISS] * len(path)
    bench.at_rest()
    assert not any(level.chunks for level in bench.manager.usage())
    assert not any(shelf.frames for shelf in bench.shelves)


@pytest.mark.parametrize("pieces", range(4))
@pytest.mark.parametrize("arenas", [(4,), (4, 6)])
def test_an_invalidation_during_a_store(arenas, pieces):
    bench = StackBench(arenas=arenas)
    bench.fill(OURS)
    bench.manager.commit("store")
    assert bench.work(pieces) == (pieces <= len(arenas) + 1)
    bench.manager.invalidate_all(NAMESPACE.renewed())
    assert bench.look(OURS) == [MISS] * 4
    gone(bench, OURS)


def test_an_invalidation_while_the_engine_fills_a_slot(bench):
    bench.fill(OURS)
    bench.manager.invalidate_all(NAMESPACE.renewed())
    assert bench.look(OURS) == [MISS] * 4
    bench.manager.commit("store")
    assert told(bench.settle()) == []
    gone(bench, OURS)


def test_an_invalidation_while_the_engine_loads(bench):
    bench.store(OURS)
    bench.look(OURS, keep="reader")
    bench.manager.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    assert bench.look(OURS) == [MISS] * 4
    assert bench.manager.reserve(THEIRS, "writer") == {}, "the slots are still being read"
    bench.manager.release("reader")
    gone(bench, OURS)


@pytest.mark.parametrize("moment", ["requested", "begun", "read", "arrived"])
def test_an_invalidation_while_a_chunk_comes_up(bench, moment):
    bench.store(OURS)
    bench.store(THEIRS)
    bench.look(OURS, keep="reader")
    if moment != "requested":
        bench.manager.step()
        assert bench.manager.jobs == 1
    if moment in ("read", "arrived"):
        bench.tiers[0].pool.run()
    if moment == "arrived":
        bench.manager.step()
    bench.manager.invalidate_all(NAMESPACE.renewed())
    assert bench.look(OURS) == [MISS] * 4
    assert not any(event.kind is EventKind.PROMOTED for event in bench.settle())
    bench.manager.release("reader")
    gone(bench, OURS)


def test_chunks_stored_after_an_invalidation_are_found(bench):
    bench.store(OURS)
    bench.manager.invalidate_all(NAMESPACE.renewed())
    bench.settle()
    bench.store(OURS)
    bench.store(THEIRS)
    bench.bring_up(OURS)
    assert bench.load(OURS)[0] == [0] * 4


# -- the end -------------------------------------------------------------------------------------------


class Hanging(Shelf):
    """A store with a call that does not come back before it is let go."""

    hangs = "write"
    closed = 0

    def __init__(self):
        super().__init__()
        self.begun = threading.Event()
        self.go = threading.Event()

    def write(self, keys, frames):
        self._hang("write")
        super().write(keys, frames)

    def delete(self, keys):
        self._hang("delete")
        super().delete(keys)

    def close(self):
        self.closed += 1

    def _hang(self, call):
        if call == self.hangs:
            self.begun.set()
            assert self.go.wait(HANG)


@pytest.fixture
def hanging():
    """A stack on threads; a tier for two chunks, whose writes hang."""
    bench = StackBench(tiers=(2,), shelf=Hanging, pool=lambda: IOPool("test"))
    yield bench
    bench.shelves[0].go.set()
    assert bench.sealer.close(HANG)
    assert bench.tiers[0].pool.close(HANG)


def start_to_hang(bench, path):
    """Store a path, and step until the call below has begun."""
    bench.fill(path)
    bench.manager.commit("store")
    for _ in range(1000):
        bench.manager.step()
        if bench.shelves[0].begun.wait(0.01):
            return
    pytest.fail("the call never came")


def test_close_lets_stores_on_their_way_finish(bench):
    bench.fill(OURS)
    bench.manager.commit("store")
    events = bench.manager.close()
    assert (EventKind.WRITTEN, "disk", OURS) in told(events)
    assert set(bench.shelves[0].frames) == set(OURS)
    assert bench.memories[0].closed == 1


@pytest.mark.parametrize("pool", [ManualPool, lambda: IOPool("test", 2)], ids=["chosen", "threads"])
def test_close_twice(pool):
    bench = StackBench(pool=pool)
    bench.store(OURS)
    bench.manager.close()
    assert bench.manager.close() == []
    assert bench.memories[0].closed


def test_drain_gives_up_on_a_store_that_hangs(hanging):
    manager = hanging.manager
    start_to_hang(hanging, OURS[:2])
    events = manager.drain(timeout=0.05)
    assert not any(event.kind is EventKind.WRITTEN for event in events)
    assert manager.jobs == 1
    assert manager.usage()[0].pins == 2
    hanging.shelves[0].go.set()
    assert (EventKind.WRITTEN, "disk", OURS[:2]) in told(hanging.settle())
    hanging.at_rest()


def test_close_lets_go_of_nothing_that_a_hanging_call_may_touch(hanging):
    start_to_hang(hanging, OURS[:2])
    hanging.manager.close(timeout=0.05)
    assert hanging.memories[0].closed == 0
    assert hanging.shelves[0].closed == 0


def test_close_twice_around_a_call_that_hung(hanging):
    """The second time finds what the first one left: a write that its victims' delete had kept waiting."""
    hanging.shelves[0].hangs = "delete"
    hanging.store(OURS[:2])
    start_to_hang(hanging, THEIRS[:2])
    hanging.manager.close(timeout=0.05)
    hanging.shelves[0].go.set()
    hanging.manager.close(timeout=HANG)


def test_a_load_does_not_wait_for_stores_that_wait():
    """Four of four slots in flight belong to stores, and one of these has not begun."""
    bench = StackBench(arenas=(8,), inflight=4)
    bench.store(OURS[:1])
    bench.arenas[0].make_room(8)
    for key in THEIRS:
        assert bench.fill([key])
        bench.manager.commit("store")
        bench.work(1)
    assert bench.tiers[0].usage().inflight == 4 * LAYOUT.frame_nbytes
    bench.look(OURS[:1], keep="reader")
    bench.manager.step()
    assert bench.manager._promotions.under_way == 1
    bench.settle()
    assert bench.look(OURS[:1], keep="reader") == [READY]
    assert set(bench.shelves[0].frames) == {OURS[0], *THEIRS[:3]}, "the store that had not begun made room"
