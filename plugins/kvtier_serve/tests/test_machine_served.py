"""The state machine of the stack over a server: what holds in a process holds across a socket."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test
from machine import LAYOUT, NAMESPACE, StackMachine
from served import PATIENT, config_of
from sizes import some
from stack.test_machine import BRIEF, SHAPES

from kvtier_remote.client import RemoteStack
from kvtier_remote.connection import Connection
from kvtier_remote.protocol import Opening, ServedFrame
from kvtier_serve.server import Server
from kvtier_serve.sessions import Session, Space


class Turning(RemoteStack):
    """A stack whose server has this thread, and runs while the client waits."""

    def __init__(self, server, manager, **options):
        self.manager = manager
        self.server = server
        super().__init__(server.path, Opening("model", "machine", NAMESPACE, LAYOUT), PATIENT, **options)

    def drain(self, timeout):
        while self.server.turn(0):
            pass
        self.manager.drain(timeout)
        return super().drain(timeout)


class Served(StackMachine):
    """A session of its own server."""

    def as_engine_has(self, manager):
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-")
        self.server = server = Server(config_of(1), Path(self.folder.name) / "s")
        server.spaces.add(Space("model", NAMESPACE, LAYOUT, manager))
        self.waits = pytest.MonkeyPatch()
        self.waits.setattr(Connection, "wait", lambda self, seconds: server.turn(0))
        return Turning(server, manager, clock=lambda: 0.0)  # the server is never slow: it has this thread

    def callees(self):
        """Its session, and another one beside it."""
        (space,) = self.server.spaces
        (session,) = space.sessions
        another = Session(0, session.opening, space)
        space.sessions.discard(another)  # it is not in the way of an epoch
        return [session, another]

    def call(self, callee, name, arguments):
        if frames := arguments.get("frames"):
            arguments = {**arguments, "frames": [ServedFrame._make(frame) for frame in frames]}
        super().call(callee, name, arguments)

    def remembering(self):
        return [*self.server.spaces, *self.server.sessions.values()]

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.manager.close()
            self.waits.undo()
            self.server.close(0.0)
            self.folder.cleanup()


@pytest.mark.long
@pytest.mark.parametrize("shape", some(SHAPES, "workers read both tiers", "a shared store"))
def test_any_interleaving_keeps_the_promises_through_a_server(shape):
    machine = type("Machine", (Served,), SHAPES[shape])
    run_state_machine_as_test(machine, settings=BRIEF)
