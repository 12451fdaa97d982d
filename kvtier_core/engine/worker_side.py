"""The worker side: it knows pages and slots, but no keys."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs

from kvtier_core.config.compose import attach, attach_reader
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.engine.log_limit import LogLimit
from kvtier_core.engine.messages import StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.self_test import LayerCaches, try_copies
from kvtier_core.engine.starvation import Starvation
from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import DirectReader, Mover, PagedKVCache, PageList
from kvtier_core.layouts import ChunkLayout
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import StoredFrame

logger = logging.getLogger("kvtier")

#: Seconds that a step which computes nothing waits for loads. Without the wait the engine would step again at once and
#: take the GIL from the thread that copies.
_IDLE_WAIT = 2e-3

#: The engine's pages as this rank has them, for a layout of its chunks.
Pages = Callable[[ChunkLayout], PagedKVCache]


class _Direction(enum.Enum):
    LOAD = "load"
    STORE = "store"


class _Task(NamedTuple):
    """A transfer of a plan."""

    direction: _Direction
    id: str | int  #: the request of a load, the job of a store


class _Job(NamedTuple):
    """The share of one mover in a task: it copies one part of some chunks, in one arena."""

    task: _Task
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
        """How they are seen to differ from those of the last `renew`; empty if they are not."""

    def renew(self) -> None:
        """Compare with the weights as they are now."""


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
        """``caches`` are the engine's own tensors, for the self-test; ``pages`` says where they lie.

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
        self._marks: dict[int | str, object] = {}  # by arena or store tier: what the loads of this step come after
        self._jobs: dict[int, _Job] = {}  # by number
        self._begun: dict[_Task, _Begun] = {}
        self._ended: set[str] = set()  # requests whose load has ended, not reported yet
        self._failed: set[str] = set()  # requests whose load has failed, whether it has ended or not
        self._report = WorkerProgress()  # the next one
        self._attachment: int | None = None  # of the plan that named what is attached
        self._last_job = 0
        self._suspended = False
        self._weights = weights
        self._epoch = 0  # of the last plan
        self._stale = False  # has it ended, because the weights have changed?
        self._log = LogLimit(time.monotonic)
        self._starvation = Starvation(f"rank {rank}")

    def suspend(self) -> None:
        """Wait for the copies under way, and touch no page until `resume`."""
        self._suspended = True
        self._wait(_Direction.STORE, math.inf)
        self._wait(_Direction.LOAD, math.inf)

    def resume(self) -> None:
        """Allow copies again after `suspend`."""
        self._suspended = False

    def attach(self, plan: StepPlan) -> None:
        """Attach the arenas that the plan names and run the self-test. If it fails, no arena is used.

        Once for each attachment, and not before the copies of the one before have ended: a later plan repeats it.
        """
        if plan.attachment == self._attachment or plan.layout is None or self._suspended or self._jobs:
            return
        self.close()
        self._layout, self._attachment = plan.layout, plan.attachment
        outcome = run(lambda: self._attach(plan))
        problem = outcome.value if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        self._report.self_tests[plan.attachment, problem and f"rank {self._rank}: {problem}"] += 1
        if problem:
            self.close()
            self._movers = [None] * len(plan.arenas)

    def _attach(self, plan: StepPlan) -> str:
        """The fault that the self-test found; empty if there is none."""
        table = self._pages(plan.layout)
        arenas = self._arenas
        if not arenas:
            from kvtier_core.server.memory import served_tier

            arenas = [served_tier(handle) for handle in plan.arenas]
        for number, (tier, handle) in enumerate(zip(arenas, plan.arenas, strict=True)):
            mover = attach(tier, handle, table)
            self._movers.append(mover)
            self._log_facts(f"arena {tier.name}", mover.facts())
            slots = [slot.index for slot in plan.self_test_slots if slot.arena == number]
            own = slots[self._rank % plan.layout.replicas :: plan.layout.replicas]  # one for each part
            if wrong := try_copies(mover, table, self._caches, own):
                return f"arena {tier.name}: {wrong}"
        for name, handle in plan.reader_handles.items():
            outcome = run(lambda name=name, handle=handle: self._reader(name, handle, table))
            if outcome.error is not None:
                self._report.no_readers[name] = f"rank {self._rank}: {outcome.error}"
                continue
            reader = self._readers[name] = outcome.value
            self._log_facts(name, reader.facts())
            for mover in reader.movers:
                if wrong := try_copies(mover, table, self._caches, range(len(plan.layout.parts))):
                    return f"{name}: {wrong}"
        return ""

    def _reader(self, name: str, handle: str, table: PagedKVCache) -> DirectReader:
        """A reader of a store tier. Raises ConfigError if this worker cannot read it directly."""
        tier = next((tier for tier in self._stores if tier.name == name), None)
        if tier is None:
            from kvtier_core.server.memory import served_store

            tier, handle = served_store(name, handle)
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
        loads = self._ended.union(task.id for task in self._begun if task.direction is _Direction.LOAD)
        if plan.epoch != self._epoch:
            self._epoch, self._stale = plan.epoch, False
            if self._weights:
                self._weights.renew()
            self._failed.update(loads)
            return
        moves_kv = loads or plan.loads or plan.stores
        if moves_kv and self._weights and not self._stale and (how := self._weights.changed()):
            self._stale = True
            self._report.changed[plan.epoch] = f"rank {self._rank}: {how}"
            self._failed.update(loads)

    def load(self, plan: StepPlan, *, idle: bool) -> None:
        """Begin the plan's loads. In an ``idle`` step, which computes nothing, wait briefly for those under way."""
        for request_id, transfer in plan.loads:
            self._begin(_Task(_Direction.LOAD, request_id), transfer, plan)
        self._marks = {}
        if idle:
            self._wait(_Direction.LOAD, _IDLE_WAIT)
        self._failed.update(plan.failed_loads)
        self._ended.update(plan.failed_loads)

    def store(self, plan: StepPlan) -> None:
        """Begin the plan's stores, after the forward. `fence` keeps later forwards from overwriting their pages.

        Of ranks that hold the same bytes only the first one stores them.
        """
        for job, transfer in plan.stores:
            task = _Task(_Direction.STORE, job)
            if self._stale or self._layout is None or self._layout.stores(self._rank):
                self._begin(task, transfer, plan)
            else:
                self._report.ended[job] += 1
        if self._fence_at_once:
            self._fence(job for job, _ in plan.stores)

    def fence(self, plan: StepPlan) -> None:
        """Before the forward: make it wait for the stores that still read pages which it may overwrite.

        Loads that are begun in this step need not wait for the forward, which touches none of their pages.
        """
        direct = any(isinstance(slot, StoredFrame) for _, transfer in plan.loads for slot in transfer.slots)
        # A reader does not know the movers' stores, which may still read the pages that it fills.
        under_way = [task.id for task in self._begun if task.direction is _Direction.STORE] if direct else []
        self._fence([*plan.stores_to_fence, *under_way])
        movers = {number: mover for number, mover in enumerate(self._movers) if mover is not None}
        self._marks = {source: each.mark() for source, each in (*movers.items(), *self._readers.items())}

    def _fence(self, stores: Iterable[int]) -> None:
        to_fence = {_Task(_Direction.STORE, job) for job in stores}
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
        """What has happened since the last call, but for the ends of loads; None if nothing has."""
        self._collect()
        report, self._report = self._report, WorkerProgress()
        return None if report == self._report else report

    def close(self) -> None:
        """Close the movers and the files. May be called twice."""
        self._log.flush(now=True)
        for reader in self._readers.values():
            reader.close()
        for mover in self._movers:  # the last: with them a server is told that this worker touches nothing any more
            if mover is not None:
                mover.close()
        self._movers, self._readers = [], {}

    def _wait(self, direction: _Direction, timeout: float) -> None:
        """Wait for the jobs of one direction, at most ``timeout`` seconds in each arena."""
        jobs = {number for number, job in self._jobs.items() if job.task.direction is direction}
        for mover in (*self._movers, *self._readers.values()):
            if mover is not None and jobs:
                mover.wait(jobs, timeout)

    def _begin(self, task: _Task, transfer: Transfer, plan: StepPlan) -> None:
        if self._stale or plan.attachment != self._attachment:
            return self._note_end(task, ok=False)
        jobs: dict[tuple[int | str, tuple[bool, ...]], list[int]] = {}
        for place, (slot, pages) in enumerate(zip(transfer.slots, transfer.pages, strict=True)):
            source = slot.tier if isinstance(slot, StoredFrame) else slot.arena
            jobs.setdefault((source, tuple(map(bool, pages))), []).append(place)
        self._begun[task] = _Begun(len(transfer.slots), len(jobs))
        for (source, _), places in jobs.items():
            slots = [transfer.slots[place] for place in places]
            pages = [transfer.pages[place] for place in places]
            if isinstance(source, str):
                self._submit(_Job(task, places), source, self._readers.get(source), slots, pages)
            else:
                mover = self._movers[source] if source < len(self._movers) else None
                self._submit(_Job(task, places), source, mover, [slot.index for slot in slots], pages)

    def _submit(
        self,
        job: _Job,
        source: int | str,
        mover: Mover | DirectReader | None,
        slots: Sequence[int] | Sequence[StoredFrame],
        pages: PageList,
    ) -> None:
        if mover is None or self._suspended:
            return self._end(job, ok=False)
        self._last_job += 1
        number = self._last_job
        self._jobs[number] = job
        if job.task.direction is _Direction.LOAD:
            outcome = run(lambda: mover.load(number, slots, pages, self._marks.get(source)))
        else:
            outcome = run(lambda: mover.store(number, pages, slots))
        if outcome.error is not None:
            self._log.log(logging.WARNING, f"{job.task.direction.value} failed", str(job.task.id), str(outcome.error))
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
                if unread:
                    self._report.unread.setdefault(job.task.id, {}).update(unread)
                self._end(job, ok=ok)

    def _end(self, job: _Job, *, ok: bool, filled: Sequence[int] = ()) -> None:
        """One of the jobs of a task has ended. If it failed, ``filled`` are the slots that a store filled nevertheless.

        The chunks of a store before the first empty slot are good. Those behind it could not be reached.
        """
        task, begun = job.task, self._begun[job.task]
        begun.jobs -= 1
        if not ok:
            begun.empty.update(set(job.places).difference(job.places[number] for number in filled))
        if begun.jobs:
            return
        del self._begun[task]
        is_load = task.direction is _Direction.LOAD
        self._note_end(task, ok=not (is_load and begun.empty))
        if is_load:
            return
        if begun.empty:
            self._report.filled[task.id] = min(begun.empty)
        if len(begun.checksums) == begun.slots:
            checksums = (begun.checksums[place] for place in range(begun.slots))
            self._report.checksums[task.id, self._rank // self._layout.replicas] = tuple(checksums)

    def _note_end(self, task: _Task, *, ok: bool) -> None:
        if task.direction is _Direction.LOAD:
            self._ended.add(task.id)
            if not ok:
                self._failed.add(task.id)
        else:
            self._report.ended[task.id] += 1
            if not ok:
                self._report.failed[task.id] += 1
