"""A store in every kind of trouble: real vLLM serves on with right answers, and is warm again after."""

from __future__ import annotations

import contextlib
import time

import pytest
from patience import HANG, wait_until
from real_engines import Engine, cpu, hit, prompt
from servers.mooncake import one_master
from servers.redis import one_server
from servers.redis_groups import cluster
from sizes import some
from test_serving import NOISE

from kvtier_testing import Proxy

HITS = 384
KNOWN = prompt(170, 400)
FRESH = [prompt(seed, 400) for seed in range(171, 174)]
LOAD_WAIT = 2.0


def admit(server):
    """The user of the engine may do anything."""
    server.ask("ACL", "SETUSER", "engine", "reset", "on", ">secret", "~*", "+@all")


@contextlib.contextmanager
def killed(server, proxy):
    server.kill()
    yield
    server.start()
    admit(server)


@contextlib.contextmanager
def stopped(server, proxy):
    with server.stopped():
        yield


@contextlib.contextmanager
def slow(server, proxy, seconds):
    proxy.delay(seconds)
    yield
    proxy.heal()


@contextlib.contextmanager
def dropped(server, proxy):
    proxy.drop()
    yield
    proxy.heal()


@contextlib.contextmanager
def garbled(server, proxy):
    proxy.garble()
    yield
    proxy.heal()


@contextlib.contextmanager
def out_of_memory(server, proxy):
    used = server.ask("INFO", "memory").split("used_memory:")[1].split("\r")[0]
    server.ask("CONFIG", "SET", "maxmemory", used)
    yield
    server.ask("CONFIG", "SET", "maxmemory", 0)


@contextlib.contextmanager
def rejecting(server, proxy):
    """The user of the engine may do nothing any more."""
    server.ask("ACL", "SETUSER", "engine", "reset", "on", ">another")
    proxy.drop()
    proxy.heal()
    yield
    admit(server)
    proxy.drop()
    proxy.heal()


TROUBLES = {
    "killed": killed,
    "stopped": stopped,
    "50 ms away": lambda server, proxy: slow(server, proxy, 0.05),
    "5 s away": lambda server, proxy: slow(server, proxy, 5.0),
    "connections dropped": dropped,
    "answers garbage": garbled,
    "out of memory": out_of_memory,
    "rejects credentials": rejecting,
}


@pytest.fixture(scope="module")
def truth(model):
    """What vLLM says without kvtier."""
    plain = Engine(model, None)
    answers = [plain.ask(asked)[0] for asked in (KNOWN, *FRESH)]
    plain.close()
    return answers


@pytest.fixture
def network(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "secret")
    with one_server(tmp_path / "server", tcp=True) as server, Proxy(("127.0.0.1", server.port)) as proxy:
        admit(server)
        yield server, proxy


def stack(url, **settings):
    """Memory for one prompt, and a store far away."""
    made = cpu("1560KiB", load_wait=f"{LOAD_WAIT}s")
    user = {"username": "engine", "password": "env:KVTIER_TEST_PASSWORD"}
    made["tiers"].append({"type": "redis", "url": url, "timeout": "1s", **user, **settings})
    return made


def answers_right(served, truth):
    """Every prompt, one after the other."""
    for asked, right in zip((KNOWN, *FRESH), truth, strict=True):
        (answer,) = served.ask(asked)
        assert answer.differs(right) < NOISE


def becomes_warm(served, tier="redis"):
    """KNOWN comes from the store again. How soon depends on breakers: they rest a second or two, or four."""
    deadline = time.monotonic() + HANG
    while True:
        served.ask(KNOWN)
        served.ask(FRESH[0])  # which takes its place in memory
        served.settle()
        served.ask(KNOWN)
        if served.outcomes()[-1] == hit(400, **{tier: HITS}):
            return
        assert time.monotonic() < deadline, "it does not become warm again"
        time.sleep(0.2)


@pytest.mark.parametrize("trouble", some(TROUBLES, "killed", "stopped", "answers garbage"))
def test_a_store_in_trouble(engine, network, truth, said, longest_step, trouble):
    server, proxy = network
    with engine(stack(f"redis://127.0.0.1:{proxy.port}")) as served:
        answers_right(served, truth)
        becomes_warm(served)
        with TROUBLES[trouble](server, proxy):
            for _ in range(2):
                answers_right(served, truth)
            assert max(outcome.waited for outcome in served.outcomes()) <= LOAD_WAIT + longest_step()
        becomes_warm(served)
        answers_right(served, truth)
        served.assert_at_rest()


@pytest.mark.parametrize("load", some(["auto", "always"]))
@pytest.mark.parametrize("known", [[], [KNOWN, *FRESH]], ids=["has never answered", "has served before"])
def test_only_the_first_request_waits_for_a_hanging_store(engine, network, known, load):
    """One request waits, and ends although no call has failed yet; then the store answers all at once."""
    server, _ = network
    made = stack(server.url, timeout="60s")
    made["load"] = load
    with engine(made) as served:
        for asked in known:
            served.ask(asked)
        served.settle()
        served.outcomes()
        with server.stopped():
            for asked in (KNOWN, *FRESH[:2], KNOWN):
                served.ask(asked)
            waits = [outcome.waited > 0 for outcome in served.outcomes()]
            assert sum(waits[1:]) == 0 and (waits[0] or known), waits
        becomes_warm(served)
        served.assert_at_rest()


@pytest.mark.more
def test_a_node_of_a_cluster_fails_over(engine, tmp_path, truth, said):
    with cluster(tmp_path / "cluster", nodes=3, replicas=1) as nodes:
        made = stack(nodes[1].url, mode="cluster")
        for key in ("username", "password"):
            del made["tiers"][1][key]
        with engine(made) as served:
            answers_right(served, truth)
            becomes_warm(served)
            nodes[0].kill()  # its replica takes over
            for _ in range(3):
                answers_right(served, truth)
            becomes_warm(served)
            served.assert_at_rest()


@pytest.mark.more
def test_a_mooncake_master_hangs_and_then_starts_again_empty(engine, tmp_path, truth, said):
    with one_master(tmp_path / "mooncake") as master, master.owner(64 << 20):
        made = cpu("1560KiB", load_wait=f"{LOAD_WAIT}s")
        made["tiers"].append({"type": "mooncake", "master": master.address, "timeout": "1s"})
        with engine(made) as served:
            answers_right(served, truth)
            becomes_warm(served, "mooncake")
            with master.stopped():
                answers_right(served, truth)
            becomes_warm(served, "mooncake")
            master.kill()
            answers_right(served, truth)
            master.start()
            # Until it has memory again every write finds the store full, and then none is tried for a minute.
            wait_until(lambda: master.ask(("put", "probe", b"probe")) == [0], "no client lends it memory again")
            becomes_warm(served, "mooncake")
            answers_right(served, truth)
            served.assert_at_rest()
