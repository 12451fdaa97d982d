"""Stores that hang while their tiers are opened or closed: they cost their own engines a wait, and others nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types

import attrs
import pytest
from empty_store import EmptyStore
from patience import HANG, wait_until
from served import config_of, serving
from servers.redis import one_server
from test_shared_stack import steps_until, store

import kvtier_redis.plugin
from kvtier_core.errors import ConfigError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_core.types import Namespace
from kvtier_remote.client import Waits
from kvtier_testing.samples import make_keys

KEYS = make_keys(4)
HUNG = Waits(lookup=HANG, others=HANG, start=0.0)


class Gate:
    """Whoever passes waits while it is shut."""

    def __init__(self):
        self.passed = 0  #: how often somebody has come
        self._open = threading.Event()
        self._open.set()

    def go_through(self):
        self.passed += 1
        assert self._open.wait(HANG)

    @contextlib.contextmanager
    def shut(self):
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


OPENS, CLOSES, READS = Gate(), Gate(), Gate()


class Store(EmptyStore):
    """It hangs at a gate."""

    shared = True

    def __init__(self):
        OPENS.go_through()

    def contains(self, keys):
        READS.go_through()
        return super().contains(keys)

    def close(self):
        CLOSES.go_through()


@attrs.frozen
class GatedConfig(BackendConfig):
    """A store that everybody shares."""

    type = "gated"
    shared = True

    def open(self, ctx):
        return Store()


class OwnStore(Store):
    shared = False


@attrs.frozen
class OwnConfig(BackendConfig):
    """A store of one namespace."""

    type = "own"

    def open(self, ctx):
        return OwnStore()


@hookimpl
def kvtier_backends():
    return [GatedConfig, OwnConfig]


PLUGIN = types.SimpleNamespace(kvtier_backends=kvtier_backends)
GATED, OWN = {"type": "gated"}, {"type": "own", "capacity": "1MiB"}


def opening(served):
    """Is a stack being opened?"""
    return served.server.ask(lambda: bool(served.server.spaces.opening)).result()


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path, 64, GATED, plugins=(PLUGIN,)) as served:
        yield served


def test_engines_are_served_while_a_namespace_is_opened(served):
    there = served.stack("there")
    store(there, KEYS)
    with OPENS.shut():
        comes = served.stack("comes", waits=HUNG)
        wait_until(lambda: opening(served))
        assert len(there.lookup(KEYS, "request").slots) == len(KEYS)
        assert "has not opened its tiers yet" in comes.lookup(KEYS, "request").miss_reason
        assert not comes.reserve(KEYS, "store") and "not opened" in comes.describe()[0]
    steps_until(comes, lambda: comes.media)
    store(comes, KEYS)
    assert len(comes.lookup(KEYS, "request").slots) == len(KEYS)


def test_engines_are_served_while_a_namespace_is_opened_over_a_redis_that_hangs(tmp_path):
    with one_server(tmp_path / "redis") as redis:
        tier = {"type": "redis", "url": redis.url, "timeout": "600s"}
        with serving(tmp_path, 64, tier, plugins=(kvtier_redis.plugin,)) as served:
            there = served.stack("there")
            store(there, KEYS)
            with redis.stopped():
                comes = served.stack("comes", waits=HUNG)
                wait_until(lambda: opening(served))
                assert len(there.lookup(KEYS, "request").slots) == len(KEYS)
                assert opening(served), "it waited for the store"
            steps_until(comes, lambda: comes.media)


def test_two_engines_that_open_one_namespace_at_once_share_its_stack(served):
    before = OPENS.passed
    with OPENS.shut():
        first, second = served.stack(waits=HUNG), served.stack(waits=HUNG)
        wait_until(
            lambda: served.server.ask(lambda: sum(map(len, served.server.spaces.opening.values()))).result() == 2
        )
    for stack in (first, second):
        steps_until(stack, lambda stack=stack: stack.media)
    assert OPENS.passed == before + 1
    store(first, KEYS)
    first.drain(HANG)
    assert len(second.lookup(KEYS, "request").slots) == len(KEYS)


def test_an_engine_that_ends_while_its_tiers_are_opened_leaves_nothing(served):
    with OPENS.shut():
        comes = served.stack("comes", waits=HUNG)
        wait_until(lambda: opening(served))
        comes.close(0.0)
        wait_until(lambda: not served.server.ask(lambda: served.server.connections).result())
    wait_until(lambda: not opening(served))
    assert not served.server.sessions
    assert len(list(served.server.spaces)) == 1, "its stack waits for an engine that comes back"


def test_a_killed_engine_is_noticed_while_its_tiers_are_opened(served, tmp_path):
    with OPENS.shut():
        if not (child := os.fork()):
            try:
                served.stack("comes", waits=HUNG)
                signal.pause()
            finally:
                os._exit(1)
        wait_until(lambda: opening(served))
        looks = threading.Event()
        served.server.ask(lambda: looks.wait(HANG))  # then it learns in one turn that connection and process have ended
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        looks.set()
        wait_until(lambda: not served.server.ask(lambda: served.server.connections).result())


def test_an_engine_moves_to_a_namespace_that_is_opened_meanwhile(served):
    stays, moves = served.stack(), served.stack()
    store(stays, KEYS)
    attachment = moves.attachment
    with OPENS.shut():
        moves.invalidate_all(Namespace.of({"model": "model"}).renewed())
        wait_until(lambda: opening(served))
        moves.step()
        assert "has not opened its tiers yet" in moves.lookup(KEYS, "request").miss_reason
        assert len(stays.lookup(KEYS, "request").slots) == len(KEYS)
        moves.release("request")  # a call that waits behind it
    steps_until(moves, lambda: moves.attachment != attachment)
    store(moves, KEYS)
    assert len(moves.lookup(KEYS, "request").slots) == len(KEYS)


def test_a_stack_whose_close_hangs_keeps_its_store_and_delays_no_one(tmp_path):
    with serving(tmp_path, 64, OWN, plugins=(PLUGIN,)) as served, CLOSES.shut():
        ends = served.stack("ends")
        ends.invalidate_all(Namespace.of({"model": "ends"}).renewed())
        steps_until(ends, lambda: ends.reserve(KEYS, "store"))
        before = CLOSES.passed
        ends.close()
        wait_until(lambda: CLOSES.passed > before)
        there = served.stack("there")
        assert list(there.media) == ["cpu"], "its store is open twice"
        assert len(store(there, make_keys(64))) == 64, "its memory is not free"
        assert len(there.lookup(KEYS, "request").slots) == len(KEYS)


def test_a_private_store_is_of_the_namespace_that_is_opened_with_it(tmp_path):
    with serving(tmp_path, 64, OWN, plugins=(PLUGIN,)) as served:
        with OPENS.shut():
            first = served.stack("first", waits=HUNG)
            wait_until(lambda: opening(served))
            assert list(served.stack("second").media) == ["cpu"]
        steps_until(first, lambda: first.media)
        assert list(first.media) == ["cpu", "own"]


def test_no_more_stacks_are_opened_than_the_server_has_threads_for(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_serve.spaces._MOST_THREADS", 3)
    with serving(tmp_path, 64, plugins=(PLUGIN,)) as served:
        for number in range(3):
            assert served.stack(f"model {number}").media
        refused = served.stack("one too many")
        assert "has 3 namespaces open" in refused.lookup(KEYS, "request").miss_reason


def disk(tmp_path, **settings):
    return {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B", **settings}


def test_a_private_disk_returns_to_the_namespace_whose_frames_it_holds(tmp_path):
    with serving(tmp_path, 64, disk(tmp_path)) as served:
        stack = served.stack("holds")
        store(stack, KEYS)
        stack.drain(HANG)
    with serving(tmp_path, 64, disk(tmp_path)) as served:
        assert list(served.stack("comes first").media) == ["cpu"]
        assert list(served.stack("holds").media) == ["cpu", "disk"]


def test_a_private_disk_whose_namespace_does_not_return_is_anybodys(tmp_path, monkeypatch):
    with serving(tmp_path, 64, disk(tmp_path)) as served:
        stack = served.stack("holds")
        store(stack, KEYS)
        stack.drain(HANG)
    monkeypatch.setattr("kvtier_serve.private_stores._WAITS", 0.0)
    with serving(tmp_path, 64, disk(tmp_path)) as served:
        assert list(served.stack("comes first").media) == ["cpu", "disk"]


def test_a_tier_that_names_a_model_is_for_that_model(tmp_path):
    with serving(tmp_path, 64, disk(tmp_path, model="named")) as served:
        assert list(served.stack("comes first").media) == ["cpu"]
        assert list(served.stack("named").media) == ["cpu", "disk"]


def test_an_engine_of_its_own_has_no_models_to_choose_from(tmp_path):
    with pytest.raises(ConfigError, match=r"tiers\[1\].model: only kvtier serve supports several models"):
        config_of(64, disk(tmp_path, model="named")).check_engine(16)
