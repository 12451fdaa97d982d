"""A worker attaches while its server is stopped: it tries again when the server answers."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch
from patience import assert_never, wait_until
from served import LAYOUT, PATIENT
from servers.stopping import stopped
from test_kills import server

from kvtier_core.engine.messages import StepPlan
from kvtier_core.engine.scheduler.self_test_gate import SelfTestGate
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.types import Namespace
from kvtier_remote import memory
from kvtier_remote.client import RemoteStack
from kvtier_remote.protocol import Opening

BLOCKS = 8


class Engine:
    """A gate and a worker, which are told of each other as in an engine's steps."""

    def __init__(self, path):
        self.stack = RemoteStack(path, Opening("model", "engine", Namespace.of({}), LAYOUT), PATIENT)
        self.gate = SelfTestGate(self.stack, LAYOUT)
        caches = {name: torch.rand(BLOCKS, nbytes // 4) for name, nbytes in (("a", 1024), ("b", 3072))}
        runs = tuple(PageRun(each.data_ptr(), each[0].nbytes, each[0].nbytes) for each in caches.values())
        self.worker = WorkerSide([], 0, lambda layout: PagedKVCache(runs, BLOCKS, "cpu", 0, layout), [caches])
        self.attempts = 0

    def step(self):
        self.stack.step()
        self.gate.renew()
        slots = self.gate.slots
        handles, layout = (tuple(self.stack.handles.values()), LAYOUT) if slots else ((), None)
        self.worker.attach(StepPlan(self.gate.attachment, handles, {}, layout, slots))
        if progress := self.worker.progress():
            self.attempts += 1
            self.gate.record(progress)

    def close(self):
        self.worker.close()
        self.stack.close()


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """A server that stopped when its engine had opened its stack, and that engine."""
    monkeypatch.setattr(memory, "_PATIENCE", 0.1)
    path = tmp_path / "kvtier.sock"
    with server(tmp_path, path) as running, contextlib.closing(Engine(path)) as engine:
        wait_until(lambda: engine.stack.step() or engine.gate.renew() or engine.gate.slots)
        with stopped(running.pid):
            engine.step()
            assert "does not answer: it has not answered" in engine.gate.failure
            yield engine, running


def test_a_worker_attaches_again_when_its_server_answers_again(stalled):
    engine, running = stalled
    assert_never(lambda: engine.step() or engine.attempts > 1, 2.5)
    running.send_signal(signal.SIGCONT)
    wait_until(lambda: engine.step() or not engine.gate.failure)
    wait_until(lambda: engine.step() or engine.gate.is_open)
    assert not engine.gate.failure


def test_a_fault_that_the_self_test_found_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_core.engine.worker.side.try_copies", lambda *arguments: "other bytes")
    path = tmp_path / "kvtier.sock"
    with server(tmp_path, path), contextlib.closing(Engine(path)) as engine:
        wait_until(lambda: engine.step() or engine.gate.failure)
        assert_never(lambda: engine.step() or engine.attempts > 1, 2.5)
        assert "other bytes" in engine.gate.failure
