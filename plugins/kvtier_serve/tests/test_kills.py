"""An engine, or the server, is killed before every step of the protocol. Nothing leaks, and nobody gets wrong bytes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import BLOCKS, LAYOUT, NAMESPACE, OWN, STEPS, filled
from patience import wait_until
from served import PATIENT, serving
from servers.kvtier import kvtier_serve
from sizes import every_third

from kvtier_remote.client import RemoteStack
from kvtier_remote.memory import served_tier
from kvtier_remote.protocol import Opening
from kvtier_testing.samples import PagedBuffer

SCRIPT = Path(__file__).with_name("engine_process.py")


@contextlib.contextmanager
def process(*command, ready, **options):
    """A process that has said this word."""
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, **options) as running:
        try:
            while ready not in (line := running.stdout.readline()):
                assert line, "it has ended"
            yield running
        finally:
            running.kill()


def engine(path, steps, which="STEPS"):
    return process(sys.executable, str(SCRIPT), str(path), which, str(steps), ready="ready")


def serves(path):
    """How many chunks another engine finds, which have the right bytes. It stores those that it does not."""
    stack = RemoteStack(path, Opening("model", "another", NAMESPACE, LAYOUT), PATIENT)
    buffer, expected = filled(), filled()
    handle = next(iter(stack.handles.values()))
    mover = served_tier(handle).config.attach(handle, buffer.kv_cache())
    pages = [[list(range(BLOCKS))]]
    found = stack.lookup(OWN, "request").slots
    for slot in found:
        erase(buffer)
        mover.load(1, [slot.index], pages)
        mover.wait([1])
        assert buffer.everything() == expected.everything(), "other bytes than those that were stored"
    stack.release("request")
    if slots := stack.reserve(OWN, "store"):
        mover.store(2, pages * len(slots), [slot.index for slot in slots.values()])
        mover.wait([2])
        stack.commit("store")
    assert len(stack.lookup(OWN, "request").slots) == len(OWN), "what was stored is not found"
    stack.release("request")
    mover.close()
    stack.close()
    return len(found)


def erase(buffer: PagedBuffer):
    for layer in range(2):
        for block in range(BLOCKS):
            nbytes = LAYOUT.groups[0].page_nbytes[layer]
            buffer.put(layer, block, bytes(nbytes))


def at_rest(server):
    """Nothing is held, and every slot is free or READY."""
    arenas = [arena for space in server.spaces for arena in space.stack.arenas]
    return not server.sessions and not any(arena.pins or arena.reserved for arena in arenas)


@pytest.mark.parametrize("steps", every_third(range(len(STEPS))), ids=[step.__name__ for step in STEPS])
def test_an_engine_that_is_killed_leaves_nothing_behind(steps, tmp_path):
    with serving(tmp_path, slots=8) as served:
        with engine(served.path, steps) as killed:
            killed.send_signal(signal.SIGKILL)
        wait_until(lambda: at_rest(served.server))
        stored = STEPS.index(next(step for step in STEPS if step.__name__ == "commits"))
        renewed = STEPS.index(next(step for step in STEPS if step.__name__ == "begins_an_epoch"))
        assert serves(served.path) == (len(OWN) if stored < steps <= renewed else 0)
        wait_until(lambda: at_rest(served.server))


@pytest.mark.parametrize("steps", every_third(range(1, len(STEPS))), ids=[step.__name__ for step in STEPS[1:]])
def test_an_engine_goes_on_when_its_server_is_killed(steps, tmp_path):
    path = tmp_path / "kvtier.sock"
    with server(tmp_path, path) as killed, engine(path, steps) as running:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        running.stdin.write("go\n")
        running.stdin.flush()
        ended = running.stdout.read()
        assert "done" in ended or STEPS[steps].__name__ in ("opens", "reserves_for_a_self_test", "attaches")


def server(folder, path, *stores, keep=None, capacity="1MiB"):
    """A server in a process of its own."""
    file = folder / "kvtier.yaml"
    kept = f", keep: {keep}" if keep else ""
    below = "".join(f"  - {json.dumps(store)}\n" for store in stores)
    file.write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: {capacity}, huge_pages: off{kept}}}\n{below}")
    return kvtier_serve(file, path, signal.SIGKILL)
