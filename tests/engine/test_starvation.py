"""An engine whose threads get no core says so in its log; one that only waits for others, or sleeps, does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_host import Host, prompt
from test_scheduler_side import stack  # noqa: F401 - a fixture
from test_waiting import Clock

from kvtier_core.engine import starvation
from kvtier_core.engine.starvation import Starvation
from kvtier_core.engine.worker.side import WorkerSide

EVERY = 10.0


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch):
    monkeypatch.setattr(starvation, "_EVERY", EVERY)


@pytest.fixture
def said(caplog):
    """``said()`` are the lines about cores."""
    caplog.set_level("WARNING", logger="kvtier")
    return lambda: [line for line in caplog.messages if "for a core" in line]


@pytest.fixture
def one_busy_core(as_shipped, monkeypatch):
    """This thread has one core, and shares it with two others that never wait."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    monkeypatch.setattr(starvation, "_EVERY", 0.5)
    yield
    for each in rivals:
        each.kill()
        each.wait()
    os.sched_setaffinity(0, cores)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel does not count waits")
@pytest.mark.parametrize("who", ["rank 3", "scheduler"])
def test_a_thread_that_others_keep_from_its_core_is_in_the_log(one_busy_core, stack, said, who):  # noqa: F811
    if who == "scheduler":
        host = Host(stack())
        request = host.submit("long", prompt(1, 60))
        step, close = host.step, lambda: (host.finish(request, "abort"), host.close())
    else:
        side = WorkerSide([], 3, lambda layout: None, [])
        step, close = side.progress, side.close
    while not said():
        step()
    close()
    assert said()[0].startswith(f"kvtier: {who}: too few cores: other programs use its cores")
    assert "OMP_NUM_THREADS" in said()[0]


class Thread:
    """A thread of which the test says for how many seconds it has run, and waited for a core."""

    def __init__(self, folder):
        self.clock = Clock()
        self.file = folder / "schedstat"
        self.ran = self.waited = 0.0
        self.watch = Starvation("rank 0", self.clock, self.file)
        self.passes(0.0)

    def passes(self, seconds, *, ran=0.0, waited=0.0):
        """So much time passes, of which the thread runs and waits so much."""
        self.clock.now += seconds
        self.ran, self.waited = self.ran + ran, self.waited + waited
        self.file.write_text(f"{int(self.ran * 1e9)} {int(self.waited * 1e9)} 17\n")
        self.watch.look()


@pytest.mark.parametrize(
    "passed",
    [
        pytest.param([(10, 5.0, 5.0)] * 5, id="it runs for as long as it waits"),
        pytest.param([(10, 10.0, 0.0)] * 5, id="it always runs"),
        pytest.param([(3600, 1.0, 30.0)], id="it mostly sleeps"),
        pytest.param([(1, 0.0, 1.0)] * 5 + [(5, 5.0, 0.0)], id="it waited for a short time"),
    ],
)
def test_a_thread_that_does_not_starve_is_not_in_the_log(tmp_path, said, passed):
    thread = Thread(tmp_path)
    for seconds, ran, waited in passed:
        thread.passes(seconds, ran=ran, waited=waited)
    assert said() == []


def test_the_line_has_the_figures_and_comes_once_a_minute(tmp_path, said):
    thread = Thread(tmp_path)
    for _ in range(13):
        thread.passes(10.0, ran=2.0, waited=8.0)
    first, *more = said()
    assert first.startswith("kvtier: rank 0: too few cores: other programs use its cores (")
    assert first.endswith(": it waited 8.0 s of 10.0 s for a core")
    waited = "it waited 8.0 s of 10.0 s for a core"
    assert more == [f"kvtier: rank 0: too few cores: {n} more in 60 s: {waited}" for n in (5, 6)]


def test_one_long_step_is_enough(tmp_path, said):
    thread = Thread(tmp_path)
    thread.passes(121.0, ran=15.0, waited=100.0)
    assert "it waited 100.0 s of 121.0 s for a core" in said()[0]


@pytest.mark.parametrize("content", [None, "", "0", "none of this"])
def test_where_the_kernel_does_not_count_nothing_is_read_again(tmp_path, said, content):
    file = tmp_path / "schedstat"
    if content is not None:
        file.write_text(content)
    watch = Starvation("rank 0", clock := Clock(), file)
    for clock.now in (0.0, 10.0, 20.0):
        watch.look()
        file.write_text(f"0 {int(clock.now * 1e9)} 1")
    assert said() == []
