"""An engine in a process of its own that uses a server step by step: a test kills it, or the server, between any two.

python engine_process.py SOCKET LIST STEPS, where LIST is STEPS or READS
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from kvtier_core.config.attach import attach_reader
from kvtier_core.types import ChunkKey, Namespace
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.connection import connect
from kvtier_remote.memory import served_store, served_tier
from kvtier_remote.protocol import Opening
from kvtier_testing.samples import PagedBuffer, make_keys, make_layout

LAYOUT = make_layout((1024, 3072), 4)
NAMESPACE = Namespace.of({"model": "model"})
OWN = make_keys(6)
BLOCKS = 4


def filled() -> PagedBuffer:
    """The same content in every process."""
    buffer = PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
    buffer.fill(random.Random(1))
    return buffer


class Engine:
    """Its methods in `STEPS` are called in that order."""

    def __init__(self, path: Path):
        self._path = path
        self._buffer = filled()

    def connects(self) -> None:
        self._first = connect(self._path)

    def opens(self) -> None:
        opening = Opening("model", "engine", NAMESPACE, LAYOUT)
        self.stack = RemoteStack(self._path, opening, Waits(5.0, 5.0))  # the machine may be busy

    def reserves_for_a_self_test(self) -> None:
        assert self.stack.reserve_self_test_slots("self-test", 1)

    def attaches(self) -> None:
        handle = next(iter(self.stack.handles.values()))
        self._mover = served_tier(handle).config.attach(handle, self._buffer.kv_cache())

    def ends_the_self_test(self) -> None:
        self.stack.release("self-test")

    def names_a_request(self) -> None:
        self.stack.on_request(OWN)

    def reserves(self) -> None:
        self._slots = self.stack.reserve(OWN, "store 1")

    def fills_half(self) -> None:
        self._fill(list(OWN)[:3])

    def fills_the_rest(self) -> None:
        self._fill(list(OWN)[3:])

    def commits(self) -> None:
        self.stack.commit("store 1", {})

    def looks_up(self) -> None:
        self._found = self.stack.lookup(OWN, "request 1")

    def loads(self) -> None:
        slots = [slot.index for slot in self._found.slots]
        self._mover.load(3, slots, [[list(range(BLOCKS))]] * len(slots))
        self._mover.wait([3])

    def steps(self) -> None:
        self.stack.step()

    def releases(self) -> None:
        self.stack.release("request 1")

    def begins_an_epoch(self) -> None:
        self.stack.invalidate_all(NAMESPACE.renewed())

    def steps_again(self) -> None:
        self.stack.drain(1.0)

    def detaches(self) -> None:
        self._mover.close()

    def closes(self) -> None:
        self.stack.close()

    def attaches_the_slabs(self) -> None:
        tier, handle = served_store("gds", self.stack.reader_handles["gds"])
        self._reader = attach_reader(tier, handle, self._buffer.kv_cache())

    def begins_to_read(self) -> None:
        self.stack.load_begins(self._found.slots, "request 1")

    def reads(self) -> None:
        if not self._found.slots:  # the server is gone
            return
        expected = self._buffer.everything()
        self._reader.load(4, self._found.slots, [[list(range(BLOCKS))]] * len(OWN))
        self._reader.wait([4])
        (ended,) = self._reader.finished()
        assert ended.ok and self._buffer.everything() == expected

    def ends_the_load(self) -> None:
        self.stack.load_ended("request 1", {}, ok=True)

    def detaches_the_slabs(self) -> None:
        self._reader.close()

    def _fill(self, keys: list[ChunkKey]) -> None:
        slots = [self._slots[key].index for key in keys if key in self._slots]
        self._mover.store(1, [[list(range(BLOCKS))]] * len(slots), slots)
        self._mover.wait([1])
        assert all(each.ok for each in self._mover.finished())


STEPS: list[Callable[[Engine], None]] = [
    Engine.connects,
    Engine.opens,
    Engine.reserves_for_a_self_test,
    Engine.attaches,
    Engine.ends_the_self_test,
    Engine.names_a_request,
    Engine.reserves,
    Engine.fills_half,
    Engine.fills_the_rest,
    Engine.commits,
    Engine.looks_up,
    Engine.loads,
    Engine.steps,
    Engine.releases,
    Engine.begins_an_epoch,
    Engine.steps_again,
    Engine.detaches,
    Engine.closes,
]


#: Of an engine that reads what is in the slabs of a server, and not in its memory.
READS: list[Callable[[Engine], None]] = [
    Engine.opens,
    Engine.attaches,
    Engine.attaches_the_slabs,
    Engine.names_a_request,
    Engine.looks_up,
    Engine.begins_to_read,
    Engine.reads,
    Engine.ends_the_load,
    Engine.releases,
    Engine.steps,
    Engine.detaches_the_slabs,
    Engine.detaches,
    Engine.closes,
]


def main(path: str, which: str, steps: str) -> None:
    """Does so many steps, says so, and goes on when it is told to."""
    engine = Engine(Path(path))
    for number, step in enumerate({"STEPS": STEPS, "READS": READS}[which]):
        if number == int(steps):
            print("ready", flush=True)
            sys.stdin.readline()
        step(engine)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
