"""A planted bug for each rule of docs/internals/gpu.md ("Ordering on the device"): the engine must notice every one.

A bug of a mover is planted in `DeviceMover` through what any device's streams have, so that the same bugs can be
planted on a GPU; one of the scheduler's process in the engine itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import attrs

from kvtier_core.engine.messages import StepPlan, WorkerProgress
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.interfaces import JobResult, PageList
from kvtier_core.transfer.cuda.mover import DeviceMover


def _nothing(engine: Any) -> None: ...


@attrs.frozen
class Bug:
    """``scheduler`` changes the engine in the scheduler's process."""

    rule: str  #: that it breaks; empty: none
    mover: type[DeviceMover] = DeviceMover
    side: type[WorkerSide] = WorkerSide
    scheduler: Callable[[Any], None] = _nothing
    setup: dict[str, object] = attrs.field(factory=dict)  #: what the engine must be like for it to matter


# -- the mover -------------------------------------------------------------------------------------------


class _Buggy(DeviceMover):
    @contextlib.contextmanager
    def _hears(self, *, new: bool, old: bool) -> Iterator[None]:
        """Streams wait for events only if those were made in here (``new``), or before (``old``)."""
        streams, made = self._engine, []
        event, kind = streams.Event, type(streams.current_stream(self._device))
        wait = kind.wait_event

        def making(*args: object, **kwargs: object) -> object:
            made.append(event(*args, **kwargs))
            return made[-1]

        def waiting(stream: object, each: object) -> None:
            if new if any(each is other for other in made) else old:
                wait(stream, each)

        with mock.patch.object(streams, "Event", making), mock.patch.object(kind, "wait_event", waiting):
            yield


class StoresDoNotWait(_Buggy):
    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        with self._hears(new=False, old=False):
            super().store(job, pages, slots)


class LoadsDoNotWait(DeviceMover):
    """But for the first step."""

    def mark(self) -> object:
        return self.__dict__.setdefault("first", super().mark())


class LoadsWaitForTheStepBefore(DeviceMover):
    """As if the event had been recorded a step too early."""

    def mark(self) -> object:
        early, self.__dict__["later"] = self.__dict__.get("later"), super().mark()
        return early or self.__dict__["later"]


class LoadsOvertakeStores(_Buggy):
    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        with self._hears(new=True, old=False):
            super().load(job, slots, pages)  # with a mark that is made in here


class NoFence(DeviceMover):
    def fence(self, jobs: Collection[int]) -> None:
        pass


class _Early(DeviceMover):
    """Reports some jobs when they have been begun."""

    def _report(self, job: int, *, ok: bool) -> None:
        self.__dict__.setdefault("early", []).append(JobResult(job, ok=ok))
        self.__dict__.setdefault("reported", set()).add(job)

    def finished(self) -> Sequence[JobResult]:
        reported: set[int] = self.__dict__.setdefault("reported", set())
        late = [result for result in super().finished() if result.job not in reported]
        return [*late, *self.__dict__.pop("early", ())]


class LoadsEndAtOnce(_Early):
    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        super().load(job, slots, pages, after)
        self._report(job, ok=True)


class StoresEndAtOnce(_Early):
    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        super().store(job, pages, slots)
        self._report(job, ok=True)


class FailuresEndAtOnce(_Early):
    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        super().load(job, slots, pages, after)
        if any(copier.failed for copier in self._copiers):
            self._report(job, ok=False)


class ChecksumsBeforeTheGather(DeviceMover):
    """Of a simulated device; but those of the self-test are right."""

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        if job >= 0:
            self._engine.c.fake_sum_at_once()
        super().store(job, pages, slots)


# -- the worker side -------------------------------------------------------------------------------------


class FencesAfterTheForward(WorkerSide):
    def fence(self, plan: StepPlan) -> None:
        pass

    def load(self, plan: StepPlan, *, idle: bool) -> None:
        super().fence(plan)
        super().load(plan, idle=idle)


class StoresBeforeTheForward(WorkerSide):
    def fence(self, plan: StepPlan) -> None:
        super().fence(plan)
        super().store(plan)

    def store(self, plan: StepPlan) -> None:
        pass


class OvertakesStoresOfOtherMovers(WorkerSide):
    def fence(self, plan: StepPlan) -> None:
        super().fence(attrs.evolve(plan, loads=()))


class FencesLate(WorkerSide):
    """Although the engine writes to new blocks before it calls `fence`."""

    def __init__(self, *args: Any, fence_at_once: bool):
        super().__init__(*args)


class TouchesPagesInItsSleep(WorkerSide):
    def suspend(self) -> None:
        pass


# -- the scheduler's process -----------------------------------------------------------------------------


def _forgets_stores(engine: Any) -> None:
    plan = engine.side.plan
    engine.side.plan = lambda step: attrs.evolve(plan(step), stores_to_fence=())


def _unpins_what_is_loaded(engine: Any) -> None:
    plan = engine.side.plan

    def planned(step: Any) -> StepPlan:
        made = plan(step)
        if made.loads:
            for holder in engine.manager.pins_by_holder():
                engine.manager.release(holder)
        return made

    engine.side.plan = planned


def _frees_what_is_loaded(engine: Any) -> None:
    engine.waits_for_loads = False


def _believes_the_first_rank(engine: Any) -> None:
    merged = engine.merged

    def believed(reports: Sequence[WorkerProgress | None]) -> WorkerProgress | None:
        whole, first = merged(reports), reports[0] or WorkerProgress()
        ended = Counter(dict.fromkeys(first.ended, len(reports)))
        return whole and attrs.evolve(whole, ended=ended, checksums=first.checksums)

    engine.merged = believed


def _counts_loads_of_one_rank(engine: Any) -> None:
    engine.ranks_that_load = 1


BUGS = {
    "": Bug(""),
    "a store does not wait for the forward": Bug("1", StoresDoNotWait),
    "a store is begun before the forward": Bug("1", side=StoresBeforeTheForward),
    "no fence": Bug("2", NoFence),
    "a fence after the forward": Bug("2", side=FencesAfterTheForward),
    "no store is named to be fenced": Bug("2", scheduler=_forgets_stores),
    "a load does not wait for a store of its pages": Bug("2", LoadsOvertakeStores),
    "a load does not wait for a store of another mover": Bug(
        "3", side=OvertakesStoresOfOtherMovers, setup={"slots": 10, "slots_below": 60}
    ),
    "zeroed before the fence": Bug("2", side=FencesLate, setup={"zeroes": True}),
    "a load does not wait for any forward": Bug("3", LoadsDoNotWait),
    "a load does not wait for the last forward": Bug("3", LoadsWaitForTheStepBefore),
    "a load is reported before its event": Bug("4", LoadsEndAtOnce),
    "a load is reported when one rank has it": Bug("4", scheduler=_counts_loads_of_one_rank, setup={"ranks": 2}),
    "a store is reported before its event": Bug("5", StoresEndAtOnce),
    "a checksum is computed before its pages are gathered": Bug("5", ChecksumsBeforeTheGather, setup={"staged": True}),
    "a store is reported when one rank has it": Bug("5", scheduler=_believes_the_first_rank, setup={"ranks": 2}),
    "a failed load is reported before its last copy": Bug("5", FailuresEndAtOnce, setup={"failures": 0.2}),
    "a slot is unpinned while it is loaded": Bug("5", scheduler=_unpins_what_is_loaded, setup={"slots": 10}),
    "a page is freed while it is loaded": Bug("3", scheduler=_frees_what_is_loaded),
    "a page is touched during a sleep": Bug("a sleep", side=TouchesPagesInItsSleep, setup={"sleeps": True}),
}
