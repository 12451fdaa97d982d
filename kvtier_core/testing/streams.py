"""A device without hardware: streams whose work is done late, and in the worst order that the rules of CUDA allow.

Work of one stream is done in the order in which it was given. Between streams only events keep an order. What else
comes first is drawn from a seed: some streams get far ahead while others stand still, until the host waits for them.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: How often, in pieces of work and in calls of the host, other streams get ahead.
_TURNS = 0.02
#: Pieces of work that a device does while the host does something else.
_MEANWHILE = (0, 0, 1, 2, 8)


class SimulatedStreams:
    """Stands for torch's module of streams, and for the device behind it. Work is a call of Python.

    With ``progresses`` the device works a little whenever the host asks for an event, and whenever the host calls
    `pass_time`; otherwise it does nothing before `step` or `finish`.
    """

    def __init__(self, seed: int = 0, *, progresses: bool = False):
        self.rng = random.Random(seed)
        self.engine = SimulatedStream(self)  #: the engine's own, which is no default stream
        self._current = self.engine
        self._streams = [self.engine]  # those that get ahead first
        self._awake = 1  # so many of the first streams do not stand still
        self._progresses = progresses

    # -- what torch has ----------------------------------------------------------------------------------

    def Stream(self, device: object = None, priority: int = 0) -> SimulatedStream:
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def Event(self, **options: object) -> SimulatedEvent:
        return SimulatedEvent(self)

    def current_stream(self, device: object = None) -> SimulatedStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # -- the device --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one piece of work. False if no stream can go on."""
        return self._step(len(self._streams))

    def finish(self) -> None:
        """Do all work. Raises RuntimeError if streams wait for each other."""
        while self.step():
            pass
        if any(stream.work for stream in self._streams):
            raise RuntimeError("streams wait for each other")

    def pass_time(self) -> None:
        """What the device does while the host does something else."""
        if self._progresses:
            self._turn()
            for _ in range(self.rng.choice(_MEANWHILE)):
                self._step(self._awake)

    def _step(self, awake: int) -> bool:
        self._turn()
        for stream in self._streams[:awake]:
            if stream.is_ready:
                stream.work.popleft()[1]()
                return True
        return False

    def _turn(self) -> None:
        if self.rng.random() < _TURNS:
            self.rng.shuffle(self._streams)
            self._awake = self.rng.randint(1, len(self._streams))


class SimulatedStream:
    """Work in order, each piece with a condition on which it may begin."""

    def __init__(self, device: SimulatedStreams):
        self.device = device
        self.work: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    @property
    def is_ready(self) -> bool:
        """May its next piece of work be done?"""
        return bool(self.work) and self.work[0][0]()

    def run(self, work: Callable[[], object], when: Callable[[], bool] = lambda: True) -> None:
        """Enqueue what a kernel or a copy does."""
        self.work.append((when, work))

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.mark is None:
            raise RuntimeError("nobody would wait for an event that was never recorded")
        mark = event.mark  # recorded again, the event is another one
        self.run(lambda: None, when=lambda: mark.past)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent(self.device)
        event.record(self)
        return event

    def query(self) -> bool:
        self.device.pass_time()
        return not self.work

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Mark:
    """A place in a stream, and whether the device has passed it."""

    past = False


class SimulatedEvent:
    """Occurs when the device comes to where it was recorded last."""

    def __init__(self, device: SimulatedStreams):
        self._device = device
        self.mark: _Mark | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        mark = self.mark = _Mark()
        (stream or self._device.current_stream()).run(lambda: setattr(mark, "past", True))

    def wait(self, stream: SimulatedStream | None = None) -> None:
        (stream or self._device.current_stream()).wait_event(self)

    def query(self) -> bool:
        self._device.pass_time()
        return self.mark is None or self.mark.past

    def synchronize(self) -> None:
        while self.mark is not None and not self.mark.past:
            if not self._device.step():
                raise RuntimeError("the host waits for ever")


class LateCopier:
    """The copies of a copier that needs no stream, each made when a simulated stream comes to it, chunk by chunk.

    ``fails`` is asked before each chunk: true, and the call raises there. What it has enqueued by then is copied.
    """

    def __init__(self, copier: Any, fails: Callable[[], bool] = lambda: False):
        self._copier = copier
        self._fails = fails
        self.failed = False  #: did the last call raise?

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: SimulatedStream) -> None:
        self._each(self._copier.gather, rows, slots, stream)

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: SimulatedStream) -> None:
        self._each(self._copier.scatter, rows, slots, stream)

    def facts(self) -> Mapping[str, str]:
        return self._copier.facts()

    def close(self) -> None:
        self._copier.close()

    def _each(
        self,
        copy: Callable[..., None],
        rows: Sequence[Sequence[int]],
        slots: Sequence[int],
        stream: SimulatedStream,
    ) -> None:
        self.failed = False
        for row, slot in zip(rows, slots, strict=True):
            if self._fails():
                self.failed = True
                raise RuntimeError("this copy was to fail")
            stream.run(lambda row=row, slot=slot: copy([row], [slot], None))
