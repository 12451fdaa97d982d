"""Questions to shared stores: in batches, in the background, and what is found comes up without being named again."""

from __future__ import annotations

import pytest
from benches import MISS, PENDING, READY, StackBench, TierBench
from machine import SharedShelf

from kvtier_core.errors import BackendError
from kvtier_core.stack.outcomes import Declined, LoadLimit, Terms
from kvtier_core.types import EventKind
from kvtier_testing.samples import make_keys

PATH = make_keys(8)


class Asked(SharedShelf):
    """Notes what it is asked for."""

    def __init__(self):
        super().__init__()
        self.questions = []

    def contains(self, keys):
        self.questions.append(list(keys))
        return super().contains(keys)


@pytest.fixture
def bench():
    """Two engines in turn: what the first stored the second has to ask for."""
    first = StackBench(arenas=(16,), shelf=Asked)
    first.store(PATH[:5])
    second = StackBench(arenas=(16,), shelf=Asked)
    second.shelves[0].frames = first.shelves[0].frames
    return second


def test_the_whole_path_is_asked_for_in_one_batch(bench):
    assert bench.look(PATH) == [PENDING] * 8
    bench.manager.step()
    bench.work(1)
    assert bench.shelves[0].questions == [PATH]


def test_a_long_path_is_asked_for_in_batches_first_chunks_first():
    bench, path = TierBench(shelf=Asked()), make_keys(300)
    assert bench.tier.remote.request(path) == 300
    bench.tier.poll()
    for _ in range(3):
        bench.turn()
    assert bench.shelf.questions == [path[:128], path[128:256], path[256:]]


def test_absent_keys_are_forgotten_in_their_order_and_unusable_ones_much_later():
    bench = TierBench(shelf=Asked())
    remote = bench.tier.remote
    absent, again, unusable = make_keys(3)

    def asked_for():
        return [bench.tier.remote.request([key]) for key in (absent, again, unusable)]

    remote.absent.add([absent, again])
    remote.unusable.add([unusable])
    bench.now = 0.9
    assert asked_for() == [0, 0, 0]
    remote.absent.add([again])
    bench.now = 1.5
    assert asked_for() == [1, 0, 0]
    remote.absent.add([])
    assert list(remote.absent._ends) == [again], "what has passed takes no room"
    bench.now = 600.0
    assert asked_for() == [1, 1, 1]


def test_found_chunks_are_promoted_without_being_named_again(bench):
    bench.look(PATH)
    bench.settle()
    assert bench.look(PATH) == [READY] * 5 + [MISS] * 3


def test_chunks_after_a_missing_one_are_not_promoted(bench):
    del bench.shelves[0].frames[PATH[2]]
    bench.look(PATH)
    bench.settle()
    assert [bench.arenas[0].has(key) for key in PATH[:5]] == [True, True, False, False, False]


def test_chunks_not_worth_loading_are_not_promoted(bench):
    tier = bench.tiers[0]
    tier._reads._speed.rate, tier._reads._speed.answer = 1.0, 1e-9
    limit = LoadLimit(chunk_seconds=1e-3, wait=2.0)
    bench.manager.lookup(PATH, "waiting", Terms(limit))
    bench.settle()
    found = bench.manager.lookup(PATH, "waiting", Terms(limit))
    assert (len(found.slots), found.pending, found.rest.tier, found.rest.chunks) == (0, 0, "disk", 5)
    assert found.miss_reason == str(found.rest)


def test_no_request_waits_for_a_probe(bench):
    tier = bench.tiers[0]
    tier._reads._speed.rate, tier._reads._speed.answer = 1.0, 1e-9
    limit = LoadLimit(chunk_seconds=1e-3, wait=2.0)
    bench.manager.lookup(PATH, "first", Terms(limit))
    bench.settle()
    assert isinstance(bench.manager.lookup(PATH, "first", Terms(limit)).rest, Declined)
    bench.manager.step()
    assert tier.usage().inflight, "the probe is under way"
    assert bench.manager.lookup(PATH, "second", Terms(limit)).pending == 0
    bench.settle()
    assert len(bench.manager.lookup(PATH, "second", Terms(limit)).slots) == 5


def test_no_request_waits_for_an_answer_slower_than_a_tenth_of_computing(bench):
    bench.tiers[0]._reads._speed.answer = 0.1
    assert bench.manager.lookup(PATH, "slow", Terms(LoadLimit(0.1, 2.0))).pending == 0
    assert bench.manager.lookup(PATH, "worth it", Terms(LoadLimit(0.2, 2.0))).pending == 8
    bench.settle()
    assert bench.look(PATH[:5]) == [READY] * 5, "it was asked all the same"


def test_a_lookup_names_the_tier_that_it_waits_for(bench):
    assert bench.manager.lookup(PATH, "waiting").arriving.tier == "disk"
    bench.settle()
    assert bench.manager.lookup(PATH, "waiting").arriving is None


def test_all_shared_stores_are_asked_at_once():
    bench = StackBench(arenas=(16,), tiers=(12, 12), shelf=Asked)
    bench.look(PATH)
    bench.settle()
    assert [shelf.questions for shelf in bench.shelves] == [[PATH], [PATH]]


def test_a_prefetch_brings_up_a_quarter_of_the_arena_and_pins_nothing(bench):
    bench.manager.prefetch(PATH)
    bench.settle()
    assert bench.look(PATH)[:4] == [READY] * 4
    assert bench.shelves[0].questions == [PATH]
    bench.at_rest()
    again = StackBench(arenas=(16,), shelf=Asked)
    again.shelves[0].frames = bench.shelves[0].frames
    again.manager.prefetch(PATH)
    again.settle()
    assert len(again.arenas[0].index) == 4


