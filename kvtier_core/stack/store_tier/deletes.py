"""Deletes evicted, damaged and invalidated frames. Each stays indexed until its delete has completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier_core.stack.store_tier.calls import Call, Calls
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.types import ChunkKey, EventKind

#: Maximum of frames that one call deletes, so that deleting a whole tier, at an epoch, keeps within the call timeout.
_BATCH = 256
#: The same for a call that may overwrite them.
_ERASED_AT_ONCE = 16
#: Seconds before a failed delete is retried: the first time, and the most after doubling each time.
_FIRST_RETRY, _LAST_RETRY = 5.0, 60.0


class Deletes:
    """The deletes of one store tier. Nothing is ever deleted from a shared store: only the index forgets frames."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self._table = calls.table
        self._index = calls.table.index
        self._health = calls.health
        self._backend = calls.backend
        self.condemned: set[ChunkKey] = set()  #: frames to erase, not only to delete
        self._quarantined = 1  # number of quarantine calls that ended; one stands for all before this tier was opened
        self._swept = 0  # of them, those whose frames are erased
        self._pause = _FIRST_RETRY  # until the retry after the next one
        self._next_retry = 0.0

    def evict(self, victims: Sequence[ChunkKey], why: str) -> None:
        """Evict these frames. None is in use."""
        if self._backend.shared:
            self._index.remove(victims, evicted=True)
            self._table.invalidated.difference_update(victims)
            return
        at_once = _BATCH if self.condemned.isdisjoint(victims) else _ERASED_AT_ONCE
        for at in range(0, len(victims), at_once):
            self._evict(victims[at : at + at_once], why)

    def _evict(self, victims: Sequence[ChunkKey], why: str) -> None:
        nbytes = self._table.nbytes(victims)
        self._delete(
            victims,
            self._backend.delete,
            lambda seconds: self._health.report(EventKind.EVICTED, victims, nbytes=nbytes, why=why, seconds=seconds),
        )

    def make_room(self) -> None:
        """Delete incompatible frames until the resident ones fit."""
        self.evict(self._table.take_incompatible(), "it cannot be read here")

    def evict_excess(self, why: str) -> None:
        """Evict the frames beyond the capacity."""
        self.evict(self._table.excess(), why)

    def discard(self, missing: Sequence[ChunkKey], corrupt: Sequence[ChunkKey]) -> None:
        """Delete remains of ``missing`` frames, and quarantine ``corrupt`` ones."""
        if self._backend.shared:
            self._index.remove([*missing, *corrupt])
            return self._quarantine_shared(corrupt)
        self._table.invalidated.update(missing, corrupt)  # deleted later if it fails now
        self._delete(missing, self._backend.delete)
        self._delete(corrupt, self._backend.quarantine, lambda seconds: self._quarantine_ended())

    def invalidate(self, keys: Iterable[ChunkKey]) -> None:
        """Never find these frames again. Those in use are deleted when their calls return."""
        self._table.invalidated.update(keys)
        self.delete_invalidated([key for key in self._table.invalidated if key not in self._table.in_use])

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        """The same, and let the store ensure that their bytes, and those of damaged frames, cannot be read again."""
        self.condemned.update(keys)
        self.invalidate(keys)
        quarantined = self._quarantined

        def swept(call: Call) -> None:
            if call.error is None:
                self._swept = max(self._swept, quarantined)

        if self.keeps_damaged:
            self._calls.run([], Use.DELETING, self._health.writes, lambda: self._backend.erase([]), swept)

    @property
    def keeps_damaged(self) -> bool:
        """May the store have damaged frames in quarantine?"""
        return self._swept < self._quarantined

    def delete_invalidated(self, keys: Sequence[ChunkKey]) -> None:
        """Delete the invalidated ones of ``keys``, which are no longer in use."""
        invalidated = [key for key in keys if key in self._table.invalidated]
        present = [key for key in invalidated if key in self._index]
        gone = set(invalidated) - set(present)
        self._table.invalidated.difference_update(gone)
        self.condemned.difference_update(gone)
        self.evict(present, "invalidated")

    def retry(self) -> None:
        """Retry failed deletes when they are due, in a fixed order.

        Each frame has its own call, so that one that can never be deleted does not block the others. The breaker has
        already counted the failure.
        """
        now = self._calls.clock()
        if not self._health.writes.allows(now) or now < self._next_retry:
            return
        if not self._table.invalidated:
            self._pause = _FIRST_RETRY
            return
        self._next_retry, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY)
        for key in sorted(self._table.invalidated.difference(self._table.in_use)):
            if key in self._index:
                self._delete([key], self._backend.delete, again=True)
            else:
                self._table.invalidated.discard(key)

    def _quarantine_ended(self) -> None:
        self._quarantined += 1

    def _quarantine_shared(self, keys: Sequence[ChunkKey]) -> None:
        """Tell a shared store to replace these frames at their next write. If that fails, they stay as they are."""
        if keys:
            writes = self._health.writes
            self._calls.run(keys, Use.QUARANTINING, writes, lambda: self._backend.quarantine(keys), lambda call: None)

    def _delete(
        self,
        keys: Sequence[ChunkKey],
        delete: Callable[[Sequence[ChunkKey]], None],
        then: Callable[[float], None] = lambda seconds: None,
        *,
        again: bool = False,
    ) -> None:
        """Remove frames from the store, then the index. With ``again`` a failure is neither counted nor reported."""
        if not keys:
            return
        nbytes = self._table.nbytes(keys)
        self._table.leaving_nbytes += nbytes
        self._index.detach(keys)
        if not self.condemned.isdisjoint(keys):
            delete = self._backend.erase

        def deleted(call: Call) -> None:
            self._table.leaving_nbytes -= nbytes
            if call.error is not None:
                self._next_retry = max(self._next_retry, self._calls.clock() + _FIRST_RETRY)
                return
            self._table.invalidated.difference_update(keys)
            self.condemned.difference_update(keys)
            self._index.remove(keys, evicted=True)
            then(call.seconds)

        breaker = None if again else self._health.writes
        self._calls.run(keys, Use.DELETING, breaker, lambda: delete(keys), deleted)
