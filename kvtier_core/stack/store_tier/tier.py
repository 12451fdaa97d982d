"""A tier below the arenas: an index of the frames in a backend, and the guards around it."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvtier_core.errors import BackendError, ContractError, StoreFull
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.format import Damage
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many, in_groups, leading
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.breaker import Breaker
from kvtier_core.stack.store_tier.capacity_limit import CapacityLimit
from kvtier_core.stack.store_tier.frame_io import FrameWrite, read_frames, write_frames
from kvtier_core.stack.store_tier.invalidated import InvalidatedKeys
from kvtier_core.stack.store_tier.lookup_queue import LookupQueue
from kvtier_core.stack.store_tier.policy_state import PolicyState
from kvtier_core.transfer.io_pool import Outcome, Pool, run_within
from kvtier_core.types import ChunkKey, Event, EventKind, Namespace, Usage

#: A call that takes longer, in seconds, hangs: until it comes back nobody else shall wait for this store.
_PATIENCE = 10.0


class _Busy(enum.Enum):
    """What a thread is doing with a key. No two calls in flight name the same key."""

    WRITING = 1
    READING = 2
    LEAVING = 3  # stays indexed until its delete lands


Release = Callable[[ChunkKey], None]
Arrived = Callable[[Sequence[ChunkKey], Sequence[ChunkKey]], None]


class StoreTier:
    """Every method on the owner's thread. Nothing a backend does raises here: it becomes an Event."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        pool: Pool,
        index: CacheIndex,
        codec: FrameCodec,
        capacity: int,
        inflight: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name = name
        self.backend = backend
        self.pool = pool
        self.index = index
        self.capacity = capacity
        self.events: list[Event] = []
        self._codec = codec
        self._inflight_limit = inflight
        self._inflight = 0  # bytes of arena slots that calls in flight hold
        self._clock = clock
        self._waiting: deque[tuple[list[FrameWrite], Release]] = deque()  # writes, until their victims are gone
        self._waiting_nbytes = 0  # of what is admitted, and so in ``residents.used``, but not begun
        self._leaving_nbytes = 0  # of what is still in ``residents.used``, and being deleted
        self._busy: dict[ChunkKey, _Busy] = {}
        self._invalidated = InvalidatedKeys()
        self._ceiling = CapacityLimit(capacity)
        self._reads = Breaker()
        self._writes = Breaker()
        self._hangs = False
        self._inquiries = LookupQueue(clock)
        self._memo = PolicyState(backend, index, codec.namespace, capacity)
        self._recover()

    # -- what is here ------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage(self.name, len(self.index), self.index.used, self.capacity, inflight=self._inflight)

    def readable(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Of how many, from ``start`` on, could a read begin now, before the first of which it could not?"""
        if self._hangs or not self._reads.allows(self._clock()):
            return 0
        run = self.index.held.run(keys, start)
        in_use = (i for i in range(run) if keys[start + i] in self._busy or keys[start + i] in self._invalidated)
        return next(in_use, run)

    def has(self, key: ChunkKey) -> bool:
        return self.readable([key]) == 1

    def writable(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of which a write would be considered now."""
        now = self._clock()
        if self._inflight >= self._inflight_limit or self._hangs or not self._writes.allows(now):
            return []
        if not self._ceiling.open(now):
            return []
        return [key for key in self.index.held.missing(keys) if key not in self._busy]

    def would_admit(self, path: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of a path, root first, that are wanted and preferred to whoever would leave for them."""
        return self._plan_admission(self.index.meets_frequency(self.writable(path)), spared=path)[0]

    def request_lookup(self, key: ChunkKey) -> bool:
        """May a key that is not in the index be in the store all the same? Then it is asked in `poll`."""
        if not self.backend.shared or self._hangs or key in self.index or not self._reads.allows(self._clock()):
            return False
        return self._inquiries.note(key)

    def poll(self) -> None:
        """Ask what `wonder` noted, delete again what could not be deleted before, keep what the policy learned."""
        now = self._clock()
        self._look_for_hangs()
        if self._writes.allows(now):
            self._delete_again([key for key in self._invalidated.due(now) if key not in self._busy])
        if self._memo.due(now) and self._writes.allows(now) and not self._hangs:
            self._memo.keep_by(self.pool, now, lambda outcome: self._record_outcome(self._writes, [], outcome))
        keys = [key for key in self._inquiries.take() if key not in self._busy]
        if not keys or not self._reads.allows(now):
            return
        self._begin(self._reads, keys, _Busy.READING)
        self.pool.submit_load(
            lambda: as_many(self.backend.contains(keys), keys), lambda outcome: self._on_contains(keys, outcome)
        )

    def _look_for_hangs(self) -> None:
        hangs = self.pool.longest() > _PATIENCE
        if hangs and not self._hangs:
            self._report(EventKind.BREAKER_OPEN, [], why=f"until a call comes back that has taken {_PATIENCE:g}s")
        elif self._hangs and not hangs:
            self._report(EventKind.BREAKER_CLOSED, [])
        self._hangs = hangs

    # -- frames going down -------------------------------------------------------------------------

    def write(self, offers: Sequence[FrameWrite], release: Release) -> None:
        """Store frames of one path, root first. ``release(key)`` for each, once, when its view is free again."""
        wanted = set(self.writable([offer.key for offer in offers]))
        fresh = [offer for offer in offers if offer.key in wanted]
        accepted = leading(fresh, self._inflight_limit - self._inflight, lambda offer: len(offer.view))
        welcome, victims = self._plan_admission(
            [offer.key for offer in accepted], spared=[offer.parent for offer in accepted]
        )
        accepted = accepted[: len(welcome)]
        self.index.admit(welcome, [offer.parent for offer in accepted], self._codec.bound)

        taken = {offer.key for offer in accepted}
        turned_away = [offer for offer in offers if offer.key not in taken]
        if refused := [offer.key for offer in turned_away if offer.key not in self.index]:
            self._report(EventKind.REJECTED, refused)
        for offer in turned_away:
            release(offer.key)
        if accepted:
            self._begin(self._writes, taken, _Busy.WRITING)
            self._inflight += sum(len(offer.view) for offer in accepted)
            self._waiting.extend((group, release) for group in in_groups(accepted, lambda offer: len(offer.view)))
            self._waiting_nbytes += len(accepted) * self._codec.bound
            self._evict(victims)
            self._start_writes()

    def _plan_admission(
        self, path: Sequence[ChunkKey], spared: Sequence[ChunkKey | None]
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Who may come in, and who leaves for them. Changes nothing."""
        return self.index.plan_admission(
            path, self._codec.bound, self._room, self.index.held.nbytes, spared=(self._busy, set(spared))
        )

    @property
    def _room(self) -> int:
        """Bytes that will be free when those who are leaving are gone."""
        return self._allowed - self.index.used + self._leaving_nbytes

    @property
    def _allowed(self) -> int:
        """Bytes that all frames together may take now."""
        return self._ceiling.at(self._clock()) - self._memo.nbytes

    def _beyond_room(self) -> list[ChunkKey]:
        """Who must leave because there is less room than what is here takes."""
        return self.index.select_victims(-self._room, self.index.held.nbytes, spared=(self._busy,))

    def _evict(self, victims: Sequence[ChunkKey]) -> None:
        nbytes = sum(map(self.index.held.nbytes, victims))
        self._remove(victims, self.backend.delete, lambda: self._report(EventKind.EVICTED, victims, nbytes=nbytes))

    def _remove(
        self,
        keys: Sequence[ChunkKey],
        remove: Callable[[Sequence[ChunkKey]], None],
        then: Callable[[], None] = lambda: None,
        *,
        again: bool = False,
    ) -> None:
        """Take frames out of the store, and then out of the index. What failed before does so unnoticed."""
        if not keys:
            return
        nbytes = sum(map(self.index.held.nbytes, keys))
        self._leaving_nbytes += nbytes
        self.index.leave(keys)
        self._begin(None if again else self._writes, keys, _Busy.LEAVING)

        def gone(outcome: Outcome) -> None:
            self._leaving_nbytes -= nbytes
            for key in keys:
                del self._busy[key]
            if outcome.error is None:
                self._invalidated.difference_update(keys)
                self.index.remove(keys, evicted=True)
            else:
                self._invalidated.failed(self._clock())
            if not again:
                self._record_outcome(self._writes, keys, outcome)
            if outcome.error is None:
                then()
            self._start_writes()

        self.pool.submit_store(lambda: remove(keys), gone)

    def _start_writes(self) -> None:
        """Begin those that there is room for: the bytes of a newcomer never lie beside those of its victim."""
        while self._waiting:
            group, release = self._waiting[0]
            nbytes = len(group) * self._codec.bound
            fits = self.index.used - self._waiting_nbytes + nbytes <= self._allowed
            if not fits and self._leaving_nbytes:
                return
            self._waiting.popleft()
            self._waiting_nbytes -= nbytes
            if fits:
                self.pool.submit_store(
                    lambda group=group: write_frames(self.backend, self._codec, group),
                    lambda outcome, group=group, release=release: self._written(group, release, outcome),
                )
            elif self._ceiling.lowered(self._clock()):
                self._written(group, release, Outcome(error=StoreFull("no room: the store is full", missing=0)))
            else:
                self._written(group, release, Outcome(error=BackendError("no room: a delete before it failed")))

    def _written(self, offers: Sequence[FrameWrite], release: Release, outcome: Outcome) -> None:
        keys = [offer.key for offer in offers]
        for i, offer in enumerate(offers):
            self._inflight -= len(offer.view)
            if outcome.error is None:
                self.index.resize(offer.key, outcome.value[i])
            else:
                self.index.remove([offer.key])
            self._settle(offer.key)
            release(offer.key)
        if isinstance(outcome.error, StoreFull):
            self._make_do(outcome.error.missing)
        self._record_outcome(self._writes, keys, outcome)
        if outcome.error is None:
            self._report(EventKind.WRITTEN, keys, nbytes=sum(outcome.value))

    def _make_do(self, missing: int) -> None:
        """The store is full before the tier is: keep less for a while."""
        self._ceiling.full(self.index.used - self._waiting_nbytes + self._memo.nbytes, missing, self._clock())
        self._evict(self._beyond_room())

    # -- frames coming up --------------------------------------------------------------------------

    def may_read(self, view_nbytes: int) -> int:
        """How many views of so many bytes further calls may hold now."""
        return max(0, self._inflight_limit - self._inflight) // view_nbytes

    def read(self, wanted: Sequence[tuple[ChunkKey, memoryview]], arrived: Arrived) -> list[ChunkKey]:
        """Begin to fill views with verified raw frames; the keys for which it began.

        ``arrived(good, bad)`` is called once per group, later; each begun key is in one of the two.
        """
        room = self._inflight_limit - self._inflight
        begun = leading([pair for pair in wanted if self.has(pair[0])], room, lambda pair: len(pair[1]))
        if begun:
            self._begin(self._reads, [key for key, _ in begun], _Busy.READING)
        self._inflight += sum(len(view) for _, view in begun)
        for group in in_groups(begun, lambda pair: len(pair[1])):
            self.pool.submit_load(
                lambda group=group: read_frames(self.backend, self._codec, group),
                lambda outcome, group=group: self._arrive(group, arrived, outcome),
            )
        return [key for key, _ in begun]

    def _arrive(self, wanted: Sequence[tuple[ChunkKey, memoryview]], arrived: Arrived, outcome: Outcome) -> None:
        keys = [key for key, _ in wanted]
        self._inflight -= sum(len(view) for _, view in wanted)
        verdicts = outcome.value or [None] * len(keys)  # None: nothing is known, the frames stay indexed
        good: dict[ChunkKey, None] = {}
        lost, damaged = [], []
        for key, verdict in zip(keys, verdicts, strict=True):
            del self._busy[key]
            if key in self._invalidated:
                continue  # by `renew`: whatever was read, nobody wants it
            if verdict is True:
                good[key] = None
            elif verdict is False:
                lost.append(key)
                self._report(EventKind.MISSING, [key])
            elif verdict is not None:
                damaged.append(key)
                why = verdict.value if isinstance(verdict, Damage) else str(verdict)
                self._report(EventKind.CORRUPT, [key], why=why)
        self._record_outcome(self._reads, keys, outcome)
        self._delete_invalidated([key for key in keys if key in self._invalidated])
        if self.backend.shared:
            self.index.remove(lost)
            lost = []
        self._invalidated.update(lost, damaged)  # and deleted later, should it fail now
        self._remove(lost, self.backend.delete)  # a part of it may be left
        self._remove(damaged, self.backend.quarantine)
        arrived(list(good), [key for key in keys if key not in good])

    # -- endings -----------------------------------------------------------------------------------

    def invalidate_all(self, namespace: Namespace) -> None:
        """Never find any of these frames again. What is in use is deleted as soon as it is not."""
        self._codec = self._codec.of(namespace)
        self._invalidated.update(self.index.held)
        self._delete_invalidated([key for key in self._invalidated if key not in self._busy])

    def close(self, timeout: float) -> bool:
        """False if a call still hangs after ``timeout`` seconds; then the backend is left alone."""
        if not self.pool.close(timeout):
            return False
        return run_within(self._close, timeout) is not None

    def _close(self) -> None:
        try:
            self._memo.keep()
        finally:
            self.backend.close()

    def _settle(self, key: ChunkKey) -> None:
        """A thread is done with a key; if it was doomed meanwhile, it goes now."""
        del self._busy[key]
        if key in self._invalidated:
            if key in self.index:
                self._delete_invalidated([key])
            else:
                self._invalidated.discard(key)

    def _delete_invalidated(self, keys: Sequence[ChunkKey]) -> None:
        present = [key for key in keys if key in self.index]
        self._invalidated.difference_update(set(keys) - set(present))
        self._evict(present)

    def _delete_again(self, keys: Sequence[ChunkKey]) -> None:
        """Each by itself: one that can never be deleted keeps no other, and the breaker was told of it once."""
        for key in keys:
            if key in self.index:
                self._remove([key], self.backend.delete, again=True)
            else:
                self._invalidated.discard(key)

    def _recover(self) -> None:
        """What survived a restart, oldest first. What the capacity cannot hold leaves."""
        self._memo.recall()
        for key, nbytes in self.backend.scan():
            if key != self._memo.key and key not in self.index:
                self.index.admit([key], [None], nbytes)
        self._evict(self._beyond_room())

    # -- small print -------------------------------------------------------------------------------

    def _on_contains(self, keys: Sequence[ChunkKey], outcome: Outcome) -> None:
        for key in keys:
            del self._busy[key]
        self._record_outcome(self._reads, keys, outcome)
        answers = dict(zip(keys, outcome.value or [False] * len(keys), strict=True))
        self._inquiries.not_there(key for key in keys if not answers[key])
        found = self.index.held.missing([key for key in keys if answers[key]])
        self.index.admit(found, [None] * len(found), self._codec.bound)
        self.index.remove(self._beyond_room())  # only from the index: the frame may be another's

    def _begin(self, breaker: Breaker | None, keys: Iterable[ChunkKey], busy: _Busy) -> None:
        for key in keys:
            if key in self._busy:
                raise ContractError(f"{self.name}: two calls would name the same key")
            self._busy[key] = busy
        if breaker is not None:
            breaker.begin(self._clock())

    def _record_outcome(self, breaker: Breaker, keys: Sequence[ChunkKey], outcome: Outcome) -> None:
        """Tell the breaker how a call went, and everyone else if that changed something. A full store is no failure."""
        if outcome.error is not None:
            self._report(EventKind.IO_ERROR, keys, why=f"{type(outcome.error).__name__}: {outcome.error}")
        if outcome.error is None or isinstance(outcome.error, StoreFull):
            if breaker.succeed():
                self._report(EventKind.BREAKER_CLOSED, [])
        elif breaker.fail(self._clock()):
            self._report(EventKind.BREAKER_OPEN, [], why=f"for {breaker.rest:g}s")

    def _report(self, kind: EventKind, keys: Sequence[ChunkKey], *, nbytes: int = 0, why: str = "") -> None:
        self.events.append(Event(kind, self.name, tuple(keys), nbytes, why))
