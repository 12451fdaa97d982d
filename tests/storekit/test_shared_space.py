"""Users of one store count in it together: it never holds more than its capacity, and the oldest frames leave."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.storekit import shared_space
from kvtier_core.storekit.shared_space import Count, SharedSpace, recount

CAPACITY = 6400
HEADROOM = CAPACITY // 32
FRAME = 100
#: Longer than any write may take, in seconds.
LONG = 601.0


class Shelf:
    """A store in memory that watches what lies in it."""

    def __init__(self):
        self.frames = {}  # place -> bytes, the oldest first
        self.unfinished = 0
        self.taken = self.freed = 0
        self.counted = 0  # calls of `count`
        self.listed = 0  # calls of `oldest`
        self.stuck = set()  # places whose frames cannot be removed
        self.most = 0  # bytes that ever lay here
        self.broken = False
        self._lock = threading.Lock()
        self._evicting = threading.Lock()

    @property
    def nbytes(self):
        return sum(self.frames.values()) + self.unfinished

    @property
    def used(self):
        return self.taken - self.freed

    def put(self, place, nbytes=FRAME):
        with self._lock:
            self.frames[place] = nbytes
            self.most = max(self.most, self.nbytes)

    def count(self, *, taken=0, freed=0):
        with self._lock:
            if self.broken:
                raise BackendError("no answer")
            self.counted += 1
            self.taken += taken
            self.freed += freed
            return Count(self.taken, self.freed)

    @contextlib.contextmanager
    def evicting(self):
        with self._evicting:
            yield

    def oldest(self):
        self.listed += 1
        with self._lock:
            return [*self.frames.items(), *([(None, self.unfinished)] if self.unfinished else [])]

    def remove(self, place):
        if place in self.stuck:
            raise BackendError("not permitted")
        with self._lock:
            return self.frames.pop(place, None) is not None


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def user(shelf, clock):
    """Makes users of the shelf."""
    return lambda **settings: SharedSpace(shelf, CAPACITY, clock=clock, **settings)


def write(space, shelf, *places, nbytes=FRAME):
    for place in places:
        space.take(nbytes)
        shelf.put(place, nbytes)


@pytest.fixture
def full(shelf, user):
    """The shelf, full of frames 0, 1, 2 … of a user that is still there."""
    write(user(), shelf, *range(CAPACITY // FRAME))
    assert shelf.nbytes == shelf.used == CAPACITY
    return shelf


# -- the oldest leave ------------------------------------------------------------------------------


def test_while_there_is_room_nothing_is_listed_and_nothing_leaves(full):
    assert list(full.frames) == list(range(CAPACITY // FRAME))
    assert full.listed == 1, "once, by the first user, to count what lay there before"


def test_the_oldest_leave_for_what_does_not_fit(full, user):
    write(user(), full, "new")
    leave = 1 + HEADROOM // FRAME
    assert list(full.frames) == [*range(leave, CAPACITY // FRAME), "new"]
    assert full.used == full.nbytes


def test_more_leave_than_must_so_that_not_every_write_lists_the_store(full, user):
    listed = full.listed
    write(user(), full, *"abc")
    assert full.listed == listed + 1


def test_of_a_store_with_many_frames_some_are_listed_and_its_account_is_left_alone(full, user, monkeypatch):
    """It may say too much, for what killed users had taken, and never too little."""
    monkeypatch.setattr(shared_space, "_AHEAD", 1)
    full.count(taken=300)
    seen, oldest = [], full.oldest
    monkeypatch.setattr(full, "oldest", lambda: (seen.append(each) or each for each in oldest()))
    write(user(most_listed=8), full, "new")
    assert len(seen) == 9 and next(iter(full.frames)) == 5, "four for what is taken, one ahead"
    assert full.used == full.nbytes + 300 and full.most <= CAPACITY
    recount(full)
    assert full.used == full.nbytes


def test_an_unfinished_write_takes_space_and_stays(shelf, user):
    shelf.unfinished = 5 * FRAME
    write(user(), shelf, *range(CAPACITY // FRAME))
    assert shelf.most <= CAPACITY
    assert shelf.unfinished == 5 * FRAME


def test_frames_that_cannot_be_removed_are_passed_over(full, user):
    full.stuck = {0, 1}
    write(user(), full, "new")
    assert {0, 1} < set(full.frames) and 2 not in full.frames
    assert full.used == full.nbytes <= CAPACITY


# -- what cannot fit -------------------------------------------------------------------------------


def test_a_frame_larger_than_the_capacity_evicts_nothing(full, user):
    with pytest.raises(StoreFull, match="does not fit in 6.25KiB"):
        user().take(CAPACITY + 1)
    assert full.used == full.nbytes == CAPACITY


def test_if_removing_everything_would_not_do_nothing_is_removed(full, user):
    full.unfinished = 3 * FRAME
    with pytest.raises(StoreFull) as refused:
        user().take(CAPACITY - FRAME)
    assert refused.value.missing == 2 * FRAME
    assert len(full.frames) == CAPACITY // FRAME


def test_if_nothing_can_be_removed_the_store_is_full_and_says_why(full, user):
    full.stuck = set(full.frames)
    with pytest.raises(StoreFull, match="are in use: not permitted"):
        user().take(FRAME)
    assert full.used == CAPACITY, "what was not given is not counted"


def test_while_the_store_does_not_answer_nothing_is_taken(full, user):
    space = user()
    full.broken = True
    with pytest.raises(BackendError, match="no answer"):
        space.take(FRAME)
    full.broken = False
    assert full.used == CAPACITY
    write(space, full, "new")
    assert full.used == full.nbytes


def test_an_eviction_that_fails_gives_back_what_was_taken(full, user, monkeypatch):
    def fail():
        raise BackendError("cannot be listed")

    monkeypatch.setattr(full, "oldest", fail)
    with pytest.raises(BackendError, match="cannot be listed"):
        user().take(FRAME)
    assert full.used == CAPACITY


# -- several at once -------------------------------------------------------------------------------


def test_counts_that_arrive_out_of_order_are_no_lost_account(shelf, user, clock, monkeypatch):
    space, count = user(), shelf.count
    write(space, shelf, "first")
    listed, counted, late = shelf.listed, threading.Event(), threading.Event()

    def count_and_wait(**changes):
        answer = count(**changes)
        counted.set()
        late.wait()
        return answer

    monkeypatch.setattr(shelf, "count", count_and_wait)
    early = threading.Thread(target=space.take, args=(FRAME,))
    early.start()
    counted.wait()
    monkeypatch.setattr(shelf, "count", count)
    clock.now += LONG
    space.take(FRAME)
    late.set()
    early.join()
    space.take(FRAME)
    assert shelf.listed == listed


def churn(space, shelf, places, seed):
    """Write frames of many sizes; sometimes one fails, and sometimes one's own is removed."""
    rng = random.Random(seed)
    for place in places:
        nbytes = rng.randint(1, CAPACITY // 20)
        try:
            space.take(nbytes)
        except StoreFull:
            continue
        if rng.random() < 0.1:
            space.give(nbytes)
            continue
        shelf.put((seed, place), nbytes)
        if rng.random() < 0.1 and shelf.remove((seed, place)):
            space.give(nbytes)


@pytest.mark.parametrize("quantum", [0, 1 << 20])
def test_many_at_once_never_exceed_the_capacity(shelf, user, quantum):
    """Four users with two threads each. Nobody was killed, so the account is exact in the end."""
    spaces = [user(quantum=quantum) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(churn, spaces[seed % 4], shelf, range(300), seed) for seed in range(8)]:
            done.result()
    assert 0.9 * CAPACITY < shelf.most <= CAPACITY
    for space in spaces:
        space.close()
    assert shelf.used == shelf.nbytes


def test_a_frame_that_another_removes_is_freed_once(full, user, monkeypatch):
    """Between the listing and the removal."""
    listed = full.oldest()
    monkeypatch.setattr(full, "oldest", lambda: listed)
    other = user()
    for place in range(10):
        if full.remove(place):
            other.give(FRAME)
    write(user(), full, *range(100, 112))
    assert full.used == full.nbytes <= CAPACITY


def test_frames_removed_by_others_after_the_listing_are_counted_once(full, user, monkeypatch):
    """The listing names it, and the account no longer has it."""
    list_now, other = full.oldest, user()

    def listed_and_then_removed():
        listed = list_now()
        full.remove(5)
        other.give(FRAME)
        monkeypatch.setattr(full, "oldest", list_now)
        return listed

    monkeypatch.setattr(full, "oldest", listed_and_then_removed)
    write(user(), full, 100)
    assert full.used == full.nbytes <= CAPACITY


def test_a_user_that_waited_for_room_does_not_list_again(full, user):
    spaces, listed = [user(), user()], full.listed
    with ThreadPoolExecutor(2) as threads:
        with full.evicting():  # both wait
            done = [threads.submit(space.take, FRAME // 4) for space in spaces]
            while full.used < CAPACITY + FRAME // 2:
                pass
        for each in done:
            each.result()
    assert full.listed == listed + 1


# -- the account and the store ---------------------------------------------------------------------


def drift(shelf):
    return shelf.used - shelf.nbytes


def test_the_first_user_counts_the_frames_that_are_already_there(shelf, user):
    for place in range(CAPACITY // FRAME):
        shelf.put(place)
    write(user(), shelf, "new")
    assert shelf.most == CAPACITY and drift(shelf) == 0


def test_space_taken_by_a_killed_user_comes_back(full, user, clock):
    """After so long that none of it can be the write of somebody who lives."""
    killed, lives = user(), user()
    killed.take(10 * FRAME)
    write(lives, full, "before")
    assert drift(full) == 10 * FRAME
    clock.now += LONG
    write(lives, full, *range(100, 120))
    assert 0 <= drift(full) <= HEADROOM, "but for as much as was written just before"
    assert full.most <= CAPACITY


def test_space_of_writes_under_way_is_not_reclaimed(full, user, clock):
    """However much it is, and however often the store is listed meanwhile."""
    slow, lives = user(), user()
    write(lives, full, "before")
    clock.now += LONG
    slow.take(CAPACITY // 2)
    listed = full.listed
    write(lives, full, *range(100, 200))
    assert full.listed > listed + 5
    full.put("slow", CAPACITY // 2)
    assert full.most <= CAPACITY and drift(full) == 0


def test_uncounted_frames_are_found_when_the_store_is_listed(full, user):
    """A user without a capacity wrote them."""
    for place in range(100, 110):
        full.put(place)
    write(user(), full, "new")
    assert drift(full) == 0 and full.nbytes <= CAPACITY


def test_an_account_that_is_removed_begins_with_the_frames_that_are_there(full, user):
    space = user()
    write(space, full, "before")
    full.taken = full.freed = 0
    write(space, full, *range(100, 200))
    assert full.most <= CAPACITY and drift(full) == 0


def test_an_account_that_is_removed_while_the_store_is_listed_removes_no_frame(full, user, monkeypatch):
    """The listing was a part of it, and says nothing of the rest."""

    def oldest():
        full.taken = full.freed = 0
        return listed()

    space, before, listed = user(most_listed=8), dict(full.frames), full.oldest
    space.take(0)
    with monkeypatch.context() as patch:
        patch.setattr(full, "oldest", oldest)
        with pytest.raises(StoreFull, match="the count of the store's bytes was removed"):
            space.take(FRAME)
    assert full.frames == before
    write(space, full, "new")
    assert full.most <= CAPACITY and drift(full) == 0


def test_recount_makes_the_account_match_the_frames(full, user):
    user().take(0)
    for place in range(30):
        full.remove(place)
    recount(full)
    assert drift(full) == 0
    full.taken = full.freed = 0
    recount(full)
    assert drift(full) == 0


# -- in advance ------------------------------------------------------------------------------------

#: At most this much is taken in advance: a 1024th of the capacity.
LARGE = 1024 * CAPACITY


@pytest.fixture
def large(shelf, clock):
    """Makes users of a shelf that is so large that CAPACITY may be taken in advance."""
    return lambda: SharedSpace(shelf, LARGE, quantum=CAPACITY, clock=clock)


def test_fewer_than_all_writes_are_counted_in_the_store(shelf, large):
    write(large(), shelf, *range(64))
    assert shelf.used == shelf.nbytes == CAPACITY
    assert shelf.counted < 8


def test_returned_space_is_reused(shelf, large):
    space = large()
    space.take(FRAME)
    counted = shelf.counted
    for _ in range(200):
        space.give(FRAME)
        space.take(FRAME)
    assert shelf.counted == counted


def test_a_user_that_leaves_returns_unused_space(shelf, large):
    space = large()
    write(space, shelf, "frame")
    assert drift(shelf) == CAPACITY - FRAME
    space.close()
    space.close()
    assert drift(shelf) == 0


def test_space_that_an_idle_user_took_in_advance_lapses(shelf, large, clock):
    """Others may then take it for that of a killed one, so it is neither used nor given back."""
    space = large()
    for times, place in enumerate(("frame", "another"), 1):
        write(space, shelf, place)
        assert shelf.used == times * CAPACITY, "taken anew"
        clock.now += LONG / 2
    space.close()
    assert shelf.used == 2 * CAPACITY


def test_many_users_do_not_fill_the_store_with_nothing(shelf, clock):
    users = [SharedSpace(shelf, LARGE, quantum=LARGE, clock=clock) for _ in range(100)]
    for number, space in enumerate(users):
        write(space, shelf, number)
    assert drift(shelf) < LARGE / 10


def test_a_write_that_finds_no_room_loses_nothing_that_was_taken_in_advance(shelf, large):
    space = large()
    write(space, shelf, "frame")
    shelf.stuck = {"frame"}
    shelf.unfinished = LARGE - shelf.used
    shelf.count(taken=shelf.unfinished)
    with pytest.raises(StoreFull):
        space.take(CAPACITY)
    counted = shelf.counted
    space.take(CAPACITY - FRAME)
    assert shelf.counted == counted and shelf.used == LARGE
