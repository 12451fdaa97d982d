"""Threads that carry bytes. The only file of the core that starts a thread, and the only lock.

Work runs on a thread of the pool and touches only pinned or reserved frames; what follows from it (its
continuation) runs on the owner's thread, in `step`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from kvtier_core.errors import KvtierError


@attrs.frozen
class Outcome:
    """What became of a piece of work: a value, or the error it raised."""

    value: Any = None
    error: BaseException | None = None


Work = Callable[[], Any]
Then = Callable[[Outcome], None]


class Pool(Protocol):
    """Where a tier sends its work. The tests choose the order with one of their own."""

    def submit_load(self, work: Work, then: Then) -> None: ...
    def submit_store(self, work: Work, then: Then) -> None: ...
    def step(self) -> int: ...
    def wait(self, timeout: float) -> None: ...
    def longest(self) -> float: ...
    @property
    def jobs(self) -> int: ...
    def close(self, timeout: float) -> bool: ...


def run(work: Work) -> Outcome:
    """Do the work. The one place where a plugin's exception, whatever it is, becomes a value."""
    try:
        return Outcome(value=work())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, CancelledError: none of them may end a thread that others wait for
        return Outcome(error=error)


def run_within(work: Work, timeout: float) -> Outcome | None:
    """Do the work on a thread of its own; None if it hangs, and is left behind, after ``timeout`` seconds."""
    outcomes: list[Outcome] = []
    run_aside(lambda: outcomes.append(run(work)), "last").join(timeout)
    return outcomes[0] if outcomes else None


def run_aside(work: Work, name: str) -> threading.Thread:
    """Begin the work on a daemon thread of its own. What it raises is lost."""
    thread = threading.Thread(target=lambda: run(work), name=f"kvtier-{name}", daemon=True)
    thread.start()
    return thread


class IOPool:
    """A few daemon threads and one queue, in which loads come before stores."""

    def __init__(self, name: str, threads: int = 1):
        self._loads: deque[tuple[Work, Then]] = deque()
        self._stores: deque[tuple[Work, Then]] = deque()
        self._done: deque[tuple[Then, Outcome]] = deque()
        self._changed = threading.Condition()
        self._jobs = 0  # submitted, continuation not yet run; the owner's alone
        self._closed = False
        self._begun: list[float | None] = [None] * threads  # when each thread began what it does now
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"kvtier-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def jobs(self) -> int:
        """Pieces of work whose continuation has not run."""
        return self._jobs

    def submit_load(self, work: Work, then: Then) -> None:
        self._submit(self._loads, work, then)

    def submit_store(self, work: Work, then: Then) -> None:
        self._submit(self._stores, work, then)

    def step(self) -> int:
        """Run the continuations of what has ended; returns how many."""
        ran = 0
        while self._done:
            then, outcome = self._done.popleft()
            self._jobs -= 1
            ran += 1
            then(outcome)
        return ran

    def wait(self, timeout: float) -> None:
        """Return when a continuation is due, or after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._jobs, timeout)

    def longest(self) -> float:
        """For how many seconds the oldest piece of work has been on a thread."""
        now = time.monotonic()
        return max((now - begun for begun in self._begun if begun is not None), default=0.0)

    def close(self, timeout: float) -> bool:
        """Drop what has not begun, wait for what has; False if a thread still hangs after ``timeout`` seconds."""
        with self._changed:
            self._closed = True
            self._jobs -= len(self._loads) + len(self._stores)
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, queue: deque[tuple[Work, Then]], work: Work, then: Then) -> None:
        with self._changed:
            if self._closed:
                raise KvtierError("the pool is closed")
            queue.append((work, then))
            self._jobs += 1
            self._changed.notify()

    def _serve(self, number: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._loads or self._stores)
                if self._closed:
                    return
                work, then = (self._loads or self._stores).popleft()
            self._begun[number] = time.monotonic()
            outcome = run(work)
            self._begun[number] = None
            with self._changed:
                self._done.append((then, outcome))
                self._changed.notify_all()
