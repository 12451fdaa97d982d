"""Writes frames to a store. Each write waits until its victims are deleted, so that capacity is never exceeded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import in_groups
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_io import FrameWrite, write_frames
from kvtier_core.stack.store_tier.health import StoreHealth
from kvtier_core.stack.store_tier.keys_in_use import KeysInUse, Use
from kvtier_core.stack.store_tier.space import Space
from kvtier_core.transfer.io_pool import Outcome, Pool
from kvtier_core.types import ChunkKey, EventKind

#: Called once for each frame, when its view is no longer used.
Release = Callable[[ChunkKey], None]

_Group = tuple[list[FrameWrite], FrameCodec, Release]


class Writes:
    """The writes of one store tier. Call every method on the owner's thread."""

    def __init__(
        self,
        backend: Backend,
        index: CacheIndex,
        *,
        pool: Pool,
        health: StoreHealth,
        space: Space,
        in_use: KeysInUse,
        deletes: Deletes,
        clock: Callable[[], float],
    ):
        self.inflight_nbytes = 0  #: of views that writes hold, waiting or under way
        self._backend = backend
        self._index = index
        self._pool = pool
        self._health = health
        self._space = space
        self._in_use = in_use
        self._deletes = deletes
        self._clock = clock
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
        self._health.begin(self._health.writes)
        self.inflight_nbytes += sum(len(frame.view) for frame in frames)
        self._waiting.extend((group, codec, release) for group in in_groups(frames, lambda frame: len(frame.view)))
        self._space.waiting_nbytes += len(frames) * codec.max_frame_nbytes
        self._space.incompatible.begin_write(keys)
        self._deletes.evict(victims)
        self._deletes.evict_incompatible(-self._space.room)
        self.start()

    def start(self) -> None:
        """Begin the writes that fit into the capacity now."""
        while self._waiting:
            group, codec, release = self._waiting[0]
            nbytes = len(group) * codec.max_frame_nbytes
            fits = self._space.fits(nbytes)
            if not fits and self._space.leaving_nbytes:
                return
            self._waiting.popleft()
            self._space.waiting_nbytes -= nbytes
            if fits:
                self._pool.submit_store(
                    lambda group=group, codec=codec: write_frames(self._backend, codec, group),
                    lambda outcome, group=group, release=release: self._written(group, release, outcome, begun=True),
                )
            elif self._space.limit.lowered(self._clock()):
                self._written(group, release, Outcome(error=StoreFull("no room: the store is full", missing=0)))
            else:
                self._written(group, release, Outcome(error=BackendError("no room: a delete before it failed")))

    def _written(
        self, frames: Sequence[FrameWrite], release: Release, outcome: Outcome, *, begun: bool = False
    ) -> None:
        """A write has ended, or could not be ``begun`` for lack of space."""
        keys = [frame.key for frame in frames]
        self._space.incompatible.end_write(keys, replaced=begun and outcome.error is None)
        for i, frame in enumerate(frames):
            self.inflight_nbytes -= len(frame.view)
            if outcome.error is None:
                self._index.resize(frame.key, outcome.value[i])
            else:
                self._index.remove([frame.key])
            del self._in_use[frame.key]
            self._deletes.delete_invalidated([frame.key])
            release(frame.key)
        if isinstance(outcome.error, StoreFull):
            self._lower_capacity(outcome.error.missing)
        self._health.record_outcome(self._health.writes, keys, outcome)
        if outcome.error is None:
            self._health.report(EventKind.WRITTEN, keys, nbytes=sum(outcome.value))

    def _lower_capacity(self, missing: int) -> None:
        """The store became full below the tier's capacity: lower the capacity for a while."""
        self._space.limit.full(self._space.stored_nbytes, missing, self._clock())
        self._deletes.evict_incompatible(-self._space.room)
        self._deletes.evict(self._space.excess(self._in_use))
