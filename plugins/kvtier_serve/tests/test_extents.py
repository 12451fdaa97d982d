"""Stacks whose slots have different lengths share one memory: no byte is two stacks', and demand gets more of it."""

from __future__ import annotations

import itertools
import mmap
import random

import pytest
from served import serving

from kvtier_core.errors import BackendError
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_serve.extents import Extents
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.tenants import Quota
from kvtier_testing.samples import make_keys, make_layout

NBYTES = 1 << 20
SIZES = (4096, 12288, 20480, 65536)


def arena_of(extents, slot_nbytes, model=""):
    share = extents.share(slot_nbytes, model)
    arena = LentArena("arena", 0, share, CacheIndex(LruConfig().open()))
    share.recall_slots, share.next_victims = arena.recall, arena.next_victims
    return arena


def taken(arena):
    """The bytes of the slots that an arena has."""
    places = [*arena._free, *arena.index.resident.places(list(arena.index.resident)), *arena._reserved.values()]
    size = arena.memory.slot_nbytes
    return [(place * size, (place + 1) * size) for place in places]


def counts(extents):
    """What each share has, and lacked."""
    return extents.free, [(share.count, share._short, len(share._used)) for share in extents._shares]


def store(arena, keys):
    keys = arena.without_slot(keys)
    arena.make_room(len(keys))
    keys = keys[: arena.free]
    arena.reserve(keys)
    arena.commit(keys, [None] * len(keys))
    return keys


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lent_twice_whatever_comes_and_goes(seed):
    drawn = random.Random(seed)
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    arenas = [arena_of(extents, size) for size in drawn.sample(SIZES, 3)]
    pinned = []
    for number in range(200):
        arena = drawn.choice(arenas)
        keys = store(arena, [drawn.randbytes(32) for _ in range(drawn.randrange(1, 20))])
        if keys and drawn.random() < 0.3:
            arena.pin(keys[:1], f"holder {number}")
            pinned.append((arena, arena.slots(keys[:1]), f"holder {number}"))
        if pinned and drawn.random() < 0.3:
            arena, slots, holder = pinned.pop(drawn.randrange(len(pinned)))
            arena.unpin(slots, holder)
        if drawn.random() < 0.2:
            extents.balance(1.0)
        ranges = sorted(each for arena in arenas for each in taken(arena))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges)), "one byte, two slots"
        assert not ranges or ranges[-1][1] <= NBYTES
        assert all(arena.free <= arena.lent for arena in arenas)


@pytest.mark.parametrize("seed", range(20))
def test_the_slots_that_a_path_may_count_on_are_there(seed):
    """Unused slots may be too scattered to be lent, or kept for others: a request would wait for them in vain."""
    drawn = random.Random(seed)
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    arenas = [arena_of(extents, size, str(size)) for size in drawn.sample(SIZES, 3)]
    for arena in arenas:
        bound(extents, arena.memory.model, Quota(drawn.randrange(NBYTES), NBYTES))
    for _ in range(100):
        arena, keys = drawn.choice(arenas), [drawn.randbytes(32) for _ in range(drawn.randrange(1, 60))]
        had = counts(extents)
        slots = arena.could_free(len(keys))
        assert counts(extents) == had, "a question reserved"
        assert len(store(arena, keys)) == slots
        extents.balance(1.0)


def test_a_stack_alone_gets_all_of_the_memory():
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    arena = arena_of(extents, 20480)
    store(arena, make_keys(1000))
    assert len(arena.index) == NBYTES // 20480 and not extents.free


def test_memory_follows_demand_until_both_keep_chunks_for_as_long():
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    busy, calm = arena_of(extents, 8192), arena_of(extents, 8192)
    store(calm, make_keys(1000))
    drawn = random.Random(0)
    for _ in range(200):
        store(busy, [drawn.randbytes(32) for _ in range(8)])
        store(calm, [drawn.randbytes(32)])
        extents.balance(1.0)
    ratio = len(busy.index) / len(calm.index)
    assert 3 < ratio < 24, f"eight times the demand got {ratio:.1f} times the memory"


