"""Limits a store that several engines share: they keep one account in it, and remove the oldest frames first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import attrs

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.forks import ProcessBound
from kvtier_core.types import size

#: Frames are removed until this part of the capacity is free, so that not every write has to list the store.
_HEADROOM = 1 / 32
#: At most this part of the capacity is taken in advance, so that the reserves of a hundred users do not fill the store.
_IN_ADVANCE = 1 / 1024
#: Seconds after which taken bytes are in the store or were given back, or their user is gone: longer than any write.
_SETTLED = 600.0
#: If the frames of a listing are limited, at most this many are removed for the next writes.
_AHEAD = 1024
#: Number of frames removed before they are counted as freed; and number of failures after which the user gives up.
_AT_ONCE = 16

P = TypeVar("P", bound=Hashable)


@attrs.frozen
class Count:
    """The account in a store: two counters that only grow, and begin at 0."""

    taken: int  #: bytes that users ever wanted to write
    freed: int  #: bytes that they did not write after all, and bytes of frames that were removed

    @property
    def used(self) -> int:
        """Bytes that are in the store, or may be written to it at any moment."""
        return self.taken - self.freed


class SharedStore(Protocol[P]):
    """The methods of a store that `SharedSpace` needs. Called on any thread. Methods raise BackendError."""

    def count(self, *, taken: int = 0, freed: int = 0) -> Count:
        """Add to the counters, in one step even if others add at the same time; returns their new values."""

    def evicting(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no other user of the store evicts. Waits for others."""

    def oldest(self) -> Iterable[tuple[P | None, int]]:
        """The place and bytes of each frame of every namespace, oldest first. All that stay meanwhile are listed.

        The place is None for anything that takes space and must stay, such as an unfinished write of another user.
        """

    def remove(self, place: P) -> bool:
        """Remove the frame that was listed at this place. False if it was gone, or another frame in its place."""


