"""Writes frames to a store. Each write waits until its victims are deleted, so the capacity is never exceeded."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many, in_groups
from kvtier_core.stack.store_tier.calls import Call, Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.types import ChunkKey, EventKind

#: Called with frames whose views are no longer used, once for each frame.
Release = Callable[[Sequence[ChunkKey]], None]


@attrs.frozen
class FrameWrite:
    """A sealed raw frame in an arena slot, to be written to a store."""

    key: ChunkKey
    parent: ChunkKey | None
    view: memoryview
    salt: bytes = b""  #: of the chunk's requests


@attrs.frozen(eq=False)
class _Group:
    """Frames that one call writes."""

    frames: Sequence[FrameWrite]
    keys: Sequence[ChunkKey]  #: of these frames
    view_nbytes: int  #: of the arena slots that they hold
    codec: FrameCodec  #: of the namespace to which their keys belong
    release: Release

    @property
    def stored_nbytes(self) -> int:
        """Upper bound of its bytes in the store."""
        return len(self.frames) * self.codec.max_frame_nbytes


class Writes:
    """The writes of one store tier.

    At most ``concurrent`` calls are under way, which leaves threads for reads; the other groups wait here, oldest
    first, and can be shed.
    """

    def __init__(self, calls: Calls, *, deletes: Deletes, concurrent: int):
        self.waiting_nbytes = 0  #: of views held by waiting writes
        self.begun_nbytes = 0  #: of views held by writes under way
        self._calls = calls
        self._table = calls.table
        self._index = calls.table.index
        self._health = calls.health
        self._backend = calls.backend
        self._deletes = deletes
        self._concurrent = concurrent
        self._begun = 0  # calls under way
        self._waiting: deque[_Group] = deque()

    def add(
        self, frames: Sequence[FrameWrite], victims: Sequence[ChunkKey], codec: FrameCodec, release: Release
    ) -> None:
        """Evict ``victims``, then write ``frames`` of one path, root first, with this codec even in a later epoch."""
        keys = [frame.key for frame in frames]
        self._index.admit(keys, [frame.parent for frame in frames], codec.max_frame_nbytes)
        for group in in_groups(frames, lambda frame: len(frame.view)):
            views = sum(len(frame.view) for frame in group)
            waiting = _Group(group, [frame.key for frame in group], views, codec, release)
            self._calls.begin(waiting.keys, Use.WRITING, self._health.writes)
            self._waiting.append(waiting)
            self.waiting_nbytes += waiting.view_nbytes
            self._table.waiting_nbytes += waiting.stored_nbytes
            self._spend(waiting.stored_nbytes)
        self._deletes.evict(victims, "for room")
        self._deletes.make_room()
        self.start()

    def start(self) -> None:
        """Begin the writes that fit in the capacity now."""
        while self._waiting and self._begun < self._concurrent:
            fits = self._table.fits(self._waiting[0].stored_nbytes)
            if not fits and self._table.leaving_nbytes:
                return
            group = self._next()
            if fits:
                self._begin(group)
            elif self._table.limit.lowered(self._calls.clock()):
                self._refuse(group, StoreFull("no room: the store is full", missing=0))
            else:
                self._refuse(group, BackendError("no room: an earlier delete failed"))

    def shed(self, nbytes: int) -> None:
        """Drop waiting writes, the oldest first, until they hold ``nbytes`` less."""
        while nbytes > 0 and self._waiting:
            group = self._next()
            nbytes -= group.view_nbytes
            self._spend(-group.stored_nbytes)
            self._index.remove(group.keys)
            self._calls.give_up(group.keys, self._health.writes)
            self._release(group)
            self._health.report(EventKind.REJECTED, group.keys, why="it waited for a store that is too slow")

    def _next(self) -> _Group:
        group = self._waiting.popleft()
        self.waiting_nbytes -= group.view_nbytes
        self._table.waiting_nbytes -= group.stored_nbytes
        return group

    def _begin(self, group: _Group) -> None:
        self._begun += 1
        self.begun_nbytes += group.view_nbytes
        rounds = self._table.limit.rounds
        self._calls.submit(
            group.keys,
            self._health.writes,
            lambda: write_frames(self._backend, group.codec, group.frames),
            lambda call: self._ended(group, call, rounds),
        )

    def _ended(self, group: _Group, call: Call, rounds: int) -> None:
        """A call has returned the size of each frame in the store, or the error that prevented storing it."""
        self._begun -= 1
        self.begun_nbytes -= group.view_nbytes
        for key, stored in zip(group.keys, call.value or [call.error] * len(group.frames), strict=True):
            if isinstance(stored, int):
                self._table.replaced(key)
                self._index.resident.resize(key, stored)
                continue
            self._index.remove([key])
            if call.error is None:
                self._health.report(EventKind.IO_ERROR, [key], why=str(stored))
        if written := [key for key in group.keys if key in self._index]:
            nbytes = self._table.nbytes(written)
            self._health.report(EventKind.WRITTEN, written, nbytes=nbytes, seconds=call.seconds)
            self._spend(nbytes - len(written) * group.codec.max_frame_nbytes)
            self._table.limit.took(rounds)
        self._release(group)
        if isinstance(call.error, StoreFull):
            self._is_full(call.error, rounds)

    def _refuse(self, group: _Group, error: BackendError) -> None:
        """A write cannot begin for lack of space."""
        self._spend(-group.stored_nbytes)
        self._index.remove(group.keys)
        self._calls.fail(group.keys, self._health.writes, error)
        self._release(group)

    def _spend(self, nbytes: int) -> None:
        """Charge the write budget: a write counts from the moment it is queued, and also if it fails later."""
        if self._index.budget:
            self._index.budget.spend(nbytes)

    def _release(self, group: _Group) -> None:
        self._deletes.delete_invalidated(group.keys)
        group.release(group.keys)

    def _is_full(self, error: StoreFull, rounds: int) -> None:
        """Write less for a while: the store is full although the tier is below its capacity."""
        now = self._calls.clock()
        if self._backend.shared:  # frames that this tier has forgotten are still there
            return self._table.limit.close(now)
        self._table.limit.full(self._table.stored_nbytes, error.missing, now, rounds)
        self._deletes.make_room()
        self._deletes.evict_excess("the store is full")


def write_frames(backend: Backend, codec: FrameCodec, offers: Sequence[FrameWrite]) -> list[int | BackendError]:
    """Encode and write frames, on a thread; returns for each its size in the store, or the error of its write.

    Leftovers of failed writes are deleted from a private store, if possible. Raises errors of the store as a whole.
    """
    keys = [offer.key for offer in offers]
    frames = [codec.encode(offer.key, offer.view, offer.salt) for offer in offers]
    try:
        errors = backend.write(keys, frames)
    except BaseException:
        _remove_leftovers(backend, keys)
        raise
    errors = as_many([None] * len(keys) if errors is None else errors, keys)
    stored = [len(frame) if error is None else error for frame, error in zip(frames, errors, strict=True)]
    failed = [key for key, error in zip(keys, errors, strict=True) if error is not None]
    if not failed:  # a thread of the backend may still read what failed
        codec.written(frames)
    _remove_leftovers(backend, failed)
    return stored


def _remove_leftovers(backend: Backend, keys: Sequence[ChunkKey]) -> None:
    """Delete frames that were written before the failure: the index does not count them."""
    if keys and not backend.shared:  # in a shared store they may be frames of other engines
        with contextlib.suppress(BackendError):
            backend.delete(keys)
