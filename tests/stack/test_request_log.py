"""What a tier was asked for lies in the store, in segments; whatever is lost of it, the rest is replayed in order."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from machine import NAMESPACE
from manual_pool import ManualPool
from sealing import AES, MAC
from serializing import KeptShelf

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal
from kvtier_core.layouts import part_key
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.parted_index import PartedIndex
from kvtier_core.stack.store_tier import request_log
from kvtier_core.stack.store_tier.policy_state import derived_key
from kvtier_core.stack.store_tier.request_log import RequestLog
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES
from kvtier_testing.samples import make_keys, make_layout

#: Its frames are longer than segments.
LAYOUT = make_layout((1 << 20,))
CODEC = FrameCodec(NAMESPACE, LAYOUT)
#: Bytes of a tier's log of eight frames, each of two pages: the least that there is.
LEAST = 8 * 2 * FRAME_ALIGNMENT
KEYS = make_keys(400)
TREE = [KEYS[:3], [*KEYS[:2], KEYS[3]], KEYS[4:5], [KEYS[4], *KEYS[6:9]], KEYS[:2]]


class Told(CacheIndex):
    """Notes what it is told."""

    def __init__(self):
        super().__init__(LruConfig().open())
        self.told = []
        self.parents = {}

    def request(self, path, now, hints):
        super().request(path, now, hints)
        if path:
            self.told.append((now, list(path)))

    def admit(self, keys, parents, nbytes, places=None):
        super().admit(keys, parents, nbytes, places)
        self.parents.update(zip(keys, parents, strict=True))


def log_of(shelf, room=1 << 20, codec=CODEC):
    log = RequestLog(shelf, codec, room)
    return log, replayed(log)


def replayed(log, found=(), now=1000.0):
    index = Told()
    log.replay(index, dict.fromkeys(found, 1), now)
    return index


def logged(paths, shelf=None, *, room=1 << 20, codec=CODEC, every=1.0):
    """A store in which a tier left what it was asked for, one request after another."""
    shelf = shelf or KeptShelf()
    log, _ = log_of(shelf, room, codec)
    for number, path in enumerate(paths):
        now = 1000.0 + every * number
        log.note(path, now)
        if log.due(now):
            save(log, now)
    log.keep()
    return shelf


def save(log, now=0.0):
    pool = ManualPool()
    log.keep_by(pool, now, lambda outcome: None)
    pool.wait(0)
    pool.step()


def paths_in(shelf, **settings):
    return [path for _, path in log_of(shelf, **settings)[1].told]


def test_what_was_requested_is_replayed_in_order_and_in_time():
    index = log_of(logged(TREE, every=2.5))[1]
    assert [path for _, path in index.told] == TREE
    assert [now for now, _ in index.told] == pytest.approx([990.0, 992.5, 995.0, 997.5, 1000.0], abs=1e-3)


def test_what_is_here_is_admitted_with_its_parents_and_what_nobody_named_by_its_age():
    log, _ = log_of(logged(TREE))
    index = replayed(log, [KEYS[20], *KEYS[:4], KEYS[7], KEYS[21]])
    assert index.parents == {
        KEYS[20]: None,
        KEYS[21]: None,
        KEYS[0]: None,
        KEYS[1]: KEYS[0],
        KEYS[2]: KEYS[1],
        KEYS[3]: KEYS[1],
        KEYS[7]: KEYS[6],
    }
    assert index.select_victims(9, lambda key: 1) == [KEYS[20], KEYS[2], KEYS[3], KEYS[7], KEYS[1], KEYS[0], KEYS[21]]


def test_frames_that_nobody_named_leave_in_the_order_of_their_age():
    log, index = log_of(KeptShelf())
    log.replay(index, dict(zip(KEYS[:6], (1, 1, 2, 1, 1, 1), strict=True)), 1000.0)
    assert index.select_victims(9, lambda key: 1) == KEYS[:6]
    assert [index.resident.nbytes(key) for key in KEYS[:6]] == [1, 1, 2, 1, 1, 1]


def test_a_path_may_name_a_chunk_twice():
    first, second = KEYS[:2]
    paths = [[first, second], [second], [first, first, second], [first, second], [first, first]]
    assert paths_in(logged(paths)) == paths


def test_a_known_prefix_costs_nothing():
    once, often = (logged([KEYS[:100]] * times, room=64 * LEAST, every=0.1) for times in (1, 200))
    assert len(once.frames) == len(often.frames) == 1


def test_the_parts_of_a_chunk_are_admitted_with_it():
    chunks = [part_key(key, 0) for key in KEYS[:4]]
    log, _ = log_of(logged([chunks[:3], [*chunks[:2], chunks[3]]]))
    windows = [part_key(chunk, 1) for chunk in chunks]
    index = PartedIndex(LruConfig().open())
    lone = part_key(KEYS[20], 1)
    log.replay(index, dict.fromkeys([lone, *windows, *chunks], 1), 1000.0)
    assert [index.resident.parent(chunk) for chunk in chunks] == [None, chunks[0], chunks[1], chunks[1]]
    order = index.select_victims(9, lambda key: 1)
    leaving = [chunks[2], windows[2], chunks[3], windows[3], chunks[1], windows[1], chunks[0], windows[0]]
    assert order == [lone, *leaving]


@pytest.mark.parametrize("keyed", [None, MAC, AES], ids=["none", "mac", "aes"])
def test_names_in_the_store_are_those_of_frames(keyed):
    codec = FrameCodec(NAMESPACE, LAYOUT, keyed_seal=keyed)
    shelf = logged(TREE, codec=codec)
    assert paths_in(shelf, codec=codec) == TREE
    assert any(KEYS[0] in frame for frame in shelf.frames.values()) == (keyed is None)


def drawn(seed, requests=400):
    """Paths of a random tree, as prompts have them: a key stands for all before it."""
    draw, paths = random.Random(seed), []
    fresh = iter(make_keys(5000))
    keys = defaultdict(lambda: next(fresh))
    for _ in range(requests):
        chunks = (draw.randrange(20), *range(5), *(draw.randrange(50) for _ in range(draw.randrange(4))))
        prefixes = [chunks[:end] for end in range(1, len(chunks) + 1)]
        paths.append([keys[prefix] for prefix in prefixes])
    return paths


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_a_long_log_is_left(seed):
    """At least a half of what was written; and never more than there is room for."""
    paths = drawn(seed)
    shelf = logged(paths, room=LEAST)
    left = paths_in(shelf, room=LEAST)
    assert 80 < len(left) < len(paths) and left == paths[-len(left) :]
    assert shelf.most < LEAST


def test_a_tier_that_is_opened_again_continues_the_log():
    paths = drawn(0, 60)
    shelf = KeptShelf()
    for i in range(0, 60, 3):
        logged(paths[i : i + 3], shelf)
    assert paths_in(shelf) == paths
    assert len(shelf.frames) <= 2 + sum(len(frame) for frame in shelf.frames.values()) // (1 << 20)


def test_the_time_for_which_nothing_ran_does_not_count():
    shelf = logged(TREE)
    logged(TREE, shelf)
    times = [now for now, _ in log_of(shelf)[1].told]
    assert times == pytest.approx([992.0, 993, 994, 995, 996, 996, 997, 998, 999, 1000], abs=1e-3)


def test_a_clock_that_goes_back_does_not_reach_the_policy():
    shelf = KeptShelf()
    log, _ = log_of(shelf)
    for now in (1000.0, 1005.0, 900.0, 1004.0, 1006.0):
        log.note(KEYS[:2], now)
    log.keep()
    assert [now for now, _ in log_of(shelf)[1].told] == pytest.approx([994, 999, 999, 999, 1000], abs=1e-3)


# -- once a minute, and between two places -------------------------------------------------------------


def test_the_current_segment_is_written_once_a_minute():
    log, _ = log_of(shelf := KeptShelf())
    assert not log.due(1000.0)
    log.note(KEYS[:2], 1001.0)
    assert [log.due(now) for now in (1030.0, 1059.0, 1060.0)] == [False, False, True]
    save(log, 1060.0)
    assert paths_in(shelf) == [KEYS[:2]]
    assert [log.due(now) for now in (1100.0, 1120.0)] == [False, True]
    before = dict(shelf.frames)
    save(log, 1120.0)
    assert shelf.frames == before, "nothing was new"


def test_much_that_is_new_is_written_before_the_minute_is_over():
    log, _ = log_of(shelf := KeptShelf(), room=64 << 20)
    assert not log.due(1000.0)
    log.note(make_keys(1000), 1001.0)
    assert not log.due(1001.0)
    log.note(paths := make_keys(1100), 1002.0)
    assert log.due(1002.0)
    shelf.fails = True
    save(log, 1002.0)
    log.note(KEYS[:1], 1003.0)
    assert not log.due(1003.0), "a store that fails is tried again in a minute"
    shelf.fails = False
    save(log, 1062.0)
    assert paths_in(shelf, room=64 << 20)[1] == paths


def test_one_of_two_copies_is_whole_while_the_other_is_written():
    """A slab removes the old frame before it writes the new one."""
    log, _ = log_of(shelf := KeptShelf())
    noted = []
    for key in KEYS[:6]:
        whole = dict(shelf.frames)
        log.note([key], 1000.0)
        save(log)
        (written,) = [place for place in shelf.frames if whole.get(place) != shelf.frames[place]]
        whole.pop(written, None)
        assert paths_in(KeptShelf(whole)) == noted
        noted.append([key])


def test_a_failed_write_does_not_touch_the_other_copy():
    log, _ = log_of(shelf := KeptShelf())
    for key in KEYS[:2]:
        log.note([key], 1000.0)
        save(log)
    before = dict(shelf.frames)
    log.note([KEYS[2]], 1000.0)
    shelf.fails = True
    save(log)
    shelf.fails = False
    save(log)
    assert len([place for place in before if before[place] != shelf.frames[place]]) == 1
    assert paths_in(shelf) == [[key] for key in KEYS[:3]]


def test_full_segments_are_written_at_once_and_an_unwritten_one_is_a_gap():
    shelf = KeptShelf()
    log, _ = log_of(shelf, room=LEAST)
    paths = drawn(1, 200)
    shelf.fails = True
    pool, outcomes = ManualPool(), []
    for number, path in enumerate(paths):
        log.note(path, number / 1000)
        if log.due(number / 1000):
            log.keep_by(pool, number / 1000, outcomes.append)
            pool.wait(0)
            pool.step()
            assert not log.due(number / 1000), "it is retried in a minute"
    assert outcomes and all(isinstance(outcome.error, BackendError) for outcome in outcomes)
    shelf.fails = False
    log.keep()
    left = paths_in(shelf, room=LEAST)
    assert 10 < len(left) < 200 and left == paths[-len(left) :], "the last two segments"


# -- damage --------------------------------------------------------------------------------------------


def segments(shelf):
    """The places of the full segments, the oldest first."""
    _, _, *ring = [derived_key(b"what was requested %d" % number, NAMESPACE.digest) for number in range(7)]
    return [key for key in ring if key in shelf.frames]


@pytest.mark.parametrize("damage", ["removed", "torn", "swapped"])
def test_a_damaged_segment_is_a_gap(damage):
    paths = drawn(2, 80)
    shelf = logged(paths, room=LEAST)
    whole = paths_in(shelf, room=LEAST)
    assert whole == paths
    first, second, *_ = segments(shelf)
    if damage == "removed":
        del shelf.frames[second]
    else:
        spoiled = bytearray(shelf.frames[second])
        spoiled[-1] ^= 1
        shelf.frames[second] = bytes(spoiled) if damage == "torn" else shelf.frames[first]
    left = paths_in(shelf, room=LEAST)
    (gap,) = [i for i in range(len(left)) if left == paths[:i] + paths[len(paths) - len(left) + i :]][:1]
    assert 0 < gap < len(left) < len(paths)


@pytest.mark.parametrize("seed", range(200))
def test_a_segment_of_anything_is_replayed_or_not(seed):
    """It is sealed, so whoever wrote it has the key; nothing that it says may stop the tier."""
    shelf = logged(TREE)
    (key, frame), draw = next(iter(shelf.frames.items())), random.Random(seed)
    forged = memoryview(bytearray(frame))
    for _ in range(draw.randrange(1, 6)):
        at = FRAME_HEADER_NBYTES + draw.randrange(16 + 5 * 12 + 9 * 36)
        forged[at] = draw.choice((0, 1, 9, 127, 255, draw.randrange(256)))
    seal(forged, NAMESPACE, key, len(forged) - FRAME_HEADER_NBYTES)
    shelf.frames[key] = bytes(forged)
    log, index = log_of(shelf)
    assert [now for now, _ in index.told] == sorted(now for now, _ in index.told) and len(index.told) < 1 << 17
    assert all(now <= 1000.0 for now, _ in index.told)
    log.note(KEYS[:3], 2000.0)
    log.keep()
    assert len(paths_in(shelf)[-1]) == 3


def test_a_store_that_fails_is_an_empty_log():
    shelf = logged(TREE)
    shelf.fails = True
    assert paths_in(shelf) == []


def test_a_replay_is_bounded(monkeypatch):
    """By the chunks that it names, however little a request for known ones costs in the log."""
    shelf = logged([KEYS[:92]] * 50)
    monkeypatch.setattr(request_log, "_REPLAYED", 1000)
    assert len(paths_in(shelf)) == 10


def test_memory_is_bounded_whatever_is_asked():
    log, _ = log_of(KeptShelf(), room=LEAST)
    for path in drawn(3, 2000):
        log.note(path, 0.0)
        assert len(log._segment.keys) <= 1 + FRAME_ALIGNMENT // 36
    log.note(make_keys(5000), 0.0)
    assert len(log._segment.keys) <= 1 + FRAME_ALIGNMENT // 36


def test_the_beginning_of_a_path_longer_than_a_segment_is_kept():
    long = make_keys(5000)
    (path,) = paths_in(logged([long], room=LEAST), room=LEAST)
    assert len(path) > 100 and path == long[: len(path)]


# -- what has no log -----------------------------------------------------------------------------------


class Shared(KeptShelf):
    shared = True


@pytest.mark.parametrize(("shelf", "room"), [(Shared(), 1 << 20), (KeptShelf(), LEAST - 1), (KeptShelf(), -1)])
def test_shared_and_small_tiers_have_no_log(shelf, room):
    assert not logged(TREE, shelf, room=room).frames
    assert not RequestLog(shelf, CODEC, room).nbytes


def test_nothing_that_was_logged_counts_in_a_later_epoch():
    log, _ = log_of(shelf := logged(TREE))
    log.note(KEYS[:3], 1001.0)
    log.forget(NAMESPACE.renewed())
    log.note(KEYS[3:6], 1002.0)
    save(log)
    assert not shelf.frames
    log.forget(NAMESPACE)
    log.note(KEYS[6:9], 1003.0)
    log.keep()
    assert paths_in(shelf) == [KEYS[6:9]]


def test_what_was_logged_is_erased():
    class Erases(KeptShelf):
        def erase(self, keys):
            erased.extend(key for key in keys if self.frames.pop(key, None))

    erased = []
    log, _ = log_of(shelf := logged(TREE, Erases()))
    log.forget(NAMESPACE, erase=True)
    log.note(KEYS[3:6], 1002.0)
    shelf.fails = True
    assert log.erasing and log.due(0.0)
    log.forget(NAMESPACE.renewed())
    log.forget(NAMESPACE)
    log.note(KEYS[3:6], 1003.0)
    shelf.fails = False
    save(log)
    assert not log.erasing and len(erased) == 1
    assert paths_in(shelf) == [KEYS[3:6]]
