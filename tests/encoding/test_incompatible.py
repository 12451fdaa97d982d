"""Tiers whose store holds frames of another codec, and tiers whose codec is lossy."""

from __future__ import annotations

import pytest
from machine import LAYOUT, NAMESPACE, SharedShelf, Slots, payload
from manual_pool import ManualPool
from patience import HANG
from serializing import CONTEXT, KeptShelf, LossyConfig, Stack, XorConfig, make_tier

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import Namespace, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing.laws.base import in_new_process
from kvtier_testing.samples import make_keys

KEYS = A, B, C, D, E, F = make_keys(6)
PATH = [A, B]
PAYLOADS = [payload(key, 0) for key in PATH]
FRAME = LAYOUT.frame_nbytes


def shelf_of(config, keys=PATH, kind=KeptShelf):
    """A store into which an engine with this serializer has written, and that engine is gone."""
    shelf = kind()
    assert ("written", "tier", list(keys)) in Stack(make_tier(config, shelf)).store(keys)
    return shelf


def kinds(events):
    return [kind for kind, _, _ in events]


OTHERS = [
    (XorConfig(1), XorConfig(2)),
    (XorConfig(1), RawConfig()),
    (RawConfig(), XorConfig(1)),
    (LossyConfig(), RawConfig()),
]


@pytest.mark.parametrize(("wrote", "reads"), OTHERS, ids=repr)
def test_a_frame_of_another_codec_is_a_miss_and_stays(wrote, reads):
    shelf = shelf_of(wrote)
    before = dict(shelf.frames)
    tier = make_tier(reads, shelf)
    stack = Stack(tier)
    payloads, events = stack.load(PATH)
    assert payloads == []
    assert sorted(events) == sorted(("incompatible", "tier", [key]) for key in PATH)
    assert shelf.frames == before, "deleted"
    assert stack.load(PATH) == ([], []), "asked for again"
    again, _ = Stack(make_tier(wrote, KeptShelf(shelf.frames))).load(PATH)
    assert len(again) == len(PATH), "of no use to its own codec any more"


def test_the_reason_is_reported():
    tier = make_tier(XorConfig(2), shelf_of(XorConfig(1)))
    stack = Stack(tier)
    stack.manager.lookup(PATH, "test")
    assert {event.why for event in stack.manager.drain(timeout=HANG)} == {"a frame of another codec"}
    assert (
        stack.manager.lookup(PATH, "test").miss_reason == "tier has it with another codec, seal key or number of ranks"
    )


def test_the_breaker_is_not_told():
    tier = make_tier(XorConfig(2), shelf_of(XorConfig(1), KEYS))
    stack = Stack(tier)
    assert kinds(stack.load(KEYS)[1]) == ["incompatible"] * len(KEYS)
    stack.store([*KEYS])
    assert tier.readable(KEYS) == len(KEYS)


def test_an_incompatible_frame_is_written_over():
    """The engine computes the chunk, which is a miss, and stores it."""
    shelf = shelf_of(XorConfig(1))
    tier = make_tier(XorConfig(2), shelf)
    stack = Stack(tier)
    stack.load(PATH)
    assert ("written", "tier", PATH) in stack.store(PATH)
    assert sum(tier.incompatible.values()) == 0
    assert Stack(make_tier(XorConfig(2), KeptShelf(shelf.frames))).load(PATH)[0] == PAYLOADS


def take_a_turn(folder, mask):
    """An engine with this option loads and stores the path: what it got, what was reported, if the books balance."""
    tier = make_tier(XorConfig(mask), DiskConfig(path=folder, min_free=Nbytes(0)).open(CONTEXT))
    stack = Stack(tier)
    payloads, events = stack.load(PATH)
    stack.store(PATH)
    on_disk = sum(file.stat().st_size for file in folder.rglob("*.kv"))
    balanced = on_disk == tier.index.resident.used + sum(tier.incompatible.values())
    stack.manager.close()
    return payloads, set(kinds(events)), balanced


def test_processes_with_other_options_take_turns_on_one_folder(tmp_path):
    """None of them gets the other's KV, and each gets its own if nobody wrote over it."""
    assert in_new_process(take_a_turn, tmp_path, 1) == ([], set(), True)
    assert in_new_process(take_a_turn, tmp_path, 2) == ([], {"incompatible"}, True)
    assert take_a_turn(tmp_path, 2) == (PAYLOADS, {"promoted", "read"}, True)
    assert take_a_turn(tmp_path, 1) == ([], {"incompatible"}, True)
    assert in_new_process(take_a_turn, tmp_path, 1) == (PAYLOADS, {"promoted", "read"}, True)


def test_incompatible_frames_count_until_they_are_gone():
    """The tier is as full as it may be, of frames that it cannot read: they leave first, and only as far as needed."""
    shelf = shelf_of(XorConfig(1), [A, B, C, D])
    tier = make_tier(XorConfig(2), shelf, frames=4)
    stack = Stack(tier)
    stack.load([A, B])
    assert (len(tier.index), sum(tier.incompatible.values())) == (2, 2 * FRAME)
    events = stack.store([E])
    assert ("evicted", "tier", [A]) in events and ("written", "tier", [E]) in events
    assert set(shelf.frames) == {B, C, D, E}, "what can be read, or may be, stays longer"
    stack.store([F])
    assert set(shelf.frames) == {C, D, E, F}
    assert shelf.most <= tier.capacity
    assert sum(tier.incompatible.values()) == 0


def test_a_frame_is_not_evicted_for_the_write_that_replaces_it():
    """It takes room beside its newcomer, until that is whole."""
    shelf = shelf_of(XorConfig(1), [A, B, C])
    tier = make_tier(XorConfig(2), shelf, frames=3)
    stack = Stack(tier)
    stack.load([A, B, C])
    events = stack.store([A, E])
    assert [event for event in events if event[0] == "evicted"] == [("evicted", "tier", [B, C])]
    assert set(shelf.frames) == {A, E}
    assert shelf.most <= tier.capacity
    assert sum(tier.incompatible.values()) == 0


