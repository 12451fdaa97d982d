"""Nodes in processes of their own, which are killed or stopped at each step of their protocol.

Every frame that is read is compared with what was stored, while the slots of its owner are used again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import attrs
import pytest
from nodes import open_node
from patience import wait_until
from servers.ports import free_port
from sizes import some
from test_shown_frames import CONTEXT, KEYS, LAYOUT, SLOTS, hot, is_whole, manager, store
from test_shown_store import FRAMES, Frames, shown

from kvtier_core.types import Seconds
from kvtier_peers.link import Link

#: Methods of `Link`, as they follow each other. Before `showed` all of a frame was sent, but for whether it is whole.
OWNER, READER = ("greet", "tell", "show", "showed"), ("greet", "follow", "request", "frame")
ENDS = [signal.SIGKILL, signal.SIGSTOP]


@contextlib.contextmanager
def process(role, address, step="", how=signal.SIGKILL):
    """A node that churns what it shows at this address, in memory or in a store, or that reads from there.

    The first call of a step ends it.
    """
    command = [sys.executable, __file__, role, address, step, str(int(how))]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as node:
        try:
            yield node
        finally:
            node.kill()


def has_ended(node):
    return node.poll() is not None or "State:\tT" in Path(f"/proc/{node.pid}/status").read_text()


def read(node, keys=KEYS):
    """How many of these frames a node reads. Each is whole."""
    node.contains(keys)
    into = [memoryview(bytearray(LAYOUT.frame_nbytes)) for _ in keys]
    counts = [count if isinstance(count, int) else 0 for count in node.read(keys, into)]
    assert all(is_whole(key, view[:count]) for key, view, count in zip(keys, into, counts, strict=True) if count)
    return sum(map(bool, counts))


@pytest.fixture
def reader(monkeypatch):
    """Opens a node that reads from these addresses."""
    monkeypatch.setattr("kvtier_peers.peer._LONGEST_REST", 0.5)
    with contextlib.ExitStack() as closing:

        def opened(*peers):
            return closing.enter_context(contextlib.closing(open_node(None, CONTEXT, peers=peers, patience=Seconds(1))))

        yield opened


@pytest.mark.parametrize(
    ("role", "step", "how"),
    some(
        product(("shows memory", "shows a store"), OWNER, ENDS),
        ("shows memory", "showed", signal.SIGKILL),
        ("shows memory", "show", signal.SIGSTOP),
        ("shows a store", "show", signal.SIGKILL),
    ),
)
def test_an_owner_that_ends_at_any_step_is_a_miss_and_is_found_again(manager, hot, reader, role, step, how):
    store(manager, *KEYS[:SLOTS])
    address = f"127.0.0.1:{free_port()}"
    with contextlib.closing(open_node(hot.sealed, CONTEXT)) as another, process(role, address, step, how) as owner:
        node = reader(address, another.address)
        wait_until(lambda: read(node) and has_ended(owner))
        wait_until(lambda: read(node, KEYS[:SLOTS]) == SLOTS)
        owner.send_signal(signal.SIGCONT)
        with process(role, address) if how == signal.SIGKILL else contextlib.nullcontext():
            wait_until(lambda: read(node, KEYS[SLOTS:]))


@pytest.mark.parametrize(("step", "how"), some(product(READER, ENDS), ("frame", signal.SIGSTOP)))
def test_a_reader_that_ends_at_any_step_delays_no_other(manager, hot, reader, step, how):
    store(manager, *KEYS[:SLOTS])
    owner = open_node(hot.sealed, CONTEXT, patience=Seconds(1))
    with process("reads", owner.address, step, how) as other:
        wait_until(lambda: has_ended(other))
        node = reader(owner.address)
        wait_until(lambda: read(node) == SLOTS)
        store(manager, KEYS[SLOTS])
        wait_until(lambda: read(node, KEYS[SLOTS:]) == 1)
        assert not manager.pins_by_holder()
        owner.close()


@pytest.mark.more
@pytest.mark.parametrize("role", ["shows memory", "shows a store"])
def test_of_a_thousand_frames_whose_owner_is_stopped_and_killed_again_and_again_none_is_wrong(reader, role):
    draw, address, whole = random.Random(0), f"127.0.0.1:{free_port()}", 0
    node = reader(address)
    for enough in (250, 500, 750, 1000):
        with process(role, address) as owner:
            for how in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
                wait_until(lambda how=how: how == signal.SIGCONT or read(node))
                timer = threading.Timer(draw.uniform(0.1, 0.5), owner.send_signal, [how])
                timer.start()
                while timer.is_alive() or (how == signal.SIGCONT and whole < enough):
                    whole += read(node)


# -- in the other process ----------------------------------------------------------------------------


def _end_at(step, how):
    """This process, in the first call."""
    method = getattr(Link, step)

    def ending(link, *arguments):
        setattr(Link, step, method)
        os.kill(os.getpid(), how)
        return method(link, *arguments)

    setattr(Link, step, ending)


def _shows_memory(address):
    arena = hot.__wrapped__()
    stack, draw = next(manager.__wrapped__(arena)), random.Random(os.getpid())
    store(stack, *KEYS[:SLOTS])
    open_node(arena.sealed, CONTEXT, listen=address, patience=Seconds(1))
    while True:
        store(stack, draw.choice(KEYS))


def _shows_a_store(address):
    kept, draw = shown(Frames(FRAMES)), random.Random(os.getpid())
    open_node(None, attrs.evolve(CONTEXT, stored=[kept]), listen=address, patience=Seconds(1))
    while True:
        key = draw.choice(KEYS)
        kept.delete([key])
        kept.write([key], [FRAMES[key]])


def _reads(address):
    node = open_node(None, CONTEXT, peers=[address], patience=Seconds(1))
    while True:
        read(node)


if __name__ == "__main__":
    _, role, where, step, how = sys.argv
    if step:
        _end_at(step, int(how))
    {"shows memory": _shows_memory, "shows a store": _shows_a_store, "reads": _reads}[role](where)
