"""The driver of the tests, whose work is done late and in the worst order that the rules of CUDA allow.

Work of one stream is done in the order in which it was given. Between streams only events keep an order. What else
comes first is drawn from a seed: one stream stands still while the others get ahead, until the host waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fake_cuda

#: How often, in pieces of work and in calls of the host, another stream stands still.
_TURNS = 0.005
#: Pieces of work that a device does while the host does something else.
_MEANWHILE = (0, 0, 1, 2, 8)


class LateCuda(fake_cuda.FakeCuda):
    """Works a little whenever the host asks for an event, and whenever it calls `pass_time`."""

    def __init__(self, seed: int, libraries: Sequence[Path]):
        self._streams: list[fake_cuda._Stream | None] = [None]
        super().__init__(deferred=True, seed=seed, paths=libraries)

    def Stream(self, device: object = None, priority: int = 0) -> fake_cuda._Stream:
        self._streams.append(super().Stream(device, priority))
        return self._streams[-1]

    def Event(self) -> LateEvent:
        return LateEvent(self)

    def pass_time(self) -> None:
        """What the device does while the host does something else."""
        for _ in range(self.rng.choice(_MEANWHILE)):
            if self.rng.random() < _TURNS:
                self.hold(self.rng.choice([self.engine, self.rng.choice(self._streams)]))
            super().step()

    def step(self) -> bool:
        """As the host waits, no stream stands still for ever."""
        if super().step():
            return True
        self.hold(None)
        return super().step()


class LateEvent(fake_cuda._Event):
    def query(self) -> bool:
        self._cuda.pass_time()
        return super().query()

    def synchronize(self) -> None:
        while not super().query():
            assert self._cuda.step(), "the host waits for ever"
