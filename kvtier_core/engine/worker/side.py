"""The worker side: it knows pages and slots, but no keys."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import attrs

from kvtier_core.config.attach import attach, attach_reader
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.config.server_client import server_client
from kvtier_core.engine.messages import StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.starvation import Starvation
from kvtier_core.engine.worker.audit import difference
from kvtier_core.engine.worker.self_test import LayerCaches, try_copies
from kvtier_core.errors import Unanswered
from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import DirectReader, Mover, PagedKVCache
from kvtier_core.layouts import ChunkLayout
from kvtier_core.telemetry.log_limit import LogLimit
from kvtier_core.types import Slot, StoredFrame
from kvtier_core.work.io_pool import run

logger = logging.getLogger("kvtier")

#: Seconds that a step which computes nothing waits for loads. Without the wait the engine would immediately step again
#: and take the GIL from the thread that copies.
_IDLE_WAIT = 2e-3

#: The engine's pages as this rank has them, for a layout of its chunks.
Pages = Callable[[ChunkLayout], PagedKVCache]


class _Load(NamedTuple):
    request: str


class _Store(NamedTuple):
    job: int


class _Audit(NamedTuple):
    number: int


#: A transfer of a plan.
_Task = _Load | _Store | _Audit


class _Job(NamedTuple):
    """The share of one mover or reader in a task: it copies one part of some chunks."""

    task: _Task
    source: int | str  #: the arena or the store tier of its slots
    places: Sequence[int]  #: of its slots in the transfer


@attrs.define
class _Begun:
    """A task under way."""

    slots: int
    jobs: int  #: that have not ended
    checksums: dict[int, int] = attrs.field(factory=dict)  #: of a store's shards, by place in the transfer
    empty: set[int] = attrs.field(factory=set)  #: places in the transfer of slots that were not filled


class Weights(Protocol):
    """The weights that this worker computes with."""

    def changed(self) -> str:
        """How they visibly differ from those of the last `renew`; empty if they do not."""

    def renew(self) -> None:
        """From now on compare with the weights as they are now."""


class WorkerSide(ProcessBound):
    """Carries out step plans through one mover per arena. A transfer that cannot be carried out has failed.

    Call every method on the thread that enqueues the engine's forwards.
    """

    def __init__(
        self,
        arenas: Sequence[ArenaTierConfig],
        rank: int,
        pages: Pages,
        caches: Sequence[LayerCaches],
        *,
        stores: Sequence[StoreTierConfig] = (),
        fence_at_once: bool = False,
        weights: Weights | None = None,
    ):
        """``caches`` are the engine's own tensors, for the self-test; ``pages`` has their places in memory.

        Without ``arenas`` the plans name a server, which has the tiers. They also name the ``stores`` that this worker
        reads directly. ``weights`` are those of the first epoch.

        ``fence_at_once``: the engine may overwrite blocks in a step before it calls `fence`, so its next operation
        waits for each store as soon as that has begun.
        """
        self._arenas = arenas
        self._stores = stores
        self._rank = rank
        self._pages = pages
        self._caches = caches
        self._fence_at_once = fence_at_once
        self._layout: ChunkLayout | None = None  # that of the first plan
        self._movers: list[Mover | None] = []
        self._readers: dict[str, DirectReader] = {}  # by the name of the store tier
        self._marks: dict[int | str, object] = {}  # by arena or store tier: the mark that the loads of this step follow
        self._jobs: dict[int, _Job] = {}  # by number
        self._begun: dict[_Task, _Begun] = {}
        self._ended: set[str] = set()  # requests whose load has ended, not reported yet
        self._failed: set[str] = set()  # requests whose load has failed, whether it has ended or not
        self._compared: dict[_Audit, bool] = {}  # was its slot copied?
        self._report = WorkerProgress()  # the next one
        self._attachment: int | None = None  # of the plan whose arenas and store tiers are attached
        self._last_job = 0
        self._suspended = False
        self._weights = weights
        self._epoch = 0  # of the last plan
        self._stale = False  # has this epoch ended, because the weights have changed?
        self._log = LogLimit(time.monotonic)
        self._starvation = Starvation(f"rank {rank}")

    def suspend(self) -> None:
        """Wait for the copies under way, and touch no page until `resume`."""
        self._suspended = True
        self._wait(_Store, math.inf)
        self._wait(_Load, math.inf)

    def resume(self) -> None:
        """Allow copies again after `suspend`."""
        self._suspended = False

    def attach(self, plan: StepPlan) -> None:
        """Attach the arenas that the plan names and run the self-test. If it fails, no arena is used.

        Once for each attachment, and only after the copies of the previous one have ended: a later plan repeats it.
        """
        if plan.attachment == self._attachment or plan.layout is None or self._suspended or self._jobs:
            return
        self.close()
        self._layout, self._attachment = plan.layout, plan.attachment
        outcome = run(partial(self._attach, plan, plan.layout))
        problem = outcome.value if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        if outcome.error is not None and isinstance(outcome.error.__cause__, Unanswered):  # in an error of the tier
            self._report.unanswered.add(plan.attachment)
        self._report.self_tests[plan.attachment, problem and f"rank {self._rank}: {problem}"] += 1
        if problem:
            self.close()
            self._movers = [None] * len(plan.arenas)

    def _attach(self, plan: StepPlan, layout: ChunkLayout) -> str:
        """The fault that the self-test found; empty if there is none."""
        table = self._pages(layout)
        arenas = self._arenas
        if not arenas:
            client = server_client()
            arenas = [client.served_tier(handle) for handle in plan.arenas]
        for number, (tier, handle) in enumerate(zip(arenas, plan.arenas, strict=True)):
            mover = attach(tier, handle, table)
            self._movers.append(mover)
            self._log_facts(f"arena {tier.name}", mover.facts())
            slots = [slot.index for slot in plan.self_test_slots if slot.arena == number]
            own = slots[self._rank % layout.replicas :: layout.replicas]  # one for each part
            if wrong := try_copies(mover, table, self._caches, own):
                return f"arena {tier.name}: {wrong}"
        for name, handle in plan.reader_handles.items():
            outcome = run(partial(self._reader, name, handle, table))
            if outcome.error is not None:
                self._report.no_readers[name] = f"rank {self._rank}: {outcome.error}"
                continue
            reader = self._readers[name] = outcome.value
            self._log_facts(name, reader.facts())
            for mover in reader.movers:
                if wrong := try_copies(mover, table, self._caches, range(len(layout.parts))):
                    return f"{name}: {wrong}"
        return ""

    def _reader(self, name: str, handle: str, table: PagedKVCache) -> DirectReader:
        """A reader of a store tier. Raises ConfigError if this worker cannot read it directly."""
        tier = next((tier for tier in self._stores if tier.name == name), None)
        if tier is None:
            tier, handle = server_client().served_store(name, handle)
        return attach_reader(tier, handle, table)

    def _log_facts(self, of: str, facts: Mapping[str, str]) -> None:
        for fact in facts.items():
            logger.info("kvtier: rank %d: %s: %s: %s", self._rank, of, *fact)

    def watch_weights(self, plan: StepPlan) -> None:
        """Compare the weights with those of the plan's epoch, if KV moves. Call it when a step begins.

        If they have changed, nothing is stored or loaded before a plan of another epoch. Loads of an earlier epoch that
        are not reported yet have failed.
        """
        if self._suspended:
            return
        loads = self._ended.union(task.request for task in self._begun if isinstance(task, _Load))
        if plan.epoch != self._epoch:
            self._epoch, self._stale = plan.epoch, False
            if self._weights:
                self._weights.renew()
            self._failed.update(loads)
            return
        moves_kv = loads or plan.loads or plan.stores or plan.audits
        if moves_kv and self._weights and not self._stale and (how := self._weights.changed()):
            self._stale = True
            self._report.changed[plan.epoch] = f"rank {self._rank}: {how}"
            self._failed.update(loads)

    def load(self, plan: StepPlan, *, idle: bool) -> None:
        """Begin the plan's loads. In an ``idle`` step, which computes nothing, wait briefly for those under way."""
        for request_id, transfer in plan.loads:
            self._begin(_Load(request_id), transfer, plan)
        self._marks = {}
        if idle:
            self._wait(_Load, _IDLE_WAIT)
        self._failed.update(plan.failed_loads)
        self._ended.update(plan.failed_loads)

    def store(self, plan: StepPlan) -> None:
        """Begin the plan's stores, after the forward. `fence` keeps later forwards from overwriting their pages.

        Among ranks that hold the same bytes, only the first one stores them. The plan's audits are over on return.
        """
        for job, transfer in plan.stores:
            if self._stale or self._layout is None or self._layout.stores(self._rank):
                self._begin(_Store(job), transfer, plan)
            else:
                self._report.ended[job] += 1
        if self._fence_at_once:
            self._fence(job for job, _ in plan.stores)
        for number, transfer in plan.audits:
            found = run(partial(self._audit, _Audit(number), transfer, plan))
            if found.error is not None:
                self._log.log(logging.WARNING, "audit failed", str(number), str(found.error))
            self._report.audits[number, found.value] += 1

    def _audit(self, task: _Audit, transfer: Transfer, plan: StepPlan) -> str | None:
        """The difference between computed pages and a slot, as `difference`."""

        def load() -> bool:
            self._begin(task, transfer, plan)
            self._wait(_Audit, math.inf)
            self._collect()
            return self._compared.pop(task)

        if self._layout is None:
            return None
        return difference(self._caches, self._pages(self._layout).blocks, transfer.pages[0], load)

    def fence(self, plan: StepPlan) -> None:
        """Before the forward: make it wait for the stores that still read pages which it may overwrite.

        A mover orders its loads only after its own stores: stores whose pages another mover or reader may fill in this
        step are fenced too.
        """
        filling = {_source(slot) for _, transfer in plan.loads for slot in transfer.slots}
        others = (job.task for job in self._jobs.values() if filling - {job.source})
        self._fence([*plan.stores_to_fence, *(task.job for task in others if isinstance(task, _Store))])

    def mark(self) -> None:
        """After `fence` of every worker side of these pages, and before the forward: the step's loads begin here.

        They need not wait for the forward, which touches none of their pages.
        """
        of_arenas = {number: mover.mark() for number, mover in enumerate(self._movers) if mover is not None}
        self._marks = of_arenas | {name: reader.mark() for name, reader in self._readers.items()}

    def _fence(self, stores: Iterable[int]) -> None:
        to_fence = {_Store(job) for job in stores}
        if jobs := {number for number, job in self._jobs.items() if job.task in to_fence}:
            for mover in self._movers:
                if mover is not None:
                    mover.fence(jobs)

    def loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them whose load failed."""
        self._collect()
        ended, self._ended = self._ended, set()
        failed = ended & self._failed
        self._failed -= failed
        return ended, failed

    def progress(self) -> WorkerProgress | None:
        """The progress since the last call, except the ends of loads; None if there is none."""
        self._collect()
        report, self._report = self._report, WorkerProgress()
        return None if report == self._report else report

    def close(self) -> None:
        """Close the movers and the files. May be called twice."""
        self._log.flush(now=True)
        for reader in self._readers.values():
            reader.close()
        for mover in self._movers:  # last: closing them tells a server that this worker touches nothing any more
            if mover is not None:
                mover.close()
        self._movers, self._readers = [], {}

    def _wait(self, kind: type[_Task], timeout: float) -> None:
        """Wait for the jobs of one direction, at most ``timeout`` seconds in each arena."""
        jobs = {number for number, job in self._jobs.items() if isinstance(job.task, kind)}
        for mover in (*self._movers, *self._readers.values()):
            if mover is not None and jobs:
                mover.wait(jobs, timeout)

    def _begin(self, task: _Task, transfer: Transfer, plan: StepPlan) -> None:
        if self._stale or plan.attachment != self._attachment:
            return self._note_end(task, ok=False)
        jobs: dict[tuple[int | str, tuple[bool, ...]], list[int]] = {}
        for place, (slot, pages) in enumerate(zip(transfer.slots, transfer.pages, strict=True)):
            jobs.setdefault((_source(slot), tuple(map(bool, pages))), []).append(place)
        self._begun[task] = _Begun(len(transfer.slots), len(jobs))
        for (source, _), places in jobs.items():
            job = _Job(task, source, places)
            self._submit(job, self._copy_of(job, transfer))

    def _copy_of(self, job: _Job, transfer: Transfer) -> Callable[[int], None] | None:
        """What begins the job's copy under a number; None if no mover or reader is there for it."""
        slots = [transfer.slots[place] for place in job.places]
        pages = [transfer.pages[place] for place in job.places]
        after = self._marks.get(job.source)
        if isinstance(job.source, str):
            reader = self._readers.get(job.source)
            if reader is None or isinstance(job.task, _Store):
                return None
            frames = [slot for slot in slots if isinstance(slot, StoredFrame)]
            return lambda number: reader.load(number, frames, pages, after)
        mover = self._movers[job.source] if job.source < len(self._movers) else None
        if mover is None:
            return None
        numbers = [slot.index for slot in slots if not isinstance(slot, StoredFrame)]
        if isinstance(job.task, _Store):
            return lambda number: mover.store(number, pages, numbers)
        return lambda number: mover.load(number, numbers, pages, after)

    def _submit(self, job: _Job, begin: Callable[[int], None] | None) -> None:
        if begin is None or self._suspended:
            return self._end(job, ok=False)
        self._last_job += 1
        number = self._last_job
        self._jobs[number] = job
        outcome = run(partial(begin, number))
        if outcome.error is not None:
            what, of = type(job.task).__name__.strip("_").lower(), str(job.task[0])
            self._log.log(logging.WARNING, f"{what} failed", of, str(outcome.error))
            del self._jobs[number]
            self._end(job, ok=False)

    def _collect(self) -> None:
        """Process the jobs that the movers have finished."""
        self._log.flush()
        self._starvation.look()
        for mover in self._movers:
            for number, ok, checksums, filled in mover.finished() if mover is not None else ():
                job = self._jobs.pop(number)
                self._begun[job.task].checksums.update(zip(job.places, checksums, strict=False))
                self._end(job, ok=ok, filled=filled)
        for reader in self._readers.values():
            for number, ok, unread in reader.finished():
                job = self._jobs.pop(number)
                if unread and isinstance(job.task, _Load):
                    self._report.unread.setdefault(job.task.request, {}).update(unread)
                self._end(job, ok=ok)

    def _end(self, job: _Job, *, ok: bool, filled: Sequence[int] = ()) -> None:
        """One of the jobs of a task has ended. If it failed, ``filled`` are the slots that a store filled nevertheless.

        The chunks of a store before the first empty slot are good. Those after it could not be reached.
        """
        task, begun = job.task, self._begun[job.task]
        begun.jobs -= 1
        if not ok:
            begun.empty.update(set(job.places).difference(job.places[number] for number in filled))
        if begun.jobs:
            return
        del self._begun[task]
        if not isinstance(task, _Store):
            return self._note_end(task, ok=not begun.empty)
        self._note_end(task, ok=True)
        if begun.empty:
            self._report.filled[task.job] = min(begun.empty)
        if self._layout is not None and len(begun.checksums) == begun.slots:
            checksums = (begun.checksums[place] for place in range(begun.slots))
            self._report.checksums[task.job, self._rank // self._layout.replicas] = tuple(checksums)

    def _note_end(self, task: _Task, *, ok: bool) -> None:
        if isinstance(task, _Load):
            self._ended.add(task.request)
            if not ok:
                self._failed.add(task.request)
        elif isinstance(task, _Audit):
            self._compared[task] = ok
        else:
            self._report.ended[task.job] += 1
            if not ok:
                self._report.failed[task.job] += 1


def _source(slot: Slot | StoredFrame) -> int | str:
    """The arena or the store tier that a load of it reads."""
    return slot.tier if isinstance(slot, StoredFrame) else slot.arena
