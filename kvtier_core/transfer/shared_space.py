"""Bounds a store that several engines share: they count in the store together, and the oldest frames go first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

from kvtier_core.errors import StoreFull
from kvtier_core.types import Nbytes

#: Frames are removed until this part of the capacity is free, so that not every write has to list the store.
_HEADROOM = 1 / 32
#: The counter is corrected when it differs from what is listed by more than this part of the capacity. Less may be on
#: its way to the store.
_DRIFT = 1 / 16

P = TypeVar("P", bound=Hashable)


class SharedStore(Protocol[P]):
    """What `SharedSpace` needs of a store. Called on any thread. Methods raise BackendError."""

    def add(self, nbytes: int) -> int:
        """Add to the counter in the store, in one step even if others add at the same time; returns the new count."""

    def evicting(self) -> contextlib.AbstractContextManager[None]:
        """In this context no other user of the store evicts. Waits for others."""

    def oldest(self) -> Iterable[tuple[P, int]]:
        """Where each frame of every namespace lies, and its bytes; oldest first."""

    def remove(self, place: P) -> bool:
        """Remove the frame at this place. False if it was gone."""


class SharedSpace:
    """The capacity of a shared store, for one of its users. All methods may be called on any thread.

    A user that is killed leaves what it had taken in the counter; frames that expire stay in it. The next eviction
    corrects the counter if it is far from what is there, and `kvtier fsck --repair` corrects it exactly.
    """

    def __init__(self, store: SharedStore, capacity: int, *, quantum: int = 0):
        """``quantum`` bytes at least are taken from the store's counter at a time, where counting costs a request."""
        self._store = store
        self._capacity = capacity
        self._quantum = quantum
        self._unspent = 0  # counted in the store, and not yet used
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be written; removes the oldest frames of the store if they do not fit.

        Raises StoreFull if that does not free enough: then nothing was counted.
        """
        with self._lock:
            if nbytes <= self._unspent:
                self._unspent -= nbytes
                return
        asked = max(nbytes, min(self._quantum, self._capacity // 64))
        if self._store.add(asked) > self._capacity:
            try:
                self._make_room(asked)
            except BaseException:
                self._store.add(-asked)
                raise
        with self._lock:
            self._unspent += asked - nbytes

    def give(self, nbytes: int) -> None:
        """Return bytes that were taken and are not in use: not written, or of a frame that a write replaced."""
        if self._quantum:
            with self._lock:
                self._unspent += nbytes
        elif nbytes:
            self._store.add(-nbytes)

    def close(self) -> None:
        """Return what was taken in advance."""
        with self._lock:
            unspent, self._unspent = self._unspent, 0
        if unspent:
            self._store.add(-unspent)

    def _make_room(self, asked: int) -> None:
        """Remove frames until the count fits; ``asked`` of it are this caller's and not in the store yet."""
        with self._store.evicting():
            if self._store.add(0) <= self._capacity:
                return  # another user has made room meanwhile
            frames = list(self._store.oldest())
            expected = asked + sum(nbytes for _, nbytes in frames)
            counted = self._store.add(0)
            if abs(counted - expected) > self._capacity * _DRIFT:
                counted = self._store.add(expected - counted)
            wanted = counted - self._capacity
            if wanted > 0:
                self._remove(frames, wanted)

    def _remove(self, frames: Iterable[tuple[Hashable, int]], wanted: int) -> None:
        freed, goal = 0, wanted + int(self._capacity * _HEADROOM)
        for place, nbytes in frames:
            if freed >= goal:
                break
            if self._store.remove(place):
                freed += nbytes
        self._store.add(-freed)
        if freed < wanted:
            raise StoreFull(f"the store's {Nbytes(self._capacity)} are taken", missing=wanted - freed)
