"""Questions of one engine change nothing for others: they take no memory, evict nothing, and count nowhere."""

from __future__ import annotations

import random

import pytest
from patience import wait_until
from served import LAYOUT, config_of
from test_openings import GATED, PLUGIN
from test_turns import Steps

from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.stack.outcomes import ANY, Terms
from kvtier_core.types import Namespace
from kvtier_remote.protocol import MOST_CHUNKS, Opening
from kvtier_serve.server import Server
from kvtier_serve.sessions import Session
from kvtier_serve.tenants import UNBOUNDED, Quota
from kvtier_testing.samples import make_group, make_keys, make_layout

SLOTS = 64
WINDOW = make_group((256, 256), name="window", block_tokens=4, kind=KVKind.SLIDING_WINDOW, reach=13)
TWO_PARTS = ChunkLayout([make_group((512, 128), block_tokens=4), WINDOW], 16)
LAYOUTS = {"one part": LAYOUT, "longer chunks": make_layout((4096, 12288), 4)}
MODES = {"free memory": 20, "full": SLOTS}


class Asked:
    """A server with two models, of which one asks and the other has chunks."""

    def __init__(self, folder, stored, layout, tenants, disk):
        below = [{"type": "disk", "path": str(folder / "disk"), "capacity": "1MiB", "min_free": "0B"}] if disk else []
        config = config_of(SLOTS, *below, eviction="lru")
        self.server = Server(config, folder / "s", Quota(soft=8 * LAYOUT.frame_nbytes) if tenants else UNBOUNDED)
        self.drawn = random.Random(stored)
        self.other = self.session("other", LAYOUT)
        self.asks = self.session("asks", layout)
        self.own = self.store(self.asks, 4)
        for _ in range(stored // 4):
            self.store(self.other, 4)

    def session(self, model, layout):
        opening, got = Opening(model, "engine", Namespace.of({"model": model}), layout), []
        self.server.spaces.open(opening, got.append)
        wait_until(lambda: (self.server.turn(0), got)[1])
        number = len(self.server.sessions) + 1
        session = self.server.sessions[number] = Session(number, opening, got[0].value)
        return session

    def keys(self, count):
        return [self.drawn.randbytes(32) for _ in range(count)]

    def store(self, session, count):
        keys = self.keys(count)
        assert session.reserve(keys, "store", self.drawn.randbytes(1), (), "")
        session.commit("store", None, ())
        self.turn()
        return keys

    def turn(self):
        """Let time pass: a second, for those who divide the memory."""
        wait_until(lambda: not self.server.turn(0) and not any(each.stack.jobs for each in self.server.spaces))
        for memory in self.server.spaces.memories:
            memory.extents.balance(1.0)

    def ask(self):
        """Any question that an engine has, about chunks that it has stored, or that nobody has."""
        path = self.own[: self.drawn.randrange(5)] + self.keys(self.drawn.choice([1, SLOTS, 2000]))
        holder, terms = self.drawn.choice("abc"), Terms(salt=self.drawn.randbytes(1))
        match self.drawn.randrange(4):
            case 0:
                self.asks.prefetch(path, terms)
            case 1:
                self.asks.whereabouts(path)
            case 2:
                self.asks.release(holder)
            case _:
                assert self.asks.lookup(path, holder, terms).found.pending == 0

    def everything(self):
        """What others have, in the order in which it leaves, and what decides who gets memory next."""
        (memory,) = self.server.spaces.memories
        arena = self.other.space.stack.arenas[0]
        order = arena.index.select_victims(SLOTS, lambda key: 1)
        shares = [(share.model, share.count, share.turnover) for share in memory.extents._shares]
        return order, arena.lent, shares, memory.extents.free, list(self.server.spaces.tenants.over_soft)


@pytest.mark.parametrize("disk", [False, True], ids=["memory alone", "a disk below"])
@pytest.mark.parametrize("tenants", [False, True], ids=["no quotas", "tenants beyond quotas"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", MODES)
def test_look_ups_alone_change_nothing_for_another_model(stored, layout, tenants, disk, tmp_path):
    asked = Asked(tmp_path, MODES[stored], LAYOUTS[layout], tenants, disk)
    for _ in range(100):  # what was lacked before has been estimated
        asked.turn()
    order, lent, shares, free, over = asked.everything()
    assert order
    for _ in range(60):
        asked.ask()
        if asked.drawn.random() < 0.3:
            asked.turn()
    asked.turn()
    later = asked.everything()
    assert (later[0], later[1], later[3], later[4]) == (order, lent, free, over)
    assert [(model, count) for model, count, _ in later[2]] == [(model, count) for model, count, _ in shares]
    assert all(now <= before for (*_, now), (*_, before) in zip(later[2], shares, strict=True)), "it counted"
    asked.server.close(1.0)


@pytest.mark.parametrize("below", [None, "disk", "gated"])
@pytest.mark.parametrize("layout", [LAYOUT, TWO_PARTS], ids=["one part", "two parts"])
@pytest.mark.parametrize("slots", [4, SLOTS])
def test_a_lookup_costs_what_it_finds(slots, layout, below, tmp_path, monkeypatch):
    """8192 chunks of which one is there cost as many steps as two; nor does it matter how many slots there are."""
    monkeypatch.setattr("kvtier_core.stack.store_tier.remote_lookup._ABSENCE_HOLDS", 1e9)
    monkeypatch.setattr(ChunkLayout, "check_path", lambda *arguments: None)  # it compares all keys
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1MiB", "min_free": "0B"}
    stores = {"disk": [disk], "gated": [GATED]}.get(below, [])
    server = Server(config_of(slots, *stores, frame=layout.frame_nbytes, plugins=(PLUGIN,)), tmp_path / "s")
    got, steps, path = [], Steps(), [key[:-1] + bytes(1) for key in make_keys(MOST_CHUNKS)]
    server.spaces.open(Opening("model", "engine", Namespace.of({}), layout), got.append)
    wait_until(lambda: (server.turn(0), got)[1])
    stack = got[0].value.stack
    stack.reserve(path[:1], "store")
    stack.commit("store")
    wait_until(lambda: not server.turn(0) and not stack.jobs)
    counts = []
    for keys in (path[:2], path):
        for _ in range(2):  # a shared store is asked, once
            with steps.counted():
                stack.lookup(keys, "request", ANY)
            stack.release("request")
            wait_until(lambda: not server.turn(0) and not stack.jobs)
        counts.append(steps.count)
    assert counts[1] < counts[0] + 100
    server.close(1.0)