def test_a_write_that_does_not_begin_leaves_it_counted():
    """The delete that was to make room fails: the frame lies there still."""
    shelf = shelf_of(XorConfig(1), [A, B])
    tier = make_tier(XorConfig(2), shelf, frames=2)
    stack = Stack(tier)
    stack.load([A, B])
    shelf.fails = True
    assert "written" not in kinds(stack.store([A]))
    held = sum(map(len, shelf.frames.values()))
    assert held == tier.index.resident.used + sum(tier.incompatible.values()) == 2 * FRAME


def test_an_incompatible_frame_whose_delete_failed_is_found_incompatible_again():
    """It failed to be deleted, so it is the tier's again, and found incompatible again."""
    shelf = shelf_of(XorConfig(1), [A, B])
    tier = make_tier(XorConfig(2), shelf, frames=2)
    stack = Stack(tier)
    stack.load([A, B])
    shelf.fails = True
    stack.store([C])
    shelf.fails = False
    payloads, events = stack.load([A, B])
    assert payloads == []
    assert set(kinds(events)) <= {"incompatible", "evicted", "written"}


def test_a_new_epoch_leaves_it_where_it_is():
    shelf = shelf_of(XorConfig(1))
    tier = make_tier(XorConfig(2), shelf)
    stack = Stack(tier)
    stack.load(PATH)
    stack.manager.invalidate_all(Namespace.of({"model": "other"}))
    stack.settle()
    assert sorted(shelf.frames) == sorted(PATH)
    assert sum(tier.incompatible.values()) == len(PATH) * FRAME


# -- stores that others use too ------------------------------------------------------------------------


def test_in_a_shared_store_nothing_of_others_is_deleted_or_asked_for_again_and_again():
    now, shelf = [0.0], shelf_of(XorConfig(1), kind=SharedShelf)
    before = dict(shelf.frames)
    tier = make_tier(XorConfig(2), shelf, frames=2, clock=lambda: now[0])
    stack = Stack(tier)
    stack.load(PATH)
    assert stack.load(PATH)[0] == []
    asked = []
    read = shelf.read
    shelf.read = lambda keys, into: asked.append(list(keys)) or read(keys, into)
    for _ in range(20):
        now[0] += 10.0
        assert stack.load(PATH)[0] == []
    assert not asked, "the same frames are read again and again"
    assert shelf.frames == before
    assert tier.index.resident.used == 0
    now[0] += 600.0
    stack.load(PATH)
    stack.load(PATH)
    assert asked, "never asked again, though another engine may have written them anew"
    stack.store([C, D])
    stack.store([E, F])
    assert {key: shelf.frames[key] for key in before} == before, "evicted to make room"


def test_in_a_shared_store_engines_with_one_codec_find_each_others_frames():
    shelf = shelf_of(XorConfig(1), kind=SharedShelf)
    stack = Stack(make_tier(XorConfig(1), shelf))
    stack.load(PATH)
    assert stack.load(PATH)[0] == PAYLOADS


# -- lossy codecs --------------------------------------------------------------------------------------

ROUNDED = [bytes(byte & 0xF0 for byte in each) for each in PAYLOADS]


@pytest.fixture
def rounded():
    """An arena over an empty raw tier, over a lossy one that has the path."""
    lossy = make_tier(LossyConfig(), shelf_of(LossyConfig()), name="lossy")
    return Stack(make_tier(RawConfig(), KeptShelf(), name="raw"), lossy)


def test_chunks_from_a_lossy_codec_are_served(rounded):
    assert rounded.load(PATH)[0] == ROUNDED
    assert rounded.exact(PATH) == 0


def test_a_lossy_chunk_is_written_to_no_other_tier(rounded):
    """Not when it comes up, not when it is asked for again, and not to an arena either."""
    raw, _ = rounded.tiers
    for _ in range(3):
        rounded.load(PATH)
    assert raw.backend.frames == {}
    assert ("written", "raw", [C]) in rounded.store([C])
    assert rounded.load([C])[0] == [payload(C, 0)]


def test_a_lossy_chunk_is_not_encoded_once_more(rounded):
    """Nor is it written back to its own tier when that has lost it."""
    _, lossy = rounded.tiers
    rounded.load(PATH)
    lossy.index.remove(PATH)
    lossy.backend.frames.clear()
    assert "written" not in kinds(rounded.load(PATH)[1])
    assert lossy.backend.frames == {}


def test_a_recomputed_chunk_is_exact_again(rounded):
    """The slot's header still says what lay there before: it has no say."""
    raw, _ = rounded.tiers
    rounded.load(PATH)
    rounded.arena.invalidate_all()
    assert ("written", "raw", PATH) in rounded.store(PATH)
    assert rounded.exact(PATH) == len(PATH)
    assert len(raw.backend.frames) == len(PATH)


def test_a_lossy_chunk_is_not_copied_to_another_arena():
    lossy = make_tier(LossyConfig(), shelf_of(LossyConfig()), name="lossy")
    arenas = [Arena(f"arena{i}", i, Slots(4), CacheIndex(LruConfig().open())) for i in (0, 1)]
    manager = StorageManager([*arenas, lossy], namespace=NAMESPACE, layout=LAYOUT, pool=ManualPool())
    manager.lookup(PATH, "test")
    manager.drain(timeout=HANG)
    manager.on_request(PATH)
    manager.drain(timeout=HANG)
    assert [arena.ready_run(PATH) for arena in arenas] == [len(PATH), 0]
