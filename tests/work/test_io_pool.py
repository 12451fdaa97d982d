"""The one pool: loads first, continuations on the owner's thread, and an end that always comes."""

from __future__ import annotations

import asyncio
import threading

import pytest
from patience import HANG

from kvtier_core.errors import KvtierError
from kvtier_core.work.io_pool import IOPool, Outcome


class Gate:
    """Work that holds its thread until it is let go."""

    def __init__(self):
        self.begun = threading.Event()
        self._go = threading.Event()

    def __call__(self):
        self.begun.set()
        assert self._go.wait(HANG)
        return "through"

    def open(self):
        self._go.set()


class Journal(list):
    """The outcomes, in the order in which their continuations ran."""

    def under(self, name):
        return lambda outcome: self.append((name, outcome.value))


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def pool(gate):
    pool = IOPool("test")
    yield pool
    gate.open()
    assert pool.close(HANG)


@pytest.fixture
def journal():
    return Journal()


def finish(pool):
    while pool.jobs:
        pool.wait(HANG)
        assert pool.step(), "nothing came"


def test_loads_overtake_stores(pool, gate, journal):
    pool.submit_store(gate, journal.under("gate"))
    assert gate.begun.wait(HANG)
    for i in range(3):
        pool.submit_store(lambda i=i: i, journal.under("store"))
    for i in range(3):
        pool.submit_load(lambda i=i: i, journal.under("load"))
    gate.open()
    finish(pool)
    loads, stores = [("load", i) for i in range(3)], [("store", i) for i in range(3)]
    assert journal == [("gate", "through"), *loads, *stores]


def test_work_is_done_elsewhere_and_continued_here_in_step(pool):
    seen = []

    def continued(outcome):
        seen.extend([outcome.value, threading.current_thread()])

    pool.submit_load(threading.current_thread, continued)
    pool.wait(HANG)
    assert seen == [], "continued before step"
    assert pool.step() == 1
    worker, owner = seen
    assert owner is threading.current_thread()
    assert (worker.name, worker.daemon) == ("kvtier-test-0", True)
    assert pool.step() == 0


def test_an_exception_of_the_work_is_its_outcome(pool):
    outcomes, error = [], ZeroDivisionError("planned")

    def fail():
        raise error

    pool.submit_store(fail, outcomes.append)
    pool.submit_store(lambda: "after", outcomes.append)
    finish(pool)
    assert outcomes == [Outcome(error=error), Outcome(value="after")]


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_no_plugin_can_end_a_thread(pool, error):
    """These two are no Exception, and a plugin with an event loop or somebody's script inside raises them."""
    outcomes = []

    def fail():
        raise error

    pool.submit_store(fail, outcomes.append)
    pool.submit_store(lambda: "after", outcomes.append)
    for _ in range(20):
        pool.wait(0.05)
        pool.step()
    assert [type(outcome.error) for outcome in outcomes] == [error, type(None)]


def test_jobs_counts_what_is_not_continued(pool, gate, journal):
    counts = []
    assert pool.jobs == 0
    pool.submit_store(gate, lambda outcome: counts.append(pool.jobs))
    assert gate.begun.wait(HANG)
    pool.submit_load(lambda: None, lambda outcome: pool.submit_load(lambda: "more", journal.under("later")))
    assert pool.jobs == 2
    gate.open()
    finish(pool)
    assert counts == [1], "a continuation is not counted while it runs"
    assert journal == [("later", "more")]
    assert pool.jobs == 0


def test_threads_work_side_by_side(journal):
    pool = IOPool("test", threads=2)
    together = threading.Barrier(2)
    for _ in range(2):
        pool.submit_load(lambda: together.wait(HANG) >= 0, journal.under("met"))
    finish(pool)
    assert journal == [("met", True)] * 2
    assert pool.close(HANG)


def test_close_drops_what_has_not_begun_and_tells_what_hangs(pool, gate, journal):
    pool.submit_load(gate, journal.under("gate"))
    assert gate.begun.wait(HANG)
    pool.submit_load(lambda: None, journal.under("dropped"))
    pool.submit_store(lambda: None, journal.under("dropped"))
    assert pool.close(timeout=0.1) is False
    gate.open()
    assert pool.close(timeout=HANG) is True
    pool.step()
    assert journal == [("gate", "through")]
    assert pool.jobs == 0, "waits for what was dropped"


def test_a_closed_pool_accepts_no_work(pool):
    assert pool.close(HANG)
    for submit in (pool.submit_load, pool.submit_store):
        with pytest.raises(KvtierError) as caught:
            submit(lambda: None, lambda outcome: None)
        assert str(caught.value) == "the pool is closed"
    assert pool.jobs == 0
    assert pool.close(HANG), "may be called twice"


def test_the_longest_work_is_known_while_it_runs():
    pool, release = IOPool("test", threads=2), threading.Event()
    assert pool.longest() == 0.0
    begun = threading.Event()
    pool.submit_load(lambda: (begun.set(), release.wait()), lambda outcome: None)
    begun.wait()
    first = pool.longest()
    while pool.longest() <= first:
        pass
    release.set()
    pool.wait(HANG)
    assert pool.step() == 1
    assert pool.longest() == 0.0
    assert pool.close(10.0)
