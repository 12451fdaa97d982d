"""A backend that fails on purpose, for tests of how its tier reacts."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, SupportsListing
from kvtier_core.types import ChunkKey


@attrs.frozen
class Fault:
    """The faults of one call. The fields are independent of each other, and can be combined."""

    error: BaseException | None = None  #: raised instead of an answer
    unreadable: BackendError | None = None  #: what a read returns for its first key
    delay: float = 0.0  #: seconds before the call
    until: threading.Event | None = None  #: the call begins when this is set; until then it hangs
    surplus: int = 0  #: added to every length that a read returns, of hits and misses; may be negative
    answers: int = 0  #: how many more answers than keys a call returns; may be negative
    damage: bool = False  #: a read returns other bytes than were written
    instead: ChunkKey | None = None  #: a read returns the frame of this key, whichever it was asked for
    drop: bool = False  #: the call does nothing: reads are misses, writes are lost
    lose: bool = False  #: the call does what it should, and then its keys are deleted


#: Says what goes wrong, given the name of a method and the number of the call, from 0, over all methods.
Plan = Callable[[str, int], Fault]

FINE = Fault()


def always(fault: Fault, *methods: str) -> Plan:
    """In every call of these methods; of all methods if none is named."""
    return every(1, fault, *methods)


def every(nth: int, fault: Fault, *methods: str) -> Plan:
    """In every ``nth`` call, if it is one of these methods."""
    return lambda method, call: fault if (call + 1) % nth == 0 and (not methods or method in methods) else FINE


def now_and_then(seed: int, rate: float, *faults: Fault) -> Plan:
    """In a share of the calls, one of these faults; the same calls for the same seed."""

    def plan(method: str, call: int) -> Fault:
        rng = random.Random(f"{seed} {call}")
        return rng.choice(faults) if rng.random() < rate else FINE

    return plan


class FaultyBackend(Backend):
    """Passes all calls to ``inner``, except for what goes wrong by ``plan``."""

    def __init__(self, inner: Backend, plan: Plan):
        self.shared = inner.shared
        self.plan = plan
        self.calls: list[str] = []  #: the method of each call that began, oldest first
        self._inner = inner
        self._numbers = itertools.count()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        fault = self._begin("contains")
        there = [False] * len(keys) if fault.drop else self._inner.contains(keys)
        self._end(fault, keys)
        return _miscounted(there, fault.answers)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        fault = self._begin("read")
        asked = keys if fault.instead is None else [fault.instead] * len(keys)
        counts = [0] * len(keys) if fault.drop else self._inner.read(asked, into)
        if fault.damage:
            for view, count in zip(into, counts, strict=True):
                if isinstance(count, int) and count:
                    view[count - 1] ^= 0xFF
        self._end(fault, keys)
        counts = [count if isinstance(count, BackendError) else count + fault.surplus for count in counts]
        if fault.unreadable is not None:
            counts[:1] = [fault.unreadable]
        return _miscounted(counts, fault.answers)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        fault = self._begin("write")
        if not fault.drop:
            self._inner.write(keys, frames)
        self._end(fault, keys)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        fault = self._begin("delete")
        if not fault.drop:
            self._inner.delete(keys)

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        if not self._begin("quarantine").drop:
            self._inner.quarantine(keys)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        listed = not self._begin("scan").drop and isinstance(self._inner, SupportsListing)
        return self._inner.scan() if listed else iter(())

    def facts(self) -> Mapping[str, str]:
        return self._inner.facts()

    def close(self) -> None:
        if not self._begin("close").drop:
            self._inner.close()

    def _begin(self, method: str) -> Fault:
        self.calls.append(method)
        fault = self.plan(method, next(self._numbers))
        time.sleep(fault.delay)
        if fault.until is not None:
            fault.until.wait()
        if fault.error is not None:
            raise copy.copy(fault.error)  # a raised exception keeps stack frames alive, and those the views of an arena
        return fault

    def _end(self, fault: Fault, keys: Sequence[ChunkKey]) -> None:
        if fault.lose:
            self._inner.delete(keys)


@contextlib.contextmanager
def hanging(backend: type[Backend], *methods: str) -> Iterator[None]:
    """Calls of these methods that begin in the context wait until it ends."""
    ends = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            call = getattr(backend, name)
            patch.setattr(backend, name, lambda *args, call=call: (ends.wait(), call(*args))[1])
        try:
            yield
        finally:
            ends.set()


def _miscounted(answers: Sequence, surplus: int) -> list:
    answers = list(answers)
    return (answers + answers[:1] * surplus)[: max(0, len(answers) + surplus)]