class SharedSpace(ProcessBound):
    """The capacity of a shared store, for one of its users. All methods may be called on any thread.

    The contents of the store never exceed the capacity: bytes are counted before they are written, and given back after
    they are removed. The user that finds the capacity exceeded lists the store and removes the oldest frames.

    A killed user leaves the bytes that it had taken in the account. Each listing of all frames corrects that: the store
    holds at least the listed bytes, and at most those plus the bytes taken in the last ten minutes.
    """

    def __init__(
        self,
        store: SharedStore,
        capacity: int,
        *,
        quantum: int = 0,
        most_listed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """At least ``quantum`` bytes are taken from the account at a time, if counting costs a request.

        An eviction lists at most ``most_listed`` frames, and removes few more than it must, so that it ends in time
        however many there are. If a store has more, the account is then too high until `recount`, never too low.
        """
        self._store = store
        self._capacity = capacity
        self._most_listed = most_listed
        self._quantum = min(quantum, int(capacity * _IN_ADVANCE))
        self._clock = clock
        self._lock = threading.Lock()
        self._in_advance = 0  # bytes taken and not yet wanted; they lapse, so that an idle user holds nothing forever
        self._lapses = 0.0
        self._begun = False
        self._lost = False  # the account was removed, and what it had counted is lost
        self._used: int | None = None  # in the account when it was last read
        self._history: deque[tuple[float, int]] = deque()  # when this user read the account, and the bytes taken then

    @property
    def used(self) -> int | None:
        """Bytes of all users' frames, according to the account when it was last read; None if it never was."""
        with self._lock:
            ahead = self._in_advance if self._clock() < self._lapses else 0
            return None if self._used is None else max(0, self._used - ahead)

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be written; removes the oldest frames of the store if they do not fit.

        The write should begin immediately, and end within minutes.

        Raises StoreFull if they cannot fit, and BackendError: then nothing was counted.
        """
        if nbytes > self._capacity:
            raise StoreFull(f"{size(nbytes)} does not fit in {size(self._capacity)}", missing=nbytes)
        held = self._spend(nbytes)
        if held == nbytes:
            return
        asked = max(nbytes - held, self._quantum)
        try:
            self._begin()
            self._take(asked)
        except BaseException:
            with contextlib.suppress(BackendError):
                self.give(held)
            raise
        self._keep(asked + held - nbytes)

    def give(self, nbytes: int) -> None:
        """Return bytes that were taken and not written, or those of a frame that this user removed."""
        with self._lock:
            if self._clock() < self._lapses:
                self._in_advance += nbytes
                return
        if nbytes:
            self._count(freed=nbytes)

    def close(self) -> None:
        """Return the bytes that were taken in advance."""
        with self._lock:
            left = self._in_advance if self._clock() < self._lapses else 0
            self._in_advance, self._lapses = 0, 0.0
        if left:
            self._count(freed=left)

    # -- in advance --------------------------------------------------------------------------------

    def _spend(self, nbytes: int) -> int:
        """Use bytes that were taken in advance; returns how many of the wanted ones there were."""
        with self._lock:
            if self._clock() >= self._lapses:
                self._in_advance = 0
            spent = min(nbytes, self._in_advance)
            self._in_advance -= spent
            return spent

    def _keep(self, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                if not self._in_advance:
                    self._lapses = self._clock() + _SETTLED / 2  # the other half is for the write
                self._in_advance += nbytes

    # -- the account -------------------------------------------------------------------------------

    def _count(self, *, taken: int = 0, freed: int = 0) -> Count:
        """Add to the account, and occasionally remember the bytes taken until now."""
        with self._lock:
            known = self._history[-1][1] if self._history else 0
        count = self._store.count(taken=taken, freed=freed)
        with self._lock:  # answers of several threads may come here in another order than they were given
            now = self._clock()
            self._used = count.used
            if count.taken < known:
                self._history.clear()
                self._lost = True
            if not self._history or now - self._history[-1][0] > _SETTLED / 4:
                self._history.append((now, count.taken))
            while len(self._history) > 1 and now - self._history[1][0] >= _SETTLED:
                self._history.popleft()
        return count

    def _settled(self) -> int:
        """A lower bound: of all bytes ever taken, this many do not belong to a write that may still be under way."""
        with self._lock:
            seen, taken = self._history[0]
            return taken if self._clock() - seen >= _SETTLED else 0

    def _begin(self) -> None:
        """The first user that has a capacity counts the frames that are already there; others wait for it."""
        if not self._begun and not self._count().taken:
            with self._store.evicting():
                if not self._count().taken:
                    _match_listing(self._store)
        self._begun = True

    def _take(self, nbytes: int) -> None:
        if self._fits(self._count(taken=nbytes)):
            return
        try:
            self._make_room(nbytes)
        except BaseException:
            with contextlib.suppress(BackendError):
                self._count(freed=nbytes)
            raise

    def _fits(self, count: Count) -> bool:
        return count.used <= self._capacity and not self._lost

    # -- making room -------------------------------------------------------------------------------

    def _make_room(self, taken: int) -> None:
        """Remove frames until the taken bytes fit. Raises StoreFull."""
        with self._store.evicting():
            before = self._count()
            if self._fits(before):
                return  # another user has made room meanwhile
            settled = self._settled()
            listing = iter(self._store.oldest())
            frames = list(islice(listing, None if self._lost else self._most_listed))
            is_whole = next(listing, None) is None
            listed = sum(nbytes for _, nbytes in frames)
            count = self._count()
            if is_whole:
                gone = count.freed - before.freed  # listed bytes that may have been removed meanwhile
                most = listed + max(count.taken - settled, taken)
                count = _correct(self._store, count, listed + taken - gone, most)
                self._lost = False
            elif self._lost:  # after a listing of only a part of the store
                raise StoreFull("the count of the store's bytes was removed", missing=taken)
            if not self._fits(count):
                removable = [(place, nbytes) for place, nbytes in frames if place is not None]
                self._remove(removable, count.used - self._capacity)

    def _remove(self, frames: Sequence[tuple[Hashable, int]], wanted: int) -> None:
        """Remove the first of these frames until ``wanted`` bytes are free, and some more."""
        self._must_suffice(wanted - sum(nbytes for _, nbytes in frames))
        headroom = int(self._capacity * _HEADROOM)
        if self._most_listed is not None:
            headroom = min(headroom, sum(nbytes for _, nbytes in frames[:_AHEAD]))
        freed = told = 0
        failures: list[BackendError] = []
        for number, (place, nbytes) in enumerate(frames, 1):
            try:
                freed += nbytes if self._store.remove(place) else 0
            except BackendError as error:
                failures.append(error)
            enough = freed >= wanted + headroom or len(failures) == _AT_ONCE
            if enough or number % _AT_ONCE == 0 or number == len(frames):
                count = self._count(freed=freed - told)
                told = freed
            if enough:
                break
        if not self._fits(count):
            self._must_suffice(wanted - freed, failures)

    def _must_suffice(self, missing: int, failures: Sequence[BackendError] = ()) -> None:
        if missing > 0:
            why = f": {failures[0]}" if failures else ""
            raise StoreFull(f"the store's {size(self._capacity)} are in use{why}", missing=missing)


def recount(store: SharedStore) -> None:
    """Set the account to the bytes that are in the store now, whatever it was before. Raises BackendError.

    Bytes that other users have taken at this moment and not yet written are not counted until the next eviction.
    """
    with store.evicting():
        _match_listing(store)


def _match_listing(store: SharedStore) -> None:
    listed = sum(nbytes for _, nbytes in store.oldest())
    _correct(store, store.count(), listed, listed)


def _correct(store: SharedStore, count: Count, least: int, most: int) -> Count:
    """Change the account as little as possible, so that it has at least ``least`` bytes and at most ``most``."""
    right = min(max(count.used, least), most)
    return store.count(taken=max(right - count.used, 0), freed=max(count.used - right, 0))
