"""Deletes frames that are evicted, damaged or invalidated. Each stays indexed until its delete has completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier_core.stack.store_tier.calls import StoreCalls, StoreParts
from kvtier_core.stack.store_tier.keys_in_use import Use
from kvtier_core.transfer.io_pool import Outcome
from kvtier_core.types import ChunkKey, EventKind

#: Frames that one call deletes, so that no call for a whole tier, at an epoch, takes longer than a call may.
_BATCH = 256
#: Seconds before a failed delete is retried: at first, and at most after doubling each time.
_FIRST_RETRY, _LAST_RETRY = 5.0, 60.0

_Delete = Callable[[Sequence[ChunkKey]], None]


class InvalidatedKeys(set[ChunkKey]):
    """A set that also knows when to retry deletes. ``now`` is in seconds, of any clock."""

    def __init__(self) -> None:
        super().__init__()
        self._pause = _FIRST_RETRY
        self._next = 0.0

    def failed(self, now: float) -> None:
        """Deleting some of them failed."""
        self._next = max(self._next, now + _FIRST_RETRY)

    def due(self, now: float) -> list[ChunkKey]:
        """The keys whose delete is to be retried now, in a fixed order."""
        if now < self._next:
            return []
        if not self:
            self._pause = _FIRST_RETRY
            return []
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY)
        return sorted(self)


class Deletes(StoreCalls):
    """The deletes of one store tier. From a shared store nothing is ever deleted: only the index forgets it."""

    def __init__(self, parts: StoreParts, *, landed: Callable[[], None]):
        """``landed`` is called when a delete has ended, whether it succeeded or not."""
        super().__init__(parts)
        self.invalidated = InvalidatedKeys()
        self._landed = landed

    def evict(self, victims: Sequence[ChunkKey], why: str) -> None:
        """Evict these frames, none of which is in use."""
        if self._backend.shared:
            self._index.remove(victims, evicted=True)
            self.invalidated.difference_update(victims)
            return
        for at in range(0, len(victims), _BATCH):
            self._evict(victims[at : at + _BATCH], why)

    def _evict(self, victims: Sequence[ChunkKey], why: str) -> None:
        nbytes = sum(map(self._index.held.nbytes, victims))
        self._delete(
            victims,
            self._backend.delete,
            lambda seconds: self._health.report(EventKind.EVICTED, victims, nbytes=nbytes, why=why, seconds=seconds),
        )

    def evict_incompatible(self, nbytes: int) -> None:
        """Delete frames that this tier cannot read until ``nbytes`` more are free, as far as there are any."""
        frames = self._space.incompatible.take(nbytes)
        for key, taken in frames.items():
            self._index.admit([key], [None], taken)
        self.evict(list(frames), "it cannot be read here")

    def discard(self, missing: Sequence[ChunkKey], corrupt: Sequence[ChunkKey]) -> None:
        """Delete what may be left of ``missing`` frames, and quarantine ``corrupt`` ones."""
        if self._backend.shared:
            self._index.remove([*missing, *corrupt])
            return self._quarantine_shared(corrupt)
        self.invalidated.update(missing, corrupt)  # so that they are deleted later if it fails now
        self._delete(missing, self._backend.delete)
        self._delete(corrupt, self._backend.quarantine)

    def invalidate(self, keys: Iterable[ChunkKey]) -> None:
        """Never find these frames again. Those in use are deleted when their calls have returned."""
        self.invalidated.update(keys)
        self.delete_invalidated([key for key in self.invalidated if key not in self._in_use])

    def delete_invalidated(self, keys: Sequence[ChunkKey]) -> None:
        """Delete those of ``keys`` that are invalidated and no longer in use."""
        invalidated = [key for key in keys if key in self.invalidated]
        present = [key for key in invalidated if key in self._index]
        self.invalidated.difference_update(set(invalidated) - set(present))
        self.evict(present, "invalidated")

    def retry(self) -> None:
        """Retry the deletes that failed.

        Each frame by itself, so that one that can never be deleted does not block the others. The breaker has counted
        the failure already.
        """
        if not self._health.writes.allows(self._clock()):
            return
        for key in self.invalidated.due(self._clock()):
            if key in self._in_use:
                continue
            if key in self._index:
                self._delete([key], self._backend.delete, again=True)
            else:
                self.invalidated.discard(key)

    def _quarantine_shared(self, keys: Sequence[ChunkKey]) -> None:
        """Tell a shared store to replace these frames at their next write. If that fails, they stay as they are."""
        if not keys:
            return
        self._in_use.begin(keys, Use.QUARANTINING)
        self._health.begin(self._health.writes)

        def told(outcome: Outcome) -> None:
            for key in keys:
                del self._in_use[key]
            self._health.record_outcome(self._health.writes, keys, outcome)

        self._pool.submit_store(lambda: self._backend.quarantine(keys), told)

    def _delete(
        self,
        keys: Sequence[ChunkKey],
        delete: _Delete,
        then: Callable[[float], None] = lambda seconds: None,
        *,
        again: bool = False,
    ) -> None:
        """Remove frames from store and index, in this order. ``again``: a failure is neither counted nor reported."""
        if not keys:
            return
        nbytes = sum(map(self._index.held.nbytes, keys))
        self._space.leaving_nbytes += nbytes
        self._index.detach(keys)
        self._in_use.begin(keys, Use.DELETING)
        if not again:
            self._health.begin(self._health.writes)

        def deleted(outcome: Outcome) -> None:
            self._space.leaving_nbytes -= nbytes
            for key in keys:
                del self._in_use[key]
            if outcome.error is None:
                self.invalidated.difference_update(keys)
                self._index.remove(keys, evicted=True)
            else:
                self.invalidated.failed(self._clock())
            if not again:
                self._health.record_outcome(self._health.writes, keys, outcome)
            if outcome.error is None:
                then(outcome.value.seconds)
            self._landed()

        self._pool.submit_store(self._timed(lambda: delete(keys)), deleted)
