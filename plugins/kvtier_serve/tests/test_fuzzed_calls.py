"""Hostile engines make any call with anything, beside honest ones: 8000 calls, and 200 000 in `make test-long`."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter

import pytest
from fuzzed import NAMESPACES, ONE_PART, PROMPTS, SEVERAL_PARTS, Hostile, Lent, Values, other_parts
from patience import wait_until
from served import PATIENT, config_of
from sizes import LONG
from tables import not_empty

from kvtier_core.layouts import part_key
from kvtier_core.types import Slot
from kvtier_remote.client import RemoteStack
from kvtier_remote.connection import Connection
from kvtier_remote.protocol import CALLS, Opening
from kvtier_serve.server import Server

CALLS_MADE = 2000 * LONG
SLOTS = 32
#: How often each call is made; the others once.
OFTEN = {"reserve": 6, "commit": 6, "lookup": 6, "release": 3, "load_begins": 3, "load_ended": 3}
RARE = {"invalidate_all": 0.3, "open": 2, "stop_direct_reads": 0.5}
WEIGHTS = {name: {**OFTEN, **RARE}.get(name, 1) for name in CALLS}


class Honest:
    """An engine that does what it should; what it loads must be what the oracle says."""

    def __init__(self, server, lent, drawn, values):
        self._lent = lent
        self._values = values
        self._drawn = drawn
        self._layout = values.layout
        self._namespace = NAMESPACES[0]
        self._stack = RemoteStack(server.path, Opening("model", "honest", NAMESPACES[0], values.layout, False), PATIENT)
        self._requests = {}  # by holder: what was found, and in which epoch
        self._stores = {}  # by holder: slots that are being filled, and in which epoch
        self._last = 0
        self.loaded = 0

    def work(self):
        self._stack.step()
        match self._drawn.randrange(40):
            case 0:
                self._namespace = self._drawn.choice([each for each in NAMESPACES[:3] if each != self._namespace])
                self._stack.invalidate_all(self._namespace)
            case each if each < 14:
                self._look()
            case each if each < 24:
                self._end_requests(keep=2)
            case each if each < 32:
                self._reserve()
            case _:
                self._end_stores(keep=1)

    def _look(self):
        self._last += 1
        path = self._drawn.choice(PROMPTS)
        self._stack.on_request(path)
        found = self._stack.lookup(path, holder := f"holder {self._last}")
        assert all(isinstance(slot, Slot) for slot in found.slots)
        keys = [part_key(path[chunk], part) for chunk, part in found.parts] or path
        self._requests[holder] = dict(zip(keys, found.slots, strict=False)), self._namespace.digest

    def _end_requests(self, keep):
        while len(self._requests) > keep:
            holder = self._drawn.choice(list(self._requests))
            found, epoch = self._requests.pop(holder)
            self._lent.check(found, epoch)
            self.loaded += len(found)
            self._stack.release(holder)

    def _reserve(self):
        self._last += 1
        path = self._drawn.choice(PROMPTS)
        parts = other_parts(self._layout, path)
        if slots := self._stack.reserve(path, holder := f"store {self._last}", parts=parts):
            self._values.given += slots
            self._stores[holder] = slots, self._layout.frame_nbytes, self._namespace.digest

    def _end_stores(self, keep):
        while len(self._stores) > keep:
            holder = self._drawn.choice(list(self._stores))
            self._lent.fill(*self._stores.pop(holder))
            if self._drawn.random() < 0.9:
                self._stack.commit(holder)
            else:
                self._stack.release(holder)

    def close(self):
        self._end_requests(keep=0)
        self._end_stores(keep=0)
        self._stack.close()


def comes_to_rest(server):
    """All engines have gone: nothing is held or counted, and every chunk can be evicted."""

    def rests():
        server.turn(0.01)
        return not any(space.stack.jobs or list(not_empty(space)) for space in server.spaces)

    wait_until(rests, "something is held, or counted as held")
    assert not server.sessions
    for space in server.spaces:
        for arena in space.stack.arenas:
            arena.make_room(1 << 20)
            assert not len(arena.index) and arena.free == arena.capacity - arena.memory.unused


@pytest.mark.long
@pytest.mark.parametrize("kept", [False, True], ids=["memory ends with its server", "memory is kept"])
@pytest.mark.parametrize("layout", [ONE_PART, SEVERAL_PARTS], ids=["one part", "several parts"])
def test_whatever_engines_call_others_load_their_bytes_and_nothing_stays(layout, kept, tmp_path, monkeypatch, caplog):
    drawn = random.Random(0)
    keep = tempfile.TemporaryDirectory(dir="/dev/shm") if kept else contextlib.nullcontext()
    slabs = {"type": "gds", "paths": [str(tmp_path / "slabs")], "mode": "gds", "eviction": "lru"}
    slabs["capacity"] = f"{40 * layout.frame_nbytes}B"
    with keep as folder, contextlib.ExitStack() as closing:
        config = config_of(SLOTS, slabs, frame=layout.frame_nbytes, keep=folder, eviction="lru")
        server = Server(config, tmp_path / "s")
        closing.callback(server.close, 0.0)
        monkeypatch.setattr(Connection, "wait", lambda connection, seconds: server.turn(0))
        values, lent, counts = Values(drawn, layout, strange=0.02), Lent(server, layout), Counter()
        honest = [Honest(server, lent, drawn, values) for _ in range(2)]
        hostile = [Hostile(server, values, lent, drawn) for _ in range(3)]

        def has_seen_all():
            """When stores answer decides what is found, so the number of calls that this takes is not drawn."""
            told = sum((each.counts for each in hostile), counts)
            often = all(told[name, done] for name in OFTEN for done in (False, True))
            return often and {name for name, _ in told} == CALLS.keys() and any(each.loaded for each in honest)

        for number in range(20 * CALLS_MADE):
            if number >= CALLS_MADE and has_seen_all():
                break
            each = drawn.choice(hostile)
            (name,) = drawn.choices(list(WEIGHTS), WEIGHTS.values())
            each.call(name)
            if number % 5 == 0:
                drawn.choice(honest).work()
            if number % 500 == 499:  # it goes, and another one comes
                each.close()
                counts += each.counts
                hostile[hostile.index(each)] = Hostile(server, values, lent, drawn)
        assert has_seen_all(), (counts, [each.counts for each in hostile])
        assert any(list(not_empty(space)) for space in server.spaces), "what engines hold is seen"
        for each in (*hostile, *honest):
            each.close()
        loaded = sum(each.loaded for each in honest)
        counts += sum((each.counts for each in hostile), Counter())
        comes_to_rest(server)
    print(f"{counts.total()} calls, {loaded} chunks loaded beside them, {len(values.frames)} frames found")
    assert "a call from process" not in caplog.text
