"""Jobs of a mover whose pages are on a device: two streams for each direction, ordered by events. No thread waits.

    engine's stream   … forward ──● store() ……… forward ………………… fence() ○ forward (overwrites the pages)
    stores, kernels               └─○ gather ──●─────────────────────────┘
    stores, bus                                └─○ to the slots ──● finished() reports it
    loads, bus                      from the slots ──●
    loads, kernels                                   └─○ scatter ──● finished() reports it; the engine computes on it

● an event is recorded, ○ a stream waits for it. The host only queries events, in `finished`. If copy engines copy the
pages, the kernels' stream waits for the bus.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import NO_BLOCK, JobResult, Mover, PagedKVCache, PageList
from kvtier_core.transfer.cuda.checksums import MOST_PACKED, PendingChecksums, Told
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.library import Direction
from kvtier_core.transfer.page_lists import CheckedJob, check_job
from kvtier_core.work.io_pool import run

_POLL = 5e-5  # seconds

logger = logging.getLogger("kvtier")


class Locked(Protocol):
    """The page-locked memory: this rank's shards of an arena's slots, or all slots, from the first one on."""

    base: int  #: address of the first piece
    stride: int  #: bytes from one piece to the next; 0: nothing need be locked
    end: int  #: address up to which every piece is locked

    def facts(self) -> Mapping[str, str]:
        """How much is page-locked, in plain words."""


@attrs.frozen
class ArenaSlots:
    """The contiguous slots of an arena, as a worker has mapped them."""

    address: int
    count: int
    nbytes: int  #: of a slot
    locked: Locked

    @property
    def usable(self) -> int:
        """Number of leading slots that the device can access. A copy to others would block the host."""
        return (self.locked.end - self.address) // self.nbytes


@attrs.frozen
class _Job:
    pages: Any  #: an event after all access to pages
    done: Any  #: an event after all copies
    number: int
    enqueued: bool = True  #: were all copies enqueued?
    whole: bool = True  #: do they cover the whole job?
    places: Sequence[int] = ()  #: for a store: the indices in the job of the slots that it fills
    #: The blocks that a store reads, of all groups together, and NO_BLOCK. A load may wait for another group's store
    #: because of it, which only costs time.
    read: frozenset[int] = frozenset()
    checksums: PendingChecksums | None = None

    def end(self, *, ok: bool) -> JobResult:
        """The device has finished the job, or failed."""
        ok = ok and self.enqueued
        told = self.checksums.end(ok=ok) if self.checksums else Told()
        if ok and self.whole and not told.flagged:
            return JobResult(self.number, True, told.checksums)
        filled = [place for number, place in enumerate(self.places) if ok and number not in told.flagged]
        return JobResult(self.number, False, filled=tuple(filled))


class DeviceMover(Mover):
    """Copies between pages of ``cache`` and ``slots`` through ``copiers``, one for each part of a chunk. See
    `open_mover`.

    ``engine`` is torch's module for the device; ``release`` frees everything and is called once; ``facts`` are reported
    with those of the copiers. Every method is called on the thread that enqueues the engine's work; or only `mark`, if
    another single thread calls the others and its loads always have a mark. Only `wait` and `close` wait for the
    device. Addresses are raw: a job with a wrong block id or slot raises ContractError before any of it is copied. A
    store fills only the slots that are page-locked already; a load of others fails. The same holds for packed shards
    without memory for their flags.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        slots: ArenaSlots,
        copiers: Sequence[Copier],
        engine: Any,
        stores: Direction,
        loads: Direction,
        release: Callable[[], object] = lambda: None,
        facts: Mapping[str, str] | None = None,
    ):
        self._cache = cache
        self._slots = slots
        self._copiers = copiers
        self._engine = engine
        self._stores, self._loads = stores, loads
        self._release = release
        self._facts = facts or {}
        self._device = torch.device(cache.device)
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._closed = False

    def mark(self) -> Any:
        event = self._engine.Event()
        event.record(self._engine.current_stream(self._device))
        return event

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        checked = self._checked(job, pages, slots)
        copier, usable = self._copiers[checked.part.number], self._slots.usable
        packed = copier.checksums.packed
        places = [place for place, slot in enumerate(checked.slots) if slot < usable]
        places = places[:MOST_PACKED] if packed else places
        whole = len(places) == len(checked.slots)
        if not whole:
            checked = checked.only(places)
        read = frozenset(checked.blocks)
        self._stores.kernels.wait_event(self.mark())
        gathered, stored = self._engine.Event(), self._engine.Event()
        # The device does not know the bytes of a slot where no page is wanted. In packed shards they are zeros.
        checksums = copier.checksums.begin(checked.slots) if packed or (whole and NO_BLOCK not in read) else None
        if slots and not (checksums if packed else places):
            self._results.append(JobResult(job, ok=False))
            return
        gather = functools.partial(copier.gather, sums=checksums.sums if checksums else None)
        begun = _Job(gathered, stored, job, True, whole, places, read, checksums)
        self._enqueue(begun, gather, checked, self._stores, self._stores.bus)

    def load(self, job: int, slots: Sequence[int], pages: PageList, after: Any = None) -> None:
        checked = self._checked(job, pages, slots)
        copier = self._copiers[checked.part.number]
        usable, packed = max(checked.slots, default=-1) < self._slots.usable, copier.checksums.packed
        self._loads.kernels.wait_event(after or self.mark())
        for other in self._jobs.values():
            if not other.read.isdisjoint(checked.blocks):
                self._loads.kernels.wait_event(other.pages)
        done = self._engine.Event()
        checksums = copier.checksums.begin_load() if packed and usable else None
        if not (checksums if packed else usable):
            self._results.append(JobResult(job, ok=False))
            return
        scatter = functools.partial(copier.scatter, sums=checksums.sums if checksums else None)
        self._enqueue(_Job(done, done, job, checksums=checksums), scatter, checked, self._loads, self._loads.kernels)

    def finished(self) -> Sequence[JobResult]:
        for job, begun in list(self._jobs.items()):
            outcome = run(functools.partial(_has_occurred, begun.done))
            if outcome.error is not None or outcome.value:
                del self._jobs[job]
                self._results.append(begun.end(ok=outcome.error is None))
        results, self._results = self._results, []
        return results

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        asked = [functools.partial(_has_occurred, self._jobs[job].done) for job in jobs if job in self._jobs]
        while not all(run(each).value is not False for each in asked) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def fence(self, jobs: Collection[int]) -> None:
        engine = self._engine.current_stream(self._device)
        for job in jobs:
            if job in self._jobs:
                engine.wait_event(self._jobs[job].pages)

    def facts(self) -> Mapping[str, str]:
        facts = dict(self._facts)
        for copier in self._copiers:
            facts.update(copier.facts())
        return {**facts, **self._slots.locked.facts()}

    def close(self) -> None:
        if self._closed:
            return
        self.wait(list(self._jobs))
        self._results = list(self.finished())
        self._closed = True
        self._release()

    def _enqueue(
        self,
        job: _Job,
        copy: Callable[[array[int], array[int], Direction], None],
        checked: CheckedJob,
        through: Direction,
        last: Any,
    ) -> None:
        """Enqueue the copies of a job, of which ``last`` is the last stream. From here on the job has begun.

        If that fails, perhaps half-way, the job fails when the enqueued copies have ended.
        """
        enqueued = run(lambda: copy(array("i", checked.blocks), array("i", checked.slots), through))
        recorded = run(lambda: (job.pages.record(through.kernels), job.done.record(last)))
        for outcome in (enqueued, recorded):
            if outcome.error is not None:
                logger.warning("kvtier: cannot enqueue copies: %s", outcome.error)
        if recorded.error is None:
            self._jobs[job.number] = attrs.evolve(job, enqueued=enqueued.error is None)
            return
        for stream in (through.kernels, through.bus):
            run(stream.synchronize)  # a device that refuses this, too, is lost
        self._results.append(job.end(ok=False))

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> CheckedJob:
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._closed:
            raise ContractError("the mover is closed")
        return check_job(self._cache, self._slots.count, pages, slots)


def _has_occurred(event: Any) -> bool:
    """Raises an exception if the device has failed."""
    asked = run(event.query)
    if asked.error is not None:  # that shows nothing about the copy, which may still write
        event.synchronize()
    return asked.error is not None or asked.value
