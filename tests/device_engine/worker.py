"""The process of one rank: it carries out steps as vLLM's model runners do, with the real worker side."""

from __future__ import annotations

import contextlib
import random
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from device_engine.bugs import BUGS
from device_engine.content import Forward
from device_engine.devices import CudaDevice, Enqueued, SimulatedDevice
from device_engine.setup import Setup
from kvtier_core.engine.messages import StepPlan, WorkerProgress
from kvtier_core.work.io_pool import run

#: Steps that the host may be ahead of the device.
AHEAD = 2


class Order(NamedTuple):
    """A step, as the scheduler sends it."""

    plan: StepPlan
    forward: Forward
    new_blocks: list[int]  #: taken by requests since the last step
    idle: bool  #: nothing is computed


class Report(NamedTuple):
    """What the host of a worker knows when it has enqueued a step."""

    loaded: tuple[set[str], set[str]]
    progress: WorkerProgress | None
    wrong: int  #: tokens that were not what they must be, as far as the device has come


class Failure(NamedTuple):
    """What a worker raised."""

    trace: str


class Worker:
    """One rank, with its device. Every method is called on the thread that enqueues the engine's work."""

    def __init__(self, setup: Setup, rank: int, libraries: Sequence[Path]):
        bug = BUGS[setup.bug]
        simulated = setup.device == "cpu"
        self._device = SimulatedDevice(setup, rank, libraries) if simulated else CudaDevice(setup, rank)
        drawn = random.Random(setup.seed * 64 + rank)
        arena = self._device.arena(bug.mover, lambda: self._attached and drawn.random() < setup.failures)
        tiers = [attrs.evolve(tier, config=arena) for tier in setup.stack.arenas]
        caches = [{f"layer {number}": cache for number, cache in enumerate(self._device.caches)}]
        self._side = bug.side(tiers, rank, self._device.pages, caches, fence_at_once=setup.zeroes)
        self._zeroes = setup.zeroes
        self._attached = False
        self._enqueued: deque[Enqueued] = deque()
        self._wrong = 0

    def step(self, order: Order) -> Report:
        """Enqueue a step, as soon as the device is no more than `AHEAD` steps behind."""
        while len(self._enqueued) >= AHEAD:
            self._wrong = self._enqueued.popleft().wait()
        if self._zeroes and order.new_blocks:
            self._device.zero(order.new_blocks)  # vLLM's second model runner does it before it calls a connector
        if not self._attached:
            # What the self-test does to pages is no work of a stream that is simulated.
            self._device.streams.current_stream().synchronize()
        self._side.attach(order.plan)
        if not self._attached:
            self._attached = True
            self._device.attached()
        self._side.fence(order.plan)
        self._side.mark()
        self._enqueued.append(self._device.launch(order.forward))
        self._side.load(order.plan, idle=order.idle and not self._device.idle())
        self._side.store(order.plan)
        return Report(self._side.loaded(), self._side.progress(), self._wrong)

    def sleep(self) -> None:
        """What `unregister_kv_caches` is called for, and then the memory is gone."""
        self._side.suspend()
        self._device.sleep()

    def wake(self) -> None:
        """Other memory at the same addresses, then `restore_kv_caches`."""
        self._device.wake()
        self._side.resume()

    def end(self) -> int:
        """Wait for all steps. Returns how many tokens were wrong."""
        while self._enqueued:
            self._wrong = self._enqueued.popleft().wait()
        self._side.close()
        return self._wrong


def serve(connection: Connection, setup: Setup, rank: int, libraries: Sequence[Path]) -> None:
    """The process: answers each message (a method of the worker and its arguments) until there is none any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the scheduler, and with it the connection
    worker = Worker(setup, rank, libraries)
    with contextlib.suppress(EOFError, OSError):
        while True:
            message: tuple[str, tuple[Any, ...]] = connection.recv()
            name, arguments = message
            connection.send(_answer(worker, name, arguments))


def _answer(worker: Worker, name: str, arguments: tuple[Any, ...]) -> object:
    outcome = run(lambda: getattr(worker, name)(*arguments))
    if outcome.error is not None:
        return Failure("".join(traceback.format_exception(outcome.error)))
    return outcome.value
