"""Writes frames to a store. Each write waits until its victims are deleted, so that capacity is never exceeded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.stack.batches import in_groups
from kvtier_core.stack.store_tier.calls import StoreCalls, StoreParts
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_io import FrameWrite, write_frames
from kvtier_core.stack.store_tier.keys_in_use import Use
from kvtier_core.transfer.io_pool import Outcome
from kvtier_core.types import ChunkKey, EventKind

#: Called once for each frame, when its view is no longer used.
Release = Callable[[ChunkKey], None]


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


class Writes(StoreCalls):
    """The writes of one store tier.

    At most ``concurrent`` calls are under way, so that threads are left for reads; the other groups wait here, oldest
    first, and can still be shed.
    """

    def __init__(self, parts: StoreParts, *, deletes: Deletes, concurrent: int):
        super().__init__(parts)
        self.waiting_nbytes = 0  #: of views that waiting writes hold
        self.begun_nbytes = 0  #: of views that writes under way hold
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
        self._in_use.begin(keys, Use.WRITING)
        for group in in_groups(frames, lambda frame: len(frame.view)):
            self._health.begin(self._health.writes)
            self._waiting.append(_Group(group, codec, release))
            self.waiting_nbytes += self._waiting[-1].view_nbytes
            self._space.waiting_nbytes += self._waiting[-1].stored_nbytes
        self._space.incompatible.begin_write(keys)
        self._deletes.evict(victims, "for room")
        self._deletes.evict_incompatible(-self._space.room)
        self.start()

    def start(self) -> None:
        """Begin the writes that fit into the capacity now."""
        while self._waiting and self._begun < self._concurrent:
            fits = self._space.fits(self._waiting[0].stored_nbytes)
            if not fits and self._space.leaving_nbytes:
                return
            group = self._next()
            if fits:
                self._begin(group)
            elif self._space.limit.lowered(self._clock()):
                self._give_up(group, StoreFull("no room: the store is full", missing=0))
            else:
                self._give_up(group, BackendError("no room: a delete before it failed"))

    def shed(self, nbytes: int) -> None:
        """Drop the writes that have waited longest, until they hold ``nbytes`` less. Those under way go on."""
        while nbytes > 0 and self._waiting:
            group = self._next()
            nbytes -= group.view_nbytes
            self._space.incompatible.end_write(group.keys, replaced=False)
            self._index.remove(group.keys)
            self._release(group)
            self._health.give_up(self._health.writes)
            self._health.report(EventKind.REJECTED, group.keys, why="it waited for a store that is too slow")

    def _next(self) -> _Group:
        group = self._waiting.popleft()
        self.waiting_nbytes -= group.view_nbytes
        self._space.waiting_nbytes -= group.stored_nbytes
        return group

    def _begin(self, group: _Group) -> None:
        self._begun += 1
        self.begun_nbytes += group.view_nbytes
        self._pool.submit_store(
            self._timed(lambda: write_frames(self._backend, group.codec, group.frames)),
            lambda outcome: self._ended(group, outcome),
        )

    def _ended(self, group: _Group, outcome: Outcome) -> None:
        """A call has returned: with the bytes that each frame takes, or with the error for which it was not stored."""
        self._begun -= 1
        self.begun_nbytes -= group.view_nbytes
        stored = outcome.value.value if outcome.value else [outcome.error] * len(group.frames)
        for frame, nbytes in zip(group.frames, stored, strict=True):
            self._space.incompatible.end_write([frame.key], replaced=isinstance(nbytes, int))
            if isinstance(nbytes, int):
                self._index.resize(frame.key, nbytes)
            else:
                self._index.remove([frame.key])
        self._release(group)
        self._report(group, stored, outcome)
        self.start()

    def _report(self, group: _Group, stored: Sequence[int | BaseException], outcome: Outcome) -> None:
        if isinstance(outcome.error, StoreFull):
            self._store_is_full(outcome.error.missing)
        self._health.record_outcome(self._health.writes, group.keys, outcome)
        pairs = list(zip(group.keys, stored, strict=True))
        if written := [key for key, nbytes in pairs if isinstance(nbytes, int)]:
            nbytes = sum(each for each in stored if isinstance(each, int))
            self._health.report(EventKind.WRITTEN, written, nbytes=nbytes, seconds=outcome.value.seconds)
        for key, error in pairs if outcome.error is None else ():
            if not isinstance(error, int):
                self._health.report(EventKind.IO_ERROR, [key], why=str(error))

    def _give_up(self, group: _Group, error: BackendError) -> None:
        """A write cannot begin for lack of space."""
        self._space.incompatible.end_write(group.keys, replaced=False)
        self._index.remove(group.keys)
        self._release(group)
        if isinstance(error, StoreFull):
            self._store_is_full(error.missing)
        self._health.record_outcome(self._health.writes, group.keys, Outcome(error=error))

    def _release(self, group: _Group) -> None:
        for frame in group.frames:
            del self._in_use[frame.key]
            self._deletes.delete_invalidated([frame.key])
            group.release(frame.key)

    def _store_is_full(self, missing: int) -> None:
        """Write less for a while: the store is full although the tier is below its capacity."""
        if self._backend.shared:  # what this tier has forgotten still lies there
            return self._space.limit.close(self._clock())
        self._space.limit.full(self._space.stored_nbytes, missing, self._clock())
        self._deletes.evict_incompatible(-self._space.room)
        self._deletes.evict(self._space.excess(self._in_use), "the store is full")
