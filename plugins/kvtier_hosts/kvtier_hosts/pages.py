"""A store of opaque pages under keys of bytes, for hosts that move KV themselves and want tiers below their memory.

Each page is the payload of a frame in the stack that a configuration describes, with its index, policies, breakers,
verification, capacity and metrics. A thread of this store is the owner of that stack. Only that thread touches the
pages of the host, while it copies one to or from a slot: a store that hangs holds none of them.
"""

from __future__ import annotations

import abc
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.errors import ContractError
from kvtier_core.forks import ProcessBound
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import run, run_aside
from kvtier_hosts.page_stack import PageStack

logger = logging.getLogger("kvtier")

#: Seconds between two looks while there are jobs, whose time is limited, and otherwise. Finished work wakes it.
_TICK, _IDLE_TICK = 0.02, 0.5


@attrs.frozen
class Result:
    """The end of a job."""

    ticket: int
    keys: frozenset[bytes]  #: those that were taken, read, or found; the others were not
    seconds: float  #: since it was submitted


@attrs.define(eq=False)
class _Job(abc.ABC):
    """Owner's thread only, once it was submitted."""

    call: ClassVar[str]  #: the method of `PageStore` that submits it
    ticket: int
    pages: dict[bytes, Any]  #: by key, those that have not ended; None for one that is only looked for
    begun: float = attrs.field(factory=time.monotonic)
    good: set[bytes] = attrs.field(factory=set)

    def holder(self, key: bytes) -> str:
        """The name under which the stack keeps something for a page of this job."""
        return f"{self.ticket} {key.hex()}"

    def end(self, keys: Iterable[bytes], *, good: bool) -> None:
        """The job is done with these pages."""
        ended = list(keys)
        for key in ended:
            del self.pages[key]
        if good:
            self.good.update(ended)

    @abc.abstractmethod
    def advance(self, stack: PageStack, room: int, *, late: bool) -> int:
        """Do what can be done now, with ``room`` more slots for reads; returns how many of them are in use afterwards.

        If it is ``late``, end everything.
        """


class _Put(_Job):
    call = "put"

    def advance(self, stack: PageStack, room: int, *, late: bool) -> int:
        self.end(stack.known(self.pages), good=True)
        while self.pages and (taken := stack.take(self.pages, f"{self.ticket}")):
            self.end(taken, good=True)
        if late or not stack.jobs:  # nothing that is under way will make room
            self.end(self.pages, good=False)
        return 0


@attrs.define(eq=False)
class _Get(_Job):
    call = "get"
    begun_reads: set[bytes] = attrs.field(factory=set)

    def advance(self, stack: PageStack, room: int, *, late: bool) -> int:
        for key in list(self.pages):
            if key not in self.begun_reads and len(self.begun_reads) >= room:
                break
            self.begun_reads.add(key)
            fetched = stack.fetch(key, self.holder(key), self.pages[key])
            if fetched is not None:
                self.begun_reads.discard(key)
                self.end([key], good=fetched)
        if late:
            for key in self.begun_reads:
                stack.release(self.holder(key))
            self.begun_reads.clear()
            self.end(self.pages, good=False)
        return len(self.begun_reads)


@attrs.define(eq=False)
class _Contains(_Job):
    call = "contains"
    asked: bool = False

    def advance(self, stack: PageStack, room: int, *, late: bool) -> int:
        if not self.asked:
            stack.name(self.pages)
        self.end(stack.known(self.pages), good=True)
        for key in list(self.pages):
            if not self.asked:
                stack.ask(key)
            if late or not stack.is_asked(key):
                self.end([key], good=False)
        self.asked = True
        return 0


