"""Frames that the engine's workers read by themselves, without a slot: held where they lie until nobody reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.stack.batches import as_many
from kvtier_core.stack.outcomes import FrameRead, ReadStatus
from kvtier_core.stack.store_tier.calls import Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.stack.store_tier.load_choice import StoreSpeed
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import ChunkKey, EventKind, Extent


@attrs.define
class _Held:
    """What one holder holds."""

    keys: list[ChunkKey] = attrs.field(factory=list)
    loading: Sequence[ChunkKey] = ()  #: what the workers read of it now
    begun: float = 0.0


class Landings:
    """The frames of one store tier that are held.

    A frame that is held is a key in use, as one that a call names: nothing deletes or replaces it.
    """

    def __init__(self, calls: Calls, *, deletes: Deletes, speed: StoreSpeed):
        self.held_nbytes = 0  #: of frames that are held: of one with several holders as often
        self._calls = calls
        self._table = calls.table
        self._health = calls.health
        self._deletes = deletes
        self._speed = speed
        self._by_holder: dict[str, _Held] = {}
        self._holders: Counter[ChunkKey] = Counter()  # of each key that is held
        self._unusable: dict[ChunkKey, ReadStatus] = {}  # of those: what failed verification

    def hold(self, keys: Sequence[ChunkKey], holder: str) -> list[Extent]:
        """Where the leading frames of these lie, which stay there until the holder is released.

        The holder has none of them yet.
        """
        located = run(lambda: as_many(self._calls.backend.locate(keys), keys))
        if located.error is not None:
            self._health.report(EventKind.IO_ERROR, keys, why=f"{type(located.error).__name__}: {located.error}")
            return []
        extents = list(located.value)
        if None in extents:
            del extents[extents.index(None) :]
            self._lost(keys[len(extents)])
        if not extents:
            return []
        held = list(keys[: len(extents)])
        self._table.begin([key for key in held if key not in self._holders], Use.LANDING)
        self._holders.update(held)
        self._by_holder.setdefault(holder, _Held()).keys += held
        self.held_nbytes += self._table.nbytes(held)
        return extents

    def begin(self, keys: Sequence[ChunkKey], holder: str) -> None:
        """The workers begin to read these, which the holder holds. `end` follows."""
        if not keys:
            return
        held = self._by_holder[holder]
        held.loading, held.begun = keys, self._calls.clock()
        self._health.reads.begin(held.begun)
        self._speed.begin(1, held.begun)

    def end(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        """All workers have ended what `begin` began, if it began anything.

        ``unread`` are frames that one of them could not use, and why. Not ``ok``: others may not have been read at all.
        """
        held = self._by_holder.get(holder)
        if held is None or not held.loading:
            return
        now, nbytes = self._calls.clock(), self._table.nbytes(held.loading)
        self._speed.end(nbytes if ok else 0, now)
        if ok:
            self._health.report(EventKind.READ, held.loading, nbytes=nbytes, seconds=now - held.begun)
        failed = [key for key in held.loading if key in unread and unread[key].status is ReadStatus.IO_ERROR]
        error = BackendError(unread[failed[0]].why) if failed else None
        self._health.record(self._health.reads, failed or held.loading, error)
        for key in held.loading:
            if key in unread and unread[key].status is not ReadStatus.IO_ERROR and key not in self._unusable:
                self._unusable[key] = unread[key].status
                self._table.invalidated.add(key)  # nobody finds it from now on
                self._health.report(unread[key].status.event, [key], why=unread[key].why)
        held.loading = ()

    def release(self, holder: str) -> None:
        """The holder needs its frames no more. Nothing happens if it has none."""
        held = self._by_holder.pop(holder, None)
        if held is None:
            return
        self.held_nbytes -= self._table.nbytes(held.keys)
        self._holders.subtract(held.keys)
        free = [key for key in held.keys if not self._holders[key]]
        for key in free:
            del self._holders[key]
        self._table.end(free)
        unusable: dict[ReadStatus, list[ChunkKey]] = {status: [] for status in ReadStatus}
        for key in free:
            if key in self._unusable:
                unusable[self._unusable.pop(key)].append(key)
        if incompatible := unusable[ReadStatus.INCOMPATIBLE]:
            self._table.invalidated.difference_update(incompatible)
            self._table.make_incompatible(incompatible)
        self._deletes.discard(unusable[ReadStatus.MISSING], unusable[ReadStatus.CORRUPT])
        self._deletes.delete_invalidated([key for key in free if key not in self._table.in_use])

    def _lost(self, key: ChunkKey) -> None:
        if key not in self._holders:
            self._health.report(EventKind.MISSING, [key], why="the store has no place of it")
            self._deletes.discard([key], [])
