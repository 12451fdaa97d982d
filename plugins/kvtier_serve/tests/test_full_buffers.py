"""A stall of its server leaves no engine without a cache: whatever was called meanwhile is sent when it goes on.

The buffers of the sockets hold 4 KiB, a fiftieth of the usual, as do calls and bounds; time is told by the test.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket

import pytest
from engine_process import LAYOUT as PAGES
from engine_process import NAMESPACE
from patience import HANG, wait_until
from served import LAYOUT, PATIENT, config_of, serving
from servers.stopping import stop
from test_kills import server as server_process
from test_shared_stack import busy, store

from kvtier_core.types import Namespace
from kvtier_remote import client, engine_session
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.connection import Connection, connect
from kvtier_remote.protocol import Opening
from kvtier_serve.server import Server
from kvtier_testing.samples import make_keys

KEYS = make_keys(300)
STORED, OTHERS = KEYS[:4], [KEYS[4:5], KEYS[5:45], KEYS[45:]]
MOST_UNSENT = engine_session._MOST_UNSENT // 50
#: Seconds between two steps of an engine, and steps within which its cache has to be back.
STEP, STEPS = 0.05, 20


def narrow(connection):
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, 4096)
    return connection


class Engine:
    """An engine and its server, which has this thread, too: it stands still until `serve`."""

    def __init__(self, folder, drawn):
        self.now, self.drawn, self.holders, self.requests = 0.0, drawn, [], 0
        self.server = Server(config_of(16), folder / "s")
        opening = Opening("model", "engine", Namespace.of({}), LAYOUT)
        self.stack = RemoteStack(self.server.path, opening, Waits(0.0, 0.0, 0.0), lambda: self.now)
        wait_until(lambda: self.serve() or self.stack.step() or self.stack.media)
        (space,) = self.server.spaces
        assert space.stack.reserve(STORED, "another")  # the engine does not wait for an answer
        space.stack.commit("another")

    def serve(self):
        while self.server.turn(0):
            pass

    def call(self):
        """Anything that an engine may call at any time."""
        path = self.drawn.choice([STORED, *OTHERS])
        match self.drawn.randrange(6):
            case 0:
                self.stack.on_request(path)
                self.stack.prefetch(path)
            case 1:
                self.requests += 1
                self.holders.append(f"request {self.requests}")
                self.stack.lookup(path, self.holders[-1])
            case 2 if self.holders:
                self.stack.release(self.holders.pop(self.drawn.randrange(len(self.holders))))
            case 3:
                self.stack.release("a request that looked up nothing")
            case 4:
                self.stack.ask_whereabouts(path, len)
            case _:
                self.stack.step()
        self.now += self.drawn.choice([0.0, 0.0, 0.001, STEP])

    def unsent(self):
        return self.stack._session.connection.unsent

    def is_back_soon(self):
        """The server goes on. A second later the engine finds what it has stored."""
        for _ in range(STEPS):
            self.serve()
            self.stack.step()
            self.now += STEP
        self.stack.lookup(STORED, "back")
        self.serve()
        assert len(self.stack.lookup(STORED, "back").slots) == len(STORED)
        self.stack.release("back")


@pytest.fixture
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_session, "_MOST_UNSENT", MOST_UNSENT)
    monkeypatch.setattr(client, "connect", lambda path: narrow(connect(path)))
    monkeypatch.setattr("kvtier_serve.server.Connection", lambda sock: narrow(Connection(sock)))
    engine = Engine(tmp_path, random.Random(request.param))
    yield engine
    engine.stack.close(0.0)
    engine.serve()
    engine.server.close(0.0)


@pytest.mark.parametrize("engine", range(20), indirect=True, ids="seed {}".format)
def test_the_cache_is_back_after_any_stall(engine):
    for _ in range(5):
        for _ in range(engine.drawn.randrange(300)):
            engine.call()
            if engine.drawn.random() < 0.01:
                engine.server.turn(0)
        engine.is_back_soon()


@pytest.mark.parametrize("engine", [0], indirect=True)
def test_a_stall_without_end_holds_a_bounded_amount_of_calls(engine):
    for _ in range(30_000):
        engine.call()
    assert engine.unsent() < 3 * MOST_UNSENT
    engine.is_back_soon()


def test_an_engine_that_was_idle_meanwhile_finds_at_its_first_request(tmp_path):
    with serving(tmp_path) as served:
        now = 0.0
        opening = Opening("model", "engine", Namespace.of({}), LAYOUT)
        stack = RemoteStack(served.path, opening, PATIENT, lambda: now)
        served.stacks.append(stack)
        store(stack, STORED)
        stack.drain(HANG)
        with busy(served.server):
            while not stack._session.connection.unsent:
                stack.prefetch(OTHERS[-1])
            now += 3600
            assert "does not answer" in stack.lookup(STORED, "during").miss_reason
        served.server.ask(lambda: None).result()  # by now it has answered a call
        assert len(stack.lookup(STORED, "first").slots) == len(STORED)


def test_a_server_that_is_stopped_during_a_burst_is_used_when_it_goes_on(tmp_path):
    """In a process of its own, and with the buffers that sockets have: nothing was taken from them meanwhile."""
    path = tmp_path / "kvtier.sock"
    with server_process(tmp_path, path) as running:
        stack = RemoteStack(path, Opening("model", "engine", NAMESPACE, PAGES), Waits(others=HANG))
        with contextlib.closing(stack):
            store(stack, OTHERS[1][:8])
            stack.drain(HANG)
            stop(running.pid)
            requests = 0
            while not stack._session.connection.unsent:
                requests += 1
                stack.on_request(OTHERS[1])
                stack.prefetch(OTHERS[1])
                stack.lookup(OTHERS[1], f"request {requests}")
            for number in range(requests):
                stack.release(f"request {number + 1}")
            running.send_signal(signal.SIGCONT)
            wait_until(lambda: stack.step() is not None and stack.lookup(OTHERS[1], "request").chunks == 8)
