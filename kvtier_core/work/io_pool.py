"""Threads that move bytes. All threads of the data plane start here; `relays/shown_store.py` has the only other lock.

Work runs on a thread of the pool and touches only pinned or reserved slots. Its continuation, which does the
bookkeeping, runs on the thread that calls `step`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from kvtier_core.errors import KvtierError
from kvtier_core.forks import ProcessBound


@attrs.frozen
class Outcome:
    """The result of a job: a value, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


Work = Callable[[], Any]
Then = Callable[[Outcome], None]


class Pool(Protocol):
    """Runs work for one thread, the user, which calls every method. Tests use a pool whose order they choose."""

    @property
    def jobs(self) -> int:
        """Number of jobs whose continuation has not run."""

    def submit_load(self, work: Work, then: Then) -> None:
        """Run ``work`` on a thread, before any store that has not begun, and ``then(outcome)`` in `step`."""

    def submit_store(self, work: Work, then: Then) -> None:
        """Run ``work`` on a thread when no load is waiting, and ``then(outcome)`` in `step`."""

    def step(self) -> int:
        """Run the continuations of work that has ended. Returns their number."""

    def wait(self, timeout: float) -> None:
        """Return when a continuation can run, no work is left, or ``timeout`` seconds have passed."""

    def longest(self) -> float:
        """Seconds for which the oldest work has been on a thread; 0 if all threads are idle."""

    def close(self, timeout: float) -> bool:
        """Drop work that has not begun and wait for the rest. False if some still runs after ``timeout`` seconds."""


def run(work: Work) -> Outcome:
    """Run the work on this thread. Every exception except KeyboardInterrupt becomes an `Outcome`."""
    try:
        return Outcome(value=work())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and CancelledError must not end a thread either
        return Outcome(error=error)


def run_within(work: Work, timeout: float) -> Outcome | None:
    """Run the work on its own thread. Returns None if it has not ended after ``timeout`` seconds; it continues."""
    outcomes: list[Outcome] = []
    run_aside(lambda: outcomes.append(run(work)), "last").join(timeout)
    return outcomes[0] if outcomes else None


def run_aside(work: Work, name: str, *, daemon: bool = True) -> threading.Thread:
    """Start the work on its own thread and return the thread. Exceptions of the work are lost."""
    thread = threading.Thread(target=lambda: run(work), name=f"kvtier-{name}", daemon=daemon)
    thread.start()
    return thread


class IOPool(ProcessBound, closing={"close": lambda: True}):  # a fork has none of its threads
    """A `Pool` of ``threads`` daemon threads. Loads precede stores."""

    def __init__(
        self,
        name: str,
        threads: int = 1,
        wake: Callable[[], None] = lambda: None,
        at_a_time: int = sys.maxsize,
        check: Callable[[], None] = lambda: None,
    ):
        """``wake`` is called, mostly on a thread of the pool, whenever `step` has a continuation to run.

        `step` runs at most ``at_a_time`` continuations. ``check`` is called after each work, on its thread: if it
        raises, the work has failed.
        """
        self._wake = wake
        self._at_a_time = at_a_time
        self._check = check
        self._loads: deque[tuple[Work, Then]] = deque()
        self._stores: deque[tuple[Work, Then]] = deque()
        self._done: deque[tuple[Then, Outcome]] = deque()
        self._changed = threading.Condition()
        self._jobs = 0  # submitted, continuation not yet run; only the user's thread changes it
        self._closed = False
        self._begun: list[float | None] = [None] * threads  # when each thread began its work; None: idle
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"kvtier-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def jobs(self) -> int:
        return self._jobs

    def submit_load(self, work: Work, then: Then) -> None:
        self._submit(self._loads, work, then)

    def submit_store(self, work: Work, then: Then) -> None:
        self._submit(self._stores, work, then)

    def step(self) -> int:
        ran = 0
        while self._done and ran < self._at_a_time:
            then, outcome = self._done.popleft()
            self._jobs -= 1
            ran += 1
            then(outcome)
        if self._done:
            self._wake()
        return ran

    def wait(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._jobs, timeout)

    def longest(self) -> float:
        now = time.monotonic()
        return max((now - begun for begun in self._begun if begun is not None), default=0.0)

    def close(self, timeout: float) -> bool:
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
            if (unusable := run(self._check).error) is not None:
                outcome = Outcome(error=unusable)
            self._begun[number] = None
            with self._changed:
                self._done.append((then, outcome))
                self._changed.notify_all()
            self._wake()