class PageStore(ProcessBound):
    """Pages of ``page_nbytes`` each. Any thread may call any method; only `cancel`, `renew` and `close` wait.

    `put`, `get` and `contains` return a ticket, and `poll` its `Result`, once, not much later than the configuration's
    ``load_wait``, whatever the stores do. Until then the pages are lent: contiguous, writable memoryviews of bytes. The
    keys of one call should be those of one prompt, first page first: policies treat them as a path.
    """

    def __init__(
        self,
        config: StackConfig,
        namespace: Namespace,
        page_nbytes: int,
        *,
        replica: int = 0,
        replicas: int = 1,
        told: Callable[[str], None] = lambda call: None,
        follow: bool = False,
    ):
        """``namespace`` has all facts that pages depend on and that the host's keys do not cover.

        ``replica`` is the number of this engine among the ``replicas`` that share the configuration. ``told`` is called
        on any thread when `poll` has a result, with the name of the method that began it; it must not wait. With
        ``follow`` the store notes what `changes` returns.

        Raises ConfigError.
        """
        self._told = told
        self._page_nbytes = page_nbytes
        self._wait = config.load_wait
        self._tickets = itertools.count()
        self._inbox: deque[_Job | Callable[[], None]] = deque()
        self._results: deque[Result] = deque()
        self._changes: deque[tuple[bytes, bool]] = deque()
        self._jobs: list[_Job] = []
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of what is below: nothing is submitted once it is off
        self._off = False
        self._process = os.getpid()
        of_engine = {"replica": replica, "replicas": replicas}
        noted = (lambda page, here: self._changes.append((page, here))) if follow else None
        self._stack = PageStack(config, namespace, page_nbytes, wake=self._wake.set, follow=noted, **of_engine)
        self._thread = run_aside(self._serve, "pages")

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Take copies of pages, which are then written to the tiers that admit them. What is taken may still be lost.

        Raises ContractError for a page of another length.
        """
        return self._submit(_Put, self._checked(keys, pages))

    def get(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Fill pages with verified bytes. A page whose key is not in the result is unchanged.

        Raises ContractError for a page of another length.
        """
        return self._submit(_Get, self._checked(keys, pages))

    def contains(self, keys: Sequence[bytes]) -> int:
        """Which pages are there? Shared stores are asked, too. Call it once for each request that names them."""
        return self._submit(_Contains, dict.fromkeys(keys))

    def poll(self) -> list[Result]:
        """The results since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def changes(self) -> list[tuple[bytes, bool]]:
        """Pages that came to the tiers of this process, or left the last of them, since the last call, in this order.

        Each with whether it came. Only of pages that were put or got here.
        """
        return [self._changes.popleft() for _ in range(len(self._changes))]

    @property
    def busy(self) -> bool:
        """Has a job not ended, or is anything on its way to or from the tiers? As of a moment ago."""
        return bool(self._inbox or self._jobs or self._stack.jobs)

    def cancel(self) -> None:
        """End all jobs: when this returns, `poll` has their results, and no page of the host is touched any more."""
        self._call(self._end_all)

    def renew(self) -> None:
        """End all jobs, and never find again what was stored so far: the weights may have changed."""
        self._call(self._renew)

    def close(self) -> None:
        """Let writes under way finish for a few seconds, then close every tier. May be called twice."""
        self._call(self._close)
        self._thread.join()

    # -- the host's threads ------------------------------------------------------------------------

    def _checked(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> dict[bytes, memoryview]:
        if wrong := [page.nbytes for page in pages if page.nbytes != self._page_nbytes or page.readonly]:
            raise ContractError(f"expected a page of {self._page_nbytes} writable bytes, got {wrong[0]}")
        return dict(zip(keys, pages, strict=True))

    def _submit(self, kind: type[_Job], pages: Mapping[bytes, memoryview | None]) -> int:
        job = kind(next(self._tickets), dict(pages))
        if not self._hand_over(job):
            self._tell(job)
        return job.ticket

    def _call(self, work: Callable[[], object]) -> None:
        """Have the owner do this work, and wait for it. It waits for no store, except when it closes."""
        done = threading.Event()

        def called() -> None:
            try:
                work()
            finally:
                done.set()

        if self._hand_over(called):
            done.wait()

    def _hand_over(self, what: _Job | Callable[[], None]) -> bool:
        """False if there is no owner any more, or if, in a forked process, there never was one."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            if self._off:
                return False
            self._inbox.append(what)
        self._wake.set()
        return True

    # -- the owner's thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._off:
            self._wake.wait(_TICK if self._jobs else _IDLE_TICK)
            self._wake.clear()
            outcome = run(self._turn)
            if outcome.error is not None:
                logger.error("kvtier: pages are no longer stored or found", exc_info=outcome.error)
                run(self._close)

    def _turn(self) -> None:
        while self._inbox:
            work = self._inbox.popleft()
            if isinstance(work, _Job):
                self._jobs.append(work)
            else:
                work()
        if self._off:
            return
        self._stack.step()
        room, now = max(1, self._stack.slots // 2), time.monotonic()  # the other slots are for pages to be written
        for job in list(self._jobs):
            room -= job.advance(self._stack, room, late=now > job.begun + self._wait)
            if not job.pages:
                self._jobs.remove(job)
                self._tell(job)
        self._stack.step()

    def _tell(self, job: _Job) -> None:
        self._results.append(Result(job.ticket, frozenset(job.good), time.monotonic() - job.begun))
        self._told(job.call)

    def _end_all(self) -> None:
        ended, self._jobs = self._jobs, []
        for job in ended:
            self._tell(job)
        for job in ended:
            for key in job.pages:
                self._stack.release(job.holder(key))

    def _renew(self) -> None:
        self._end_all()
        self._stack.renew()

    def _close(self) -> None:
        if self._off:  # another thread has closed it meanwhile
            return
        try:
            self._end_all()
            self._stack.close()
        finally:
            with self._lock:
                self._off = True
            for work in self._inbox:
                self._tell(work) if isinstance(work, _Job) else work()
            self._inbox.clear()
