"""A backend that goes wrong on purpose, to see what its tier makes of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from kvtier_core.interfaces import Backend
from kvtier_core.types import ChunkKey


@attrs.frozen
class Fault:
    """What goes wrong in one call."""

    error: Exception | None = None  #: raised instead of an answer
    delay: float = 0.0  #: seconds before the call
    surplus: int = 0  #: added to every length that a read reports, hits and misses alike
    damage: bool = False  #: a read fills in other bytes
    drop: bool = False  #: every key of the call is lost: reads miss, writes vanish


#: Says what goes wrong in call number n (from 0, over all methods) of the named method.
Plan = Callable[[str, int], Fault]

FINE = Fault()


def always(fault: Fault, *methods: str) -> Plan:
    """In every call of these methods; of all methods if none is named."""
    return every(1, fault, *methods)


def every(nth: int, fault: Fault, *methods: str) -> Plan:
    """In every ``nth`` call, if it is one of these methods."""
    return lambda method, call: fault if (call + 1) % nth == 0 and (not methods or method in methods) else FINE


def now_and_then(seed: int, rate: float, *faults: Fault) -> Plan:
    """In a share of the calls, which are the same for the same seed."""

    def plan(method: str, call: int) -> Fault:
        rng = random.Random(f"{seed} {call}")
        return rng.choice(faults) if rng.random() < rate else FINE

    return plan


class FaultyBackend(Backend):
    """Another backend, and a plan of what goes wrong."""

    def __init__(self, inner: Backend, plan: Plan):
        self.shared = inner.shared
        self.plan = plan
        self._inner = inner
        self._calls = itertools.count()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        fault = self._begin("contains")
        return [False] * len(keys) if fault.drop else self._inner.contains(keys)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        fault = self._begin("read")
        counts = [0] * len(keys) if fault.drop else self._inner.read(keys, into)
        if fault.damage:
            for view, count in zip(into, counts, strict=True):
                if count:
                    view[count - 1] ^= 0xFF
        return [count + fault.surplus for count in counts]

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        if not self._begin("write").drop:
            self._inner.write(keys, frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        if not self._begin("delete").drop:
            self._inner.delete(keys)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        return iter(()) if self._begin("scan").drop else self._inner.scan()

    def facts(self) -> Mapping[str, str]:
        return self._inner.facts()

    def close(self) -> None:
        self._inner.close()

    def _begin(self, method: str) -> Fault:
        fault = self.plan(method, next(self._calls))
        time.sleep(fault.delay)
        if fault.error is not None:
            raise fault.error
        return fault
