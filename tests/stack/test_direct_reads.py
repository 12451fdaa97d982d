"""Frames of a store that workers read where they lie: they stay there while somebody holds them, and then may go."""

from __future__ import annotations

import pytest
from machine import open_codec
from manual_pool import ManualPool
from test_machine import SharedSlab, Slab

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.outcomes import LoadLimit
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.store_tier.writes import FrameWrite
from kvtier_core.types import EventKind, FrameRead, ReadStatus
from kvtier_testing.samples import make_context, make_frame, make_keys, make_layout, make_namespace

LAYOUT = make_layout()
FRAME = LAYOUT.frame_nbytes
KEYS = make_keys(10)
HERE, LATER = KEYS[:4], KEYS[4:]


class Tier(StoreTier):
    """It has room for four frames."""

    def __init__(self, store=Slab):
        self.now = 0.0
        self.slab = store()
        super().__init__(
            "slab",
            self.slab,
            pool=ManualPool(),
            index=CacheIndex(LruConfig().open()),
            codec=open_codec(RawConfig(), make_context(layout=LAYOUT)),
            capacity=4 * FRAME,
            inflight=1 << 30,
            not_direct="",
            clock=lambda: self.now,
        )

    def store(self, *keys):
        for key in keys:
            self.index.request([key], self.now, {})
            self.write([FrameWrite(key, None, make_frame(key, FRAME))], lambda key: None)
            self.rest()

    def rest(self):
        while self.pool.queue:
            self.pool.run(0)
            self.pool.step()

    def load(self, keys, holder="request", ok=True, **unread):
        frames = self.lease(keys, holder)
        self.direct_reads.begin([frame.key for frame in frames], holder)
        self.now += 1.0
        self.direct_reads.end(holder, {frame.key: FrameRead(**unread) for frame in frames} if unread else {}, ok=ok)
        self.direct_reads.release(holder)
        self.rest()

    def told(self):
        kinds = [event.kind for event in self.events]
        self.events.clear()
        return kinds


@pytest.fixture
def tier():
    tier = Tier()
    tier.store(*HERE)
    tier.told()
    return tier


def test_a_frame_with_another_holder_stays(tier):
    first, second = tier.lease(HERE[:2], "a"), tier.lease(HERE[:2], "b")
    assert first == second and tier.leasable(HERE) == 4
    tier.direct_reads.release("a")
    tier.store(*LATER)
    assert list(tier.slab.locate(HERE[:2])) == [frame.location for frame in first]
    assert tier.leasable(HERE) == 2, "the others made room"
    tier.direct_reads.release("b")
    tier.store(*reversed(LATER))
    assert tier.leasable(HERE[:1]) == 0


def test_releasing_an_unknown_holder_does_nothing(tier):
    tier.direct_reads.release("nobody")
    tier.direct_reads.begin([], "nobody")
    tier.direct_reads.end("nobody", {}, ok=True)
    assert tier.told() == []


def test_direct_reads_are_reported(tier):
    tier.load(HERE[:2])
    (event,) = tier.events
    assert (event.kind, event.keys, event.nbytes, event.seconds) == (EventKind.READ, tuple(HERE[:2]), 2 * FRAME, 1.0)


@pytest.mark.parametrize("status", [ReadStatus.CORRUPT, ReadStatus.MISSING])
def test_an_unverified_frame_is_never_found_again_and_removed_with_its_last_holder(tier, status):
    tier.lease(HERE[:1], "another")
    tier.load(HERE[:1], status=status, why="bad", ok=False)
    assert tier.told() == [EventKind(status.value)]
    assert tier.leasable(HERE) == 0 and HERE[0] in tier.slab.frames
    tier.direct_reads.release("another")
    tier.rest()
    assert HERE[0] not in tier.slab.frames and HERE[0] not in tier.index


def test_a_frame_of_another_codec_is_left_alone(tier):
    tier.load(HERE[:1], status=ReadStatus.INCOMPATIBLE, why="lz4", ok=False)
    assert tier.told() == [EventKind.INCOMPATIBLE]
    assert HERE[0] in tier.slab.frames and HERE[0] in tier.incompatible and tier.leasable(HERE) == 0


