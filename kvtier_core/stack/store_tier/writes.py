"""Writes frames to a store. Each write waits until its victims are deleted, so that capacity is never exceeded."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many, in_groups
from kvtier_core.stack.store_tier.calls import Call, Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.types import ChunkKey, EventKind

#: Called once for each frame, when its view is no longer used.
Release = Callable[[ChunkKey], None]


@attrs.frozen
class FrameWrite:
    """A sealed raw frame in an arena's slot that is offered to a store."""

    key: ChunkKey
    parent: ChunkKey | None
    view: memoryview
    salt: bytes = b""  #: of the requests that the chunk belongs to


@attrs.frozen(eq=False)
class _Group:
    """Frames that are written by one call."""

    frames: Sequence[FrameWrite]
    codec: FrameCodec  #: the one of the namespace to which their keys belong
    release: Release

    @property
    def keys(self) -> list[ChunkKey]:
        return [frame.key for frame in self.frames]

    @property
    def view_nbytes(self) -> int:
        """Bytes of the arena's slots that it holds."""
        return sum(len(frame.view) for frame in self.frames)

    @property
    def stored_nbytes(self) -> int:
        """The most bytes that it can take in the store."""
        return len(self.frames) * self.codec.max_frame_nbytes


class Writes:
    """The writes of one store tier.

    At most ``concurrent`` calls are under way, so that threads are left for reads; the other groups wait here, oldest
    first, and can still be shed.
    """

    def __init__(self, calls: Calls, *, deletes: Deletes, concurrent: int):
        self.waiting_nbytes = 0  #: of views that waiting writes hold
        self.begun_nbytes = 0  #: of views that writes under way hold
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
        """Evict ``victims``, then write ``frames`` of one path, root first.

        The codec is the current one: a namespace that comes later does not change what is written under these keys.
        """
        keys = [frame.key for frame in frames]
        self._index.admit(keys, [frame.parent for frame in frames], codec.max_frame_nbytes)
        for group in in_groups(frames, lambda frame: len(frame.view)):
            waiting = _Group(group, codec, release)
            self._calls.begin(waiting.keys, Use.WRITING, self._health.writes)
            self._waiting.append(waiting)
            self.waiting_nbytes += waiting.view_nbytes
            self._table.waiting_nbytes += waiting.stored_nbytes
        self._deletes.evict(victims, "for room")
        self._deletes.make_room()
        self.start()

    def start(self) -> None:
        """Begin the writes that fit into the capacity now."""
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
        """Drop the writes that have waited longest, until they hold ``nbytes`` less. Those under way go on."""
        while nbytes > 0 and self._waiting:
            group = self._next()
            nbytes -= group.view_nbytes
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
        self._calls.submit(
            group.keys,
            self._health.writes,
            lambda: write_frames(self._backend, group.codec, group.frames),
            lambda call: self._ended(group, call),
        )

    def _ended(self, group: _Group, call: Call) -> None:
        """A call has returned: with the bytes that each frame takes, or with the error for which it was not stored."""
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
        self._release(group)
        self._is_full(call.error)

    def _refuse(self, group: _Group, error: BackendError) -> None:
        """A write cannot begin for lack of space."""
        self._index.remove(group.keys)
        self._calls.fail(group.keys, self._health.writes, error)
        self._release(group)
        self._is_full(error)

    def _release(self, group: _Group) -> None:
        self._deletes.delete_invalidated(group.keys)
        for key in group.keys:
            group.release(key)

    def _is_full(self, error: BaseException | None) -> None:
        """Write less for a while if the store is full although the tier is below its capacity."""
        if not isinstance(error, StoreFull):
            return
        now = self._calls.clock()
        if self._backend.shared:  # what this tier has forgotten still lies there
            return self._table.limit.close(now)
        self._table.limit.full(self._table.stored_nbytes, error.missing, now)
        self._deletes.make_room()
        self._deletes.evict_excess("the store is full")


def write_frames(backend: Backend, codec: FrameCodec, offers: Sequence[FrameWrite]) -> list[int | BackendError]:
    """Encode and write frames, on a thread; returns for each the bytes that it takes in the store, or why it was not
    stored.

    What was not stored is not left in a store that is not shared, as far as it can be deleted. Raises the errors of the
    store as a whole.
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
    """Some may have been written before the failure, and the index does not count them."""
    if keys and not backend.shared:  # otherwise they may be frames of other engines
        with contextlib.suppress(BackendError):
            backend.delete(keys)
