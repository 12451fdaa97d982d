"""Many requests at once, on the thread that asks, until its time is up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_s3.errors import Unanswered

T = TypeVar("T")


class _EventLoop(asyncio.SelectorEventLoop):
    """It polls: the set of an epoll is shared with a forked process, which would empty it when it collects the loop."""

    def __init__(self) -> None:
        super().__init__(selectors.PollSelector())
        self.wakers: dict[int, None] = {}  #: threads that are waking it

    def call_soon_threadsafe(self, *args: Any, **context: Any) -> asyncio.Handle:  # type: ignore[override]
        """As in the base class."""
        self.wakers[waker := threading.get_ident()] = None
        try:
            return super().call_soon_threadsafe(*args, **context)
        finally:
            del self.wakers[waker]  # no call, so that the thread keeps the GIL until it is out of Python


@attrs.frozen
class _Loop:
    """The event loop of one thread."""

    events: _EventLoop
    runner: asyncio.Runner
    gate: asyncio.Semaphore


class Calls:
    """Runs requests, in an event loop for each thread that asks. May be used on several threads."""

    def __init__(self, where: str, width: int):
        """``where`` is for people; ``width`` requests of a thread are in flight at a time."""
        self._where = where
        self._width = width
        self._local = threading.local()
        self._loops: list[_Loop] = []
        self._closed = False

    @property
    def gate(self) -> asyncio.Semaphore:
        """The semaphore that every request of this thread passes."""
        loop: _Loop = self._local.loop
        return loop.gate

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Requests of this thread in the context end after ``seconds`` seconds."""
        outer = self._deadline
        self._local.deadline = min(outer, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._local.deadline = outer

    def at_once(self, ask: Callable[..., Coroutine[Any, Any, T]], *arguments: Iterable[Any]) -> list[T | BackendError]:
        """The result or error of ``ask`` for each tuple of arguments, as `map`. No request is left running.

        Raises BackendError if nothing can be asked.
        """
        if self._closed:
            raise BackendError(f"{self._where}: the tier is closed")
        if _in_event_loop():
            return self._on_another_thread(lambda: self.at_once(ask, *arguments))
        loop: _Loop | None = getattr(self._local, "loop", None)
        if loop is None:
            events = _EventLoop()
            runner = asyncio.Runner(loop_factory=lambda: events)
            loop = self._local.loop = _Loop(events, runner, asyncio.Semaphore(self._width))
            self._loops.append(loop)
        return loop.runner.run(self._run(ask, list(zip(*arguments, strict=True))))

    def one(self, ask: Callable[..., Coroutine[Any, Any, T]], argument: object, *more: object, **how: object) -> T:
        """The result of ``ask`` for these arguments. Raises BackendError."""
        (answer,) = self.at_once(functools.partial(ask, **how), *([each] for each in (argument, *more)))
        if isinstance(answer, BackendError):
            raise answer
        return answer

    def pause(self, seconds: float) -> None:
        """Wait for a random time, at most ``seconds``. Raises BackendError if the call's time is up."""
        if time.monotonic() + seconds > self._deadline:
            raise Unanswered(f"{self._where}: not finished in time")
        time.sleep(random.uniform(0, seconds))

    def close(self) -> None:
        """Close the loops. No call is under way.

        A thread of obstore that is still waking one would abort the process if the interpreter ended meanwhile.
        """
        self._closed = True
        while self._loops:
            loop = self._loops.pop()
            while loop.events.wakers:
                time.sleep(1e-4)
            loop.runner.close()

    def _on_another_thread(self, call: Callable[[], T]) -> T:
        """An engine that is made in a notebook opens its tiers in the notebook's event loop, which runs already."""
        deadline = self._deadline

        def within_the_same_time() -> T:
            self._local.deadline = deadline
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(within_the_same_time).result()

    async def _run(
        self, ask: Callable[..., Coroutine[Any, Any, T]], arguments: Sequence[tuple]
    ) -> list[T | BackendError]:
        tasks = [asyncio.ensure_future(ask(*each)) for each in arguments]
        if not tasks:
            return []
        left = self._deadline - time.monotonic()
        try:
            await asyncio.wait(tasks, timeout=None if left == math.inf else max(left, 0))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return list(map(self._outcome, tasks))

    def _outcome(self, task: asyncio.Future[T]) -> T | BackendError:
        if task.cancelled():
            return Unanswered(f"{self._where}: no answer in time")
        error = task.exception()
        if isinstance(error, BackendError):
            return error.with_traceback(None)  # it would keep the caller's views
        return task.result()

    @property
    def _deadline(self) -> float:
        return getattr(self._local, "deadline", math.inf)


def _in_event_loop() -> bool:
    """Does this thread run an event loop at the moment?"""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