def test_unused_prefetched_chunks_count(bench):
    bench.manager.prefetch(PATH[:3])
    bench.settle()
    bench.manager.prefetch(PATH)
    bench.settle()
    assert len(bench.arenas[0].index) == 4


def test_the_contents_of_a_shared_store_are_not_reported(bench):
    assert bench.manager.describe()[1] == "disk: shared with other engines"


def test_an_event_names_only_what_the_store_has(bench):
    """The other keys may be those of a request that stores nothing."""
    bench.look(PATH)
    told = bench.settle()
    assert [event.keys for event in told if event.kind is EventKind.ASKED] == [(*PATH[:5],)]


# -- what goes wrong -----------------------------------------------------------------------------------


@pytest.fixture
def tier():
    bench = TierBench(shelf=SharedShelf())
    bench.write(*PATH[:3])
    bench.settle()
    bench.events()
    return bench


def test_no_request_waits_for_a_store_that_owes_an_answer(tier):
    """Also if it has never given one: it may hang from the start."""
    limit = LoadLimit(chunk_seconds=1.0, wait=2.0)
    tier.tier.remote.request(PATH[5:])
    tier.tier.poll()
    tier.now = 0.2
    assert tier.tier.chooser.worth_asking(3, limit), "a tenth of the time that computing takes"
    tier.now = 0.4
    assert not tier.tier.chooser.worth_asking(3, limit)
    assert tier.tier.chooser.worth_asking(5, limit), "for so much it is worth it"
    tier.shelf.contains = lambda keys: [False] * len(keys)
    tier.settle()
    tier.tier._reads._speed.answer = None
    assert tier.tier.chooser.worth_asking(3, limit), "it has answered"


def test_a_damaged_frame_is_not_asked_for_again_and_is_replaced(tier):
    good = tier.shelf.frames[PATH[0]]
    tier.shelf.frames[PATH[0]] = good[:4096] + bytes([good[4096] ^ 1]) + good[4097:]
    tier.read(PATH[0])
    tier.settle()
    assert tier.events() == [("corrupt", [PATH[0]])]
    tier.now = 599.0
    assert not tier.tier.remote.request([PATH[0]])
    assert PATH[0] in tier.shelf.frames, "another engine may read it well"
    tier.write(PATH[0])
    tier.settle()
    assert tier.shelf.frames[PATH[0]] == good
    tier.read(PATH[0])
    tier.settle()
    assert tier.good == [PATH[0]]


def test_questions_without_an_answer_count_for_the_time_of_asking(tier):
    """Else every request would wait anew for a store that never answers."""
    tier.shelf.fails = True
    tier.tier.remote.request(PATH[5:])
    tier.tier.poll()
    tier.now = 5.0
    tier.settle()
    assert tier.events() == [("io_error", [])], "no key: it may be that of a request that stores nothing"
    assert tier.tier.chooser.worth_asking(3, LoadLimit(20.0, 2.0))
    assert not tier.tier.chooser.worth_asking(3, LoadLimit(10.0, 2.0))


def test_one_key_that_fails_is_no_damage(tier):
    """A server of several may be down."""
    read = tier.shelf.read
    tier.shelf.read = lambda keys, into: [BackendError("its node is down"), *read(keys, into)[1:]]
    tier.read(*PATH[:3])
    tier.settle()
    assert (tier.good, tier.bad) == (PATH[1:3], [PATH[0]])
    assert [(event.kind, event.why) for event in tier.tier.events] == [
        (EventKind.IO_ERROR, "its node is down"),
        (EventKind.READ, ""),
    ]
    tier.now = 1.0
    assert tier.tier.remote.request([PATH[0]]), "asked again a second later"


def test_one_frame_that_is_not_written_is_not_there(tier):
    def write(keys, frames):
        tier.shelf.frames.update((key, bytes(frame)) for key, frame in zip(keys[1:], frames[1:], strict=True))
        return [BackendError("its node is down"), *[None] * (len(keys) - 1)]

    tier.shelf.write = write
    tier.write(*PATH[3:6])
    tier.settle()
    assert tier.has(*PATH[3:6]) == [False, True, True]
    assert tier.events() == [("io_error", [PATH[3]]), ("written", PATH[4:6])]
    assert tier.released[-3:] == PATH[3:6]


def test_a_full_shared_store_is_not_written_for_a_minute_and_nothing_is_forgotten(tier):
    from kvtier_core.errors import StoreFull

    def full(keys, frames):
        raise StoreFull("maxmemory", missing=1)

    write, tier.shelf.write = tier.shelf.write, full
    tier.write(PATH[3])
    tier.settle()
    tier.shelf.write = write
    assert tier.tier.would_admit([PATH[4]]) == []
    assert tier.has(*PATH[:3]) == [True] * 3
    tier.now = 60.0
    assert tier.tier.would_admit([PATH[4]]) == [PATH[4]]


def test_a_holder_looks_again_when_the_store_has_not_what_it_was_asked_for(bench):
    assert bench.look(PATH, keep="waiter") == [PENDING] * 8
    bench.manager.step()
    assert bench.manager.still_pending("waiter")
    bench.work(1)
    assert not bench.manager.still_pending("waiter")


def test_a_holder_still_waits_when_the_store_has_all_that_it_was_asked_for(bench):
    assert bench.look(PATH[:5], keep="waiter") == [PENDING] * 5
    bench.manager.step()
    bench.work(1)
    assert bench.manager.still_pending("waiter")
    bench.settle()
    assert not bench.manager.still_pending("waiter")
    assert bench.look(PATH[:5], keep="waiter") == [READY] * 5
