"""A stack that was closed leaves nothing: no memory, thread, descriptor, or bytes in the books."""

from __future__ import annotations

import gc
import os
import threading
import weakref

from books import used
from patience import wait_until
from served import FRAME, serving
from test_tenants import OURS, ask

from kvtier_core.types import Nbytes
from kvtier_serve.operators.console import Console
from kvtier_testing.samples import make_keys


def held_by(server):
    """Threads and descriptors of the process, and bytes that tenants have and stacks may have."""
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier"))
    memory = [(each.extents.free, len(each.extents._shares)) for each in server.spaces.memories]
    return threads, len(os.listdir("/proc/self/fd")), used(server.spaces.tenants), memory


def held_at_rest(server):
    """The same when no stack is being closed; None while one is."""
    held = server.ask(lambda: held_by(server)).result()
    return None if "kvtier-close" in held[0] else held


def test_epochs_beside_two_engines_leave_nothing(tmp_path):
    gc.collect()  # what earlier tests left: it would be closed meanwhile
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": str(Nbytes(99 * FRAME)), "shared": True}
    with serving(tmp_path, 64, {**disk, "min_free": "0B"}) as served:
        server = served.server
        console = server.ask(lambda: Console(server)).result()
        for model in ("one", "other"):
            ask(served.stack(model), make_keys(4), OURS)
        managers, before = [], None
        for epoch in range(13):
            stack = served.stack("one", epoch=str(epoch))
            for _ in range(2):
                ask(stack, make_keys(6), OURS)
            managers += [weakref.ref(space.stack) for space in server.spaces if len(space.namespace.facts) > 1]
            stack.close()
            served.stacks.remove(stack)
            wait_until(
                lambda: len(server.spaces._stacks) == len(server.sessions) == 2 and not server.spaces._aside._threads
            )
            before = before or wait_until(lambda: held_at_rest(server))
        del stack

        def gone():
            server.ask(lambda: None).result()  # its last turn may still have had one
            gc.collect()
            return not any(manager() for manager in managers)

        wait_until(gone)
        assert len(managers) == 13 and len(console.metrics._readings) <= 2
        wait_until(lambda: server.ask(lambda: held_by(server)).result() == before)