def test_a_new_epoch_waits_for_who_holds_and_finds_nothing(tier):
    (frame,) = tier.lease(HERE[:1], "request")
    tier.invalidate_all(make_namespace("renewed"))
    tier.rest()
    assert list(tier.slab.frames) == [HERE[0]] and tier.leasable(HERE) == 0
    assert frame.namespace == make_namespace().digest
    tier.direct_reads.release("request")
    tier.rest()
    assert not tier.slab.frames


def test_a_frame_without_a_place_ends_the_run_and_is_missing(tier):
    del tier.slab.frames[HERE[2]]
    assert [frame.key for frame in tier.lease(HERE, "request")] == HERE[:2]
    assert tier.told() == [EventKind.MISSING]
    tier.rest()
    assert HERE[2] not in tier.index


def test_a_store_that_fails_again_and_again_rests_and_is_tried_once(tier):
    for _ in range(3):
        tier.load(HERE[:1], status=ReadStatus.IO_ERROR, why="gone", ok=False)
    assert tier.told() == [EventKind.IO_ERROR] * 3 + [EventKind.BREAKER_OPEN]
    assert tier.leasable(HERE) == 0 and len(tier.slab.frames) == 4, "nothing is deleted"
    tier.now += 10.0
    assert tier.leasable(HERE) == 4
    tier.lease(HERE[:1], "probe")
    tier.direct_reads.begin(HERE[:1], "probe")
    assert tier.leasable(HERE) == 0, "one at a time"
    tier.direct_reads.end("probe", {}, ok=True)
    tier.direct_reads.release("probe")
    assert tier.told() == [EventKind.READ, EventKind.BREAKER_CLOSED] and tier.leasable(HERE) == 4


def test_a_load_that_failed_for_another_reason_says_nothing_of_the_store(tier):
    """Its engine was killed, for instance. Another load may be the probe."""
    for _ in range(3):
        tier.load(HERE[:1], status=ReadStatus.IO_ERROR, why="gone", ok=False)
    tier.now += 10.0
    tier.told()
    tier.load(HERE[:1], ok=False)
    assert tier.told() == [] and tier.leasable(HERE) == 4
    tier.load(HERE[:1])
    assert tier.told() == [EventKind.READ, EventKind.BREAKER_CLOSED]


def test_slow_direct_reads_are_declined_once_that_is_known(tier):
    limit = LoadLimit(chunk_seconds=0.1, wait=2.0)
    assert tier.choose(4, limit).chunks == 4
    tier.load(HERE[:1])  # a second
    assert tier.choose(4, limit).declined and tier.choose(4, LoadLimit(chunk_seconds=2.0, wait=9.0)).chunks == 4


# -- a shared store ----------------------------------------------------------------------------------------


@pytest.fixture
def shared():
    """Somebody else has stored four frames."""
    tier = Tier(SharedSlab)
    tier.slab.write(HERE, [make_frame(key, FRAME) for key in HERE])
    return tier


def ask(tier):
    tier.remote.request(HERE)
    tier.poll()
    tier.rest()


def test_workers_read_what_a_shared_store_says_that_it_has(shared):
    assert shared.leasable(HERE) == 0, "it was not asked yet"
    ask(shared)
    shared.told()
    shared.load(HERE)
    assert shared.told() == [EventKind.READ]


@pytest.mark.parametrize("status", [ReadStatus.CORRUPT, ReadStatus.MISSING, ReadStatus.INCOMPATIBLE])
def test_an_unusable_frame_of_a_shared_store_stays_and_is_not_asked_for_at_once(shared, status):
    ask(shared)
    shared.load(HERE[:1], status=status, why="bad", ok=False)
    assert HERE[0] in shared.slab.frames and shared.leasable(HERE) == 0
    assert not shared.remote.request(HERE[:1])
    shared.now += 1000.0
    ask(shared)
    assert shared.leasable(HERE) == 4, "somebody else may have replaced it"


def test_a_frame_that_a_shared_store_no_longer_locates_is_missing(shared):
    ask(shared)
    shared.told()
    shared.slab.delete(HERE[1:2])
    assert [frame.key for frame in shared.lease(HERE, "request")] == HERE[:1]
    assert shared.told() == [EventKind.MISSING]
    assert not shared.remote.request(HERE[1:2]), "it would be asked for in every step"
