"""A worker's half: knows pages and slots, never keys."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from kvtier_core.config.model import ArenaTierConfig
from kvtier_core.engine.messages import Progress, StepPlan, Transfer
from kvtier_core.engine.self_test import try_copies
from kvtier_core.interfaces import Mover, PagedKVCache
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Slot

logger = logging.getLogger("vllm.kvtier")

#: Seconds. The engine would only come back at once and ask again, and take the GIL from the thread that copies.
_A_LITTLE = 2e-3

_Owner = tuple[str, str | int]  # ("load", request id) or ("store", job)


class WorkerSide:
    """Carries out plans through one mover per arena. Whatever goes wrong is a job that failed."""

    def __init__(self, arenas: Sequence[ArenaTierConfig], table: PagedKVCache, caches: Mapping[str, torch.Tensor]):
        self._arenas = arenas
        self._table = table
        self._caches = caches
        self._movers: list[Mover | None] = []
        self._owners: dict[int, _Owner] = {}  # of the movers' jobs; an arena's part of a transfer is a job
        self._parts: Counter[_Owner] = Counter()  # jobs that have not ended
        self._failed: set[_Owner] = set()
        self._sums: dict[tuple[int, int], tuple[int, ...]] = {}  # by store job of the plan, and rank
        self._ended: list[_Owner] = []
        self._tried: Counter[str] = Counter()
        self._jobs = 0
        self._away = False

    def leave_pages(self) -> None:
        """Touch no page until `return_to_pages`. Waits for the copies under way."""
        self._away = True
        self._wait("store", math.inf)
        self._wait("load", math.inf)

    def return_to_pages(self) -> None:
        self._away = False

    def attach(self, plan: StepPlan) -> None:
        """Reach the arenas that the plan names and try the copies, once. What is not as it should be is not used."""
        if self._movers or not plan.arenas or self._away:
            return
        outcome = run(lambda: self._attach(plan.arenas, plan.trial))
        problem = outcome.value if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        self._tried[problem and f"rank {self._table.rank}: {problem}"] += 1
        if problem:
            self.close()
            self._movers = [None] * len(plan.arenas)

    def _attach(self, handles: Sequence[str], trial: Sequence[Slot]) -> str:
        for tier, handle, slot in zip(self._arenas, handles, trial, strict=True):
            mover = tier.config.attach(handle, self._table)
            self._movers.append(mover)
            for fact in mover.facts().items():
                logger.info("kvtier: rank %d: arena %s: %s: %s", self._table.rank, tier.name, *fact)
            if wrong := try_copies(mover, self._table, self._caches, slot.index):
                return f"arena {tier.name}: {wrong}"
        return ""

    def load(self, plan: StepPlan, *, idle: bool) -> None:
        """Begin the plan's loads. In an ``idle`` step, which computes nothing, wait a little for those under way."""
        for request_id, transfer in plan.loads:
            self._begin(("load", request_id), transfer)
        if idle:
            self._wait("load", _A_LITTLE)
        for request_id in plan.failed_loads:
            self._failed.add(("load", request_id))
            self._ended.append(("load", request_id))

    def store(self, plan: StepPlan) -> None:
        """Begin the plan's stores. What the engine does with their pages later is kept behind them by `fence`."""
        for job, transfer in plan.stores:
            self._begin(("store", job), transfer)

    def fence(self, plan: StepPlan) -> None:
        """Before the step: pages that it may overwrite are read first."""
        stores_to_fence = {("store", job) for job in plan.stores_to_fence}
        if jobs := {job for job, owner in self._owners.items() if owner in stores_to_fence}:
            for mover in self._movers:
                if mover is not None:
                    mover.fence(jobs)

    def loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them for which it failed."""
        self._collect()
        ended = {owner for owner in self._ended if owner[0] == "load"}
        failed = ended & self._failed
        self._ended = [owner for owner in self._ended if owner not in ended]
        self._failed -= failed
        return {name for _, name in ended}, {name for _, name in failed}

    def progress(self) -> Progress | None:
        """What became of the self-test and of store jobs since the last call; None if nothing did."""
        self._collect()
        ended = [owner for owner in self._ended if owner[0] == "store"]
        tried, self._tried = self._tried, Counter()
        if not ended and not tried:
            return None
        failed = [owner for owner in ended if owner in self._failed]
        self._ended = [owner for owner in self._ended if owner[0] != "store"]
        self._failed.difference_update(failed)
        checksums, self._sums = self._sums, {}
        return Progress(Counter(job for _, job in ended), Counter(job for _, job in failed), tried, checksums)

    def close(self) -> None:
        for mover in self._movers:
            if mover is not None:
                mover.close()
        self._movers = []

    def _wait(self, what: str, timeout: float) -> None:
        jobs = {job for job, owner in self._owners.items() if owner[0] == what}
        for mover in self._movers:
            if mover is not None and jobs:
                mover.wait(jobs, timeout)

    def _begin(self, owner: _Owner, transfer: Transfer) -> None:
        arenas = sorted({slot.arena for slot in transfer.slots})
        self._parts[owner] = len(arenas)
        for arena in arenas:
            pairs = [
                (slot.index, pages)
                for slot, pages in zip(transfer.slots, transfer.pages, strict=True)
                if slot.arena == arena
            ]
            self._submit(owner, arena, [slot for slot, _ in pairs], [pages for _, pages in pairs])

    def _submit(self, owner: _Owner, arena: int, slots: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        mover = self._movers[arena] if arena < len(self._movers) and not self._away else None
        if mover is None:
            return self._end_part(owner, ok=False)
        self._jobs += 1
        self._owners[self._jobs] = owner
        job = self._jobs
        outcome = run(lambda: mover.load(job, slots, pages) if owner[0] == "load" else mover.store(job, pages, slots))
        if outcome.error is not None:
            logger.warning("kvtier: %s %s failed: %s", *owner, outcome.error)
            del self._owners[job]
            self._end_part(owner, ok=False)

    def _collect(self) -> None:
        for mover in self._movers:
            for job, ok, checksums in mover.finished() if mover is not None else ():
                what, number = owner = self._owners.pop(job)
                if what == "store" and checksums:
                    self._sums[number, self._table.rank] = tuple(checksums)
                self._end_part(owner, ok=ok)

    def _end_part(self, owner: _Owner, *, ok: bool) -> None:
        self._parts[owner] -= 1
        if not ok:
            self._failed.add(owner)
        if not self._parts[owner]:
            del self._parts[owner]
            self._ended.append(owner)
