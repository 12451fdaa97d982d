"""Frames that the engine's workers read directly, without a slot, and that are leased until they are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import SupportsDirectReads
from kvtier_core.stack.batches import as_many
from kvtier_core.stack.load_choice import StoreSpeed
from kvtier_core.stack.store_tier.calls import Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.stack.store_tier.reads import Reads
from kvtier_core.types import ChunkKey, EventKind, FrameRead, Location, ReadStatus
from kvtier_core.work.io_pool import run


@attrs.define
class _Lease:
    """The frames of one holder."""

    keys: list[ChunkKey] = attrs.field(factory=list)
    loading: Sequence[ChunkKey] = ()  #: those that the workers are reading
    begun: float = 0.0


class DirectReads:
    """The leased frames of one store tier.

    The key of a leased frame is in use, like one that a call names: its tier neither deletes nor replaces the frame.
    """

    def __init__(self, calls: Calls, *, deletes: Deletes, reads: Reads, speed: StoreSpeed):
        self.leased_nbytes = 0  #: of leased frames, counted once per holder
        self._calls = calls
        self._table = calls.table
        self._health = calls.health
        self._deletes = deletes
        self._reads = reads
        self._speed = speed
        self._by_holder: dict[str, _Lease] = {}
        self._holders: Counter[ChunkKey] = Counter()  # of each leased key
        self._unusable: dict[ChunkKey, ReadStatus] = {}  # leased keys whose frames failed verification

    def lease(self, keys: Sequence[ChunkKey], holder: str) -> list[Location]:
        """Lease as many leading frames as possible, until the holder is released; returns their locations.

        The holder has none of them yet.
        """
        backend = self._calls.backend
        assert isinstance(backend, SupportsDirectReads), "the tier is not direct"
        located = run(lambda: as_many(backend.locate(keys), keys))
        if located.error is not None:
            self._health.report(EventKind.IO_ERROR, keys, why=f"{type(located.error).__name__}: {located.error}")
            return []
        locations = list(located.value)
        if None in locations:
            del locations[locations.index(None) :]
            if (lost := keys[len(locations)]) not in self._holders:
                self._health.report(EventKind.MISSING, [lost], why="the store does not have it")
                self._reads.drop({**dict.fromkeys(ReadStatus, ()), ReadStatus.MISSING: [lost]})
        if not locations:
            return []
        leased = list(keys[: len(locations)])
        self._table.begin([key for key in leased if key not in self._holders], Use.DIRECT_READ)
        self._holders.update(leased)
        self._by_holder.setdefault(holder, _Lease()).keys += leased
        self.leased_nbytes += self._table.nbytes(leased)
        return locations

    def reading(self, holder: str) -> Sequence[ChunkKey]:
        """The frames of the holder that the workers are reading."""
        lease = self._by_holder.get(holder)
        return lease.loading if lease else ()

    def begin(self, keys: Sequence[ChunkKey], holder: str) -> None:
        """The workers begin to read these frames, which are leased to the holder, and no others. `end` follows."""
        if not keys:
            return
        lease = self._by_holder[holder]
        lease.loading = keys
        lease.begun = self._calls.clock()
        self._health.reads.begin(lease.begun)
        self._speed.begin(1, lease.begun)

    def end(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        """All workers have finished the reads of the last `begin`, if any.

        ``unread`` holds those of them that some worker could not use, and why. If not ``ok``, others may not have been
        read at all.
        """
        lease = self._by_holder.get(holder)
        if lease is None or not lease.loading:
            return
        now, nbytes = self._calls.clock(), self._table.nbytes(lease.loading)
        self._speed.end(nbytes if ok else 0, now)
        if ok:
            self._health.report(EventKind.READ, lease.loading, nbytes=nbytes, seconds=now - lease.begun)
        failed = [key for key in lease.loading if key in unread and unread[key].status is ReadStatus.IO_ERROR]
        error = BackendError(unread[failed[0]].why) if failed else None
        if ok or unread:
            self._health.record(self._health.reads, failed or lease.loading, error)
        else:  # not the store's fault
            self._health.reads.give_up()
        for key in lease.loading:
            if key in unread and unread[key].status is not ReadStatus.IO_ERROR and key not in self._unusable:
                self._unusable[key] = unread[key].status
                self._table.invalidated.add(key)  # no lookup finds it from now on
                if (event := unread[key].status.event) is not None:
                    self._health.report(event, [key], why=unread[key].why)
        lease.loading = ()

    def release(self, holder: str) -> None:
        """End the holder's leases. Does nothing if it has none. Reads that have not ended count as given up."""
        self.end(holder, {}, ok=False)
        lease = self._by_holder.pop(holder, None)
        if lease is None:
            return
        self.leased_nbytes -= self._table.nbytes(lease.keys)
        self._holders.subtract(lease.keys)
        free = [key for key in lease.keys if not self._holders[key]]
        for key in free:
            del self._holders[key]
        self._table.end(free)
        unusable: dict[ReadStatus, list[ChunkKey]] = {status: [] for status in ReadStatus}
        for key in free:
            if key in self._unusable:
                unusable[self._unusable.pop(key)].append(key)
                self._table.invalidated.discard(key)
        self._reads.drop(unusable)
        self._deletes.delete_invalidated([key for key in free if key not in self._table.in_use])
