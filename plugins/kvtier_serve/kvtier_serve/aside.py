"""Work of a server that may take any time, each piece on its own thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvtier_core.work.io_pool import Outcome, Then, Work, run, run_aside


class Aside:
    """Does work aside, and what follows from it on the owner's thread, which calls every method."""

    def __init__(self, wake: Callable[[], None]):
        """``wake`` is called on a thread whenever `step` has something to do."""
        self._wake = wake
        self._threads: dict[threading.Thread, None] = {}
        self._ended: deque[tuple[threading.Thread, Then, Outcome, Callable[[Any], object]]] = deque()
        self._closed = False

    def begin(self, work: Work, then: Then, name: str, undo: Callable[[Any], object] = lambda value: None) -> None:
        """Do the work on a thread, and ``then(outcome)`` in `step`; or ``undo(value)`` if this is closed by then."""

        def end() -> None:
            outcome = run(work)
            self._ended.append((threading.current_thread(), then, outcome, undo))
            if self._closed:
                self._undo()
            self._wake()

        self._threads[run_aside(end, name)] = None

    def step(self) -> None:
        """Do what follows from one piece of work that has ended."""
        if self._ended:
            thread, then, outcome, _ = self._ended.popleft()
            del self._threads[thread]
            then(outcome)
        if self._ended:
            self._wake()

    def close(self, timeout: float) -> None:
        """Wait for work under way, at most ``timeout`` seconds; then do what follows. The rest is undone as it ends."""
        deadline = time.monotonic() + timeout
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        while self._ended:
            self.step()
        self._closed = True
        self._undo()

    def _undo(self) -> None:
        with contextlib.suppress(IndexError):  # the other thread has taken the last one
            while True:
                _, _, outcome, undo = self._ended.popleft()
                if outcome.error is None:
                    undo(outcome.value)
