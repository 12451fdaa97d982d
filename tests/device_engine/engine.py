"""The scheduler's process: the real scheduler side, requests with shared prefixes, and workers that lag behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from fake_cuda import libraries
from patience import HANG

from device_engine.bugs import BUGS
from device_engine.content import Forward, histories
from device_engine.scheduling import HostRequest, Scheduling
from device_engine.setup import Setup
from device_engine.worker import AHEAD, Failure, Order, Report, serve
from kvtier_core.engine.messages import StepPlan, WorkerProgress
from kvtier_core.engine.step import ScheduledRequest, StepResult
from kvtier_core.types import Slot
from kvtier_cpu.segment import Address, reach

#: Base prompts, of which every request has a beginning.
_PREFIXES = 10
_STEPS = 20_000  # in which all that is under way must end


class WrongKV(AssertionError):
    """A forward read what it must not read."""


class WorkerDied(RuntimeError):
    """The process of a rank has ended."""


@attrs.frozen
class _Planned:
    """A step whose outcome is not known."""

    computes: list[tuple[HostRequest, int, int]]  #: the request, its preemptions so far, and where it is computed to


@attrs.define
class Tally:
    """What happened, for the end of a run."""

    requests: int = 0
    steps: int = 0
    asked_tokens: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    aborted: int = 0
    preempted: int = 0
    fenced: int = 0  #: stores that a step named
    sleeps: int = 0
    checksums: int = 0  #: of shards, that a device has computed


class Engine(Scheduling):
    """Use it in a ``with``. Raises WrongKV as soon as a worker has told of wrong KV, and WorkerDied."""

    def __init__(self, setup: Setup):
        super().__init__(setup.stack, setup.layout, range(1, setup.blocks), setup.budget, setup.ranks)
        self.tally = Tally()
        self.waits_for_loads = True  #: an aborted request keeps its blocks until its load has ended
        self.ranks_that_load = setup.ranks  #: a load has ended when so many ranks have told
        self._setup = setup
        self._rng = random.Random(setup.seed)
        self._prefixes = [self._drawn(setup.prompt_tokens) for _ in range(_PREFIXES)]
        self._answers: dict[str, list[int]] = {}  # tokens to be generated, by request
        self._histories: dict[str, list[int]] = {}
        self._taken: set[int] = set()  # blocks, since the last step
        self._planned: deque[_Planned] = deque()
        self._loads_told: dict[str, tuple[int, bool]] = {}  # ranks, and whether one failed
        self._stored_in: dict[int, Sequence[Slot]] = {}  # by store job
        address = json.loads(next(iter(self.manager.handles.values())))
        del address["slot_nbytes"]
        self._slots = reach(Address(**address), populate=False)  # as the workers see them
        BUGS[setup.bug].scheduler(self)
        # A fork server: each worker has its own CUDA, and torch is imported once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "kvtier_core.engine.worker.side"])
        self._workers = []
        built = libraries() if setup.device == "cpu" else ()
        for rank in range(setup.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, setup, rank, built), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- traffic -----------------------------------------------------------------------------------------

    def serve(self, requests: int, until: Callable[[], object] = lambda: False) -> None:
        """Serve so many requests to their end, whatever becomes of them meanwhile, or ``until`` something happens."""
        left = requests
        for _ in range(_STEPS):
            if until() or (not left and not self._requests):
                return
            while left and len(self._requests) < self._setup.active and self._rng.random() < 0.7:
                left -= 1
                self._submit()
            self._disturb()
            self.step()
            if self._setup.sleeps and self._rng.random() < 0.01:
                self.sleep_and_wake()
        raise AssertionError(f"requests do not end: {list(self._requests.values())}")

    def settle(self) -> None:
        self._receive_all()
        for _ in range(_STEPS):
            if not (self.side._stores.jobs or self.side._loads):
                break
            self.step()
            self._receive_all()
        self.side.drain(HANG)

    def check(self) -> None:
        """The end of a run: nothing is under way or pinned, and no token was wrong."""
        self.assert_at_rest()
        self._must_be_right(max(self._ask_all("end")))

    def sleep_and_wake(self) -> None:
        """The engine's memory is unmapped while copies may be under way. Its requests begin anew."""
        self.tally.sleeps += 1
        for request in list(self._requests.values()):
            if request.state == "running":
                self._preempt(request)
            elif request.state == "loading":
                self.finish(request, "abort")
        self._ask_all("sleep")
        self._ask_all("wake")

    def kill(self, rank: int) -> None:
        process, _ = self._workers[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def close(self) -> None:
        """End the workers, and close the stack. May be called twice."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(10)
            process.kill()
            process.join()
        self.side.close()

    def _submit(self) -> None:
        self.tally.requests += 1
        prefix = self._rng.choice(self._prefixes)
        tokens = [*prefix[: self._rng.randrange(len(prefix) + 1)], *self._drawn(self._rng.choice((1, 1, 9)))]
        name = f"request {self.tally.requests}"
        self._answers[name] = self._drawn(self._rng.choice((0, 1, 5, 20)))
        self._histories[name] = histories(tokens)
        self.tally.asked_tokens += len(tokens)
        self.submit(name, tokens)

    def _disturb(self) -> None:
        """Abort or preempt a request, now and then, whatever its state."""
        for request in list(self._requests.values()):
            if request.state != "finished" and self._rng.random() < 0.01:
                self.tally.aborted += 1
                self.finish(request, "abort")
            elif request.state == "running" and self._rng.random() < 0.02:
                self._preempt(request)

    def _preempt(self, request: HostRequest) -> None:
        self.tally.preempted += 1
        self.preempt(request)

    def finish(self, request: HostRequest, reason: str = "stop") -> None:
        if request.state == "loading" and not self.waits_for_loads:
            self._free[:0] = request.blocks
        super().finish(request, reason)

    # -- scheduling --------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        running = [each for each in self._requests.values() if each.state == "running"]
        for request in running:
            answer = self._answers[request.request_id]
            if request.computed == len(request.tokens) and answer:  # its next token, on the device or not, is computed
                request.tokens.append(answer.pop(0))
                self._histories[request.request_id] = histories(request.tokens, self._histories[request.request_id])
        while running and len(self._free) < len(running):
            self._preempt(running.pop())

    def _grow(self, request: HostRequest, tokens: int, *, states: bool = False) -> list[int]:
        new = super()._grow(request, tokens, states=states)
        self._taken.update(new)
        return new

    def _work(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> None:
        self.plans.clear()
        self.tally.steps += 1
        self.tally.fenced += len(plan.stores_to_fence)
        self._stored_in.update((job, transfer.slots) for job, transfer in plan.stores)
        forward = self._forward(scheduled)
        taken, self._taken = sorted(self._taken), set()
        self._send("step", Order(plan, forward, taken, idle=not scheduled))
        computes = []
        for each in scheduled:
            request = self._requests[each.request_id]
            request.computed = each.end
            computes.append((request, request.preemptions, each.end))
        self._planned.append(_Planned(computes))
        while len(self._planned) > AHEAD:
            self._receive()

    def _forward(self, scheduled: Sequence[ScheduledRequest]) -> Forward:
        forward = Forward([], [], [], [])
        for each in scheduled:
            table, known = self._requests[each.request_id].blocks, self._histories[each.request_id]
            size = self._setup.block_tokens
            places = [table[token // size] * size + token % size for token in range(each.end)]
            forward.reads.extend(places[: each.computed])
            forward.read_histories.extend(known[: each.computed])
            forward.writes.extend(places[each.computed :])
            forward.write_histories.extend(known[each.computed : each.end])
        return forward

    # -- the workers -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """What became of the oldest step that was planned."""
        reports: list[Report] = self._answers_of_workers()
        self._must_be_right(max(report.wrong for report in reports))
        ended: set[str] = set()
        failed: set[str] = set()
        for report in reports:
            for request_id in report.loaded[0]:
                ranks, bad = self._loads_told.pop(request_id, (0, False))
                told = ranks + 1, bad or request_id in report.loaded[1]
                self._loads_told[request_id] = told
                if told[0] == self.ranks_that_load:
                    ended.add(request_id)
                    if told[1]:
                        failed.add(request_id)
                if told[0] == self._setup.ranks:
                    del self._loads_told[request_id]
        progress = self.merged([report.progress for report in reports])
        if progress:
            self._must_be_sealed_right(progress)
        self.side.progress(StepResult(ended, failed, (), progress))
        self.side.step_ended()
        for request_id in ended:
            self._end_load(request_id, ok=request_id not in failed)
        for request, preemptions, end in self._planned.popleft().computes:
            whole = end == len(request.tokens) and not self._answers.get(request.request_id)
            if whole and request.state == "running" and request.preemptions == preemptions:
                self.finish(request)

    def _end_load(self, request_id: str, *, ok: bool) -> None:
        if request := self._requests.get(request_id):
            self.tally.failed_loads += not ok
            self.tally.loaded_tokens += request.offered if ok else 0
            self._loaded(request, ok=ok)

    def merged(self, reports: Sequence[WorkerProgress | None]) -> WorkerProgress | None:
        """What all ranks report together."""
        whole = None
        for report in reports:
            whole = whole.merge(report) if whole and report else whole or report
        return whole

    def _receive_all(self) -> None:
        while self._planned:
            self._receive()

    def _ask_all(self, name: str) -> list[Any]:
        self._receive_all()
        self._send(name)
        return self._answers_of_workers()

    def _send(self, name: str, *arguments: object) -> None:
        try:
            for _, connection in self._workers:
                connection.send((name, arguments))
        except OSError as error:
            raise self._death() from error

    def _answers_of_workers(self) -> list[Any]:
        try:
            answers = [connection.recv() for _, connection in self._workers]
        except (EOFError, OSError) as error:
            raise self._death() from error
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise WorkerDied(f"rank {rank}: {answer.trace}")
        return answers

    def _death(self) -> WorkerDied:
        for rank, (process, _) in enumerate(self._workers):
            process.join(1)
            if process.exitcode is not None:
                return WorkerDied(f"rank {rank} ended with {process.exitcode}")
        return WorkerDied("a worker does not answer")

    def _must_be_right(self, wrong: int) -> None:
        if wrong:
            raise WrongKV(f"step {self.tally.steps}: {wrong} tokens were read that are not what was computed")

    def _must_be_sealed_right(self, progress: WorkerProgress) -> None:
        """The checksums with which frames will be sealed are those of what lies in the slots."""
        for (job, number), checksums in progress.checksums.items():
            shard = self.layout.parts[0].shards[number]
            for slot, checksum in zip(self._stored_in[job], checksums, strict=True):
                begin = slot.index * self.layout.frame_nbytes + shard.offset
                self.tally.checksums += 1
                if zlib.crc32(self._slots[begin : begin + shard.nbytes]) != checksum:
                    raise WrongKV(f"step {self.tally.steps}: {slot} has another checksum than its frame is to have")

    def _drawn(self, count: int) -> list[int]:
        return [self._rng.randrange(1 << 16) for _ in range(count)]


def run(setup: Setup, requests: int) -> Tally:
    """Serve so many requests on such an engine, to their end. Raises what `Engine` raises."""
    with Engine(setup) as engine:
        engine.serve(requests)
        engine.check()
        return engine.tally
