"""Frames on their way from a store into arena slots: read in groups, verified on the threads, sorted by outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier_core.frames.codec import FrameCodec
from kvtier_core.stack.batches import in_groups
from kvtier_core.stack.outcomes import ReadStatus
from kvtier_core.stack.store_tier.calls import StoreCalls, StoreParts, Timed
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_io import read_frames
from kvtier_core.stack.store_tier.keys_in_use import Use
from kvtier_core.stack.store_tier.remote_lookup.lookup_queue import LookupQueue
from kvtier_core.stack.store_tier.remote_lookup.speed import StoreSpeed
from kvtier_core.transfer.io_pool import Outcome
from kvtier_core.types import ChunkKey, EventKind

#: ``arrived(good, bad)``: the views of ``good`` hold verified frames.
Arrived = Callable[[Sequence[ChunkKey], Sequence[ChunkKey]], None]

_Read = tuple[ChunkKey, memoryview]


class Reads(StoreCalls):
    """The reads of one store tier."""

    def __init__(self, parts: StoreParts, *, deletes: Deletes, lookup_queue: LookupQueue, speed: StoreSpeed):
        super().__init__(parts)
        self.inflight_nbytes = 0  #: of slots that reads in flight fill
        self._deletes = deletes
        self._lookup_queue = lookup_queue
        self._speed = speed

    def begin(
        self, wanted: Sequence[_Read], codec: FrameCodec, arrived: Arrived, salts: Mapping[ChunkKey, bytes]
    ) -> None:
        """Begin to fill views with verified raw frames. ``salts`` has those of the chunks whose requests have one.

        ``arrived(good, bad)`` is called once for each group; each of its keys is in one of the two.
        """
        if not wanted:
            return
        self._in_use.begin([key for key, _ in wanted], Use.READING)
        self._health.begin(self._health.reads)
        self.inflight_nbytes += sum(len(view) for _, view in wanted)
        groups = list(in_groups(wanted, lambda pair: len(pair[1])))
        self._speed.begin(len(groups), self._clock())
        for group in groups:
            self._pool.submit_load(
                self._timed(lambda group=group: read_frames(self._backend, codec, group, salts)),
                lambda outcome, group=group: self._arrive(group, arrived, outcome),
            )

    def _arrive(self, wanted: Sequence[_Read], arrived: Arrived, outcome: Outcome) -> None:
        keys = [key for key, _ in wanted]
        nbytes = sum(len(view) for _, view in wanted)
        self.inflight_nbytes -= nbytes
        now = self._clock()
        call = outcome.value or Timed([None] * len(keys), now, now)  # None: unknown, the frame stays indexed
        self._speed.end(nbytes if outcome.error is None else 0, call.ended)
        found: dict[ReadStatus, list[ChunkKey]] = {status: [] for status in ReadStatus}
        stored = 0  # bytes that the frames take in the store
        for key, read in zip(keys, call.value, strict=True):
            del self._in_use[key]
            if read is None or key in self._deletes.invalidated:
                continue
            found[read.status].append(key)
            stored += read.nbytes
            if read.status.event is not None:
                self._health.report(read.status.event, [key], why=read.why)
        if verified := found[ReadStatus.VERIFIED]:
            self._health.report(EventKind.READ, verified, nbytes=stored, seconds=call.seconds)
        self._health.record_outcome(self._health.reads, keys, outcome)
        self._deletes.delete_invalidated(keys)
        self._forget_incompatible(found[ReadStatus.INCOMPATIBLE])
        if self._backend.shared:
            self._lookup_queue.unusable(found[ReadStatus.CORRUPT])
            self._lookup_queue.not_there([*found[ReadStatus.MISSING], *found[ReadStatus.IO_ERROR]])
            self._index.remove(found[ReadStatus.IO_ERROR])
        self._deletes.discard(found[ReadStatus.MISSING], found[ReadStatus.CORRUPT])
        good = set(verified)
        arrived(verified, [key for key in keys if key not in good])

    def _forget_incompatible(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames of another codec from the index. They stay in the store, for an engine that can read them."""
        if self._backend.shared:
            self._lookup_queue.unusable(keys)
        else:
            self._space.incompatible.add(keys, self._index.held.nbytes)
        self._index.remove(keys)