def test_a_slot_in_use_moves_when_its_user_is_done():
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    holds, needs = arena_of(extents, 65536), arena_of(extents, 65536)
    keys = store(holds, make_keys(1000))
    holds.pin(keys, "request")
    extents.make_place(needs.memory)
    assert not store(needs, make_keys(1))
    holds.unpin(holds.slots(keys), "request")
    assert store(needs, make_keys(1))


def bound(extents, model, quota):
    extents.set_quota(model, quota)
    while extents.shrink(model):
        pass


def flooded(extents, calm, busy):
    """How many chunks each has after the busy one has stored a multiple of what the calm one stored."""
    drawn = random.Random(0)
    for _ in range(200):
        store(busy, [drawn.randbytes(32) for _ in range(8)])
        store(calm, [drawn.randbytes(32)])
        extents.balance(1.0)
    return len(calm.index), len(busy.index)


def test_a_model_beyond_its_soft_quota_takes_from_no_other_and_gives_first():
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    calm, busy = arena_of(extents, 8192, "calm"), arena_of(extents, 8192, "busy")
    bound(extents, "busy", Quota(soft=NBYTES // 4))
    store(busy, make_keys(1000))
    assert len(busy.index) == NBYTES // 8192, "nobody else needs the memory yet"
    extents.make_place(calm.memory)
    of_calm, of_busy = flooded(extents, calm, busy)
    assert of_busy <= NBYTES // 4 // 8192 and of_calm > NBYTES // 2 // 8192
    bound(extents, "busy", Quota())
    of_calm, of_busy = flooded(extents, calm, busy)
    assert of_busy > of_calm, "without a quota it gets more: this test shows nothing"


def test_a_model_beyond_its_hard_quota_leaves_at_once_but_for_what_is_in_use():
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    arena = arena_of(extents, 8192, "model")
    keys = store(arena, make_keys(1000))
    arena.pin(keys[:40], "request")
    bound(extents, "model", Quota(hard=16 * 8192))
    assert len(arena.index) == 40 and not store(arena, make_keys(1100)[1050:])
    arena.unpin(arena.slots(keys[:40]), "request")
    assert extents.of_model("model") * extents.extent_nbytes <= 16 * 8192 and len(arena.index) <= 16
    store(arena, make_keys(1100)[1050:])
    assert 12 <= len(arena.index) <= 16


@pytest.mark.parametrize("seed", range(10))
def test_no_model_ever_has_more_than_its_hard_quota(seed):
    drawn = random.Random(seed)
    extents = Extents(mmap.mmap(-1, NBYTES), NBYTES)
    arenas = [arena_of(extents, drawn.choice(SIZES), model) for model in ("a", "a", "b")]
    bound(extents, "a", Quota(hard=NBYTES // 3))
    for _ in range(200):
        store(drawn.choice(arenas), [drawn.randbytes(32) for _ in range(drawn.randrange(1, 20))])
        extents.balance(1.0)
        assert sum(end - begin for arena in arenas[:2] for begin, end in taken(arena)) <= NBYTES // 3


def test_a_chunk_that_never_fits_is_refused():
    with pytest.raises(BackendError, match="less than one chunk"):
        Extents(mmap.mmap(-1, NBYTES), NBYTES).share(2 * NBYTES)


def test_a_model_that_comes_later_gets_room_at_once(tmp_path):
    with serving(tmp_path, slots=64) as served:
        first = served.stack("first")
        keys = make_keys(64)
        first.reserve(keys, "store")
        first.commit("store")
        second = served.stack("second", make_layout((4096, 4096), 8))
        assert second.reserve(make_keys(2), "store")
        (space, _) = served.server.spaces
        assert 32 < space.stack.usage()[0].chunks < 64
