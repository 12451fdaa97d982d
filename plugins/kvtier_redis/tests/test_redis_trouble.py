"""Servers in trouble: what fails is a BackendError or a miss, no other bytes come up, and trouble ends."""

from __future__ import annotations

import pytest
from frames import NBYTES, PARTS, frame, manifests, names, parts, read, write
from patience import answered

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import EnvSecret
from kvtier_testing.samples import make_keys

ONE, TWO, THREE = KEYS = make_keys(3)
CALLS = {
    "contains": lambda tier: tier.contains(KEYS),
    "read": lambda tier: read(tier, *KEYS),
    "write": lambda tier: write(tier, *KEYS),
    "delete": lambda tier: tier.delete(KEYS),
    "namespaces": lambda tier: list(tier.namespaces()),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def works(tier):
    write(tier, *KEYS)
    assert tier.contains(KEYS) == [True] * 3
    assert read(tier, *KEYS) == ["hit"] * 3


@each_call
def test_a_server_that_was_killed_and_started_again(own_server, open_tier, call):
    tier = open_tier(own_server)
    works(tier)
    own_server.kill()
    with pytest.raises(BackendError, match="redis.sock: "):
        call(tier)
    own_server.start()
    call(tier)
    works(tier)


@pytest.mark.parametrize("capacity", [0, 1 << 20])
@each_call
def test_a_server_that_hangs(own_server, open_tier, call, capacity):
    """The call ends while the server still hangs, and what it had asked for is not taken for another answer."""
    tier = open_tier(own_server, timeout=0.3, capacity=capacity)
    answered(lambda: works(tier))
    with own_server.stopped(), pytest.raises(BackendError, match="redis.sock: no answer in time"):
        call(tier)
    tier = open_tier(own_server, capacity=capacity)
    works(tier)


def test_a_late_answer_is_not_taken_for_the_next(own_server, open_tier):
    tier = open_tier(own_server, timeout=1)
    answered(lambda: write(tier, ONE))
    with own_server.stopped(), pytest.raises(BackendError):
        tier.contains([ONE, ONE])
    assert answered(lambda: tier.contains([TWO])) == [False]
    assert answered(lambda: read(tier, TWO, ONE)) == ["miss", "hit"]


def test_a_server_that_is_not_there_when_the_tier_opens(own_server, open_tier):
    """The engine starts all the same, and its log says what was wrong."""
    own_server.kill()
    tier = open_tier(own_server)
    assert tier.facts() == {"url": f"{own_server.url} -> {own_server.socket}: No such file or directory"}
    with pytest.raises(BackendError, match="No such file"):
        tier.contains(KEYS)
    own_server.start()
    works(tier)


def test_connections_that_the_server_closed_are_opened_again(server, tier):
    for _ in range(3):
        works(tier)
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


# -- no room ---------------------------------------------------------------------------------------


@pytest.fixture
def full(own_server, open_tier):
    """A server that holds one frame of a megabyte, and has no room for another one."""
    tier = open_tier(own_server)
    tier.write([ONE], [frame(ONE, nbytes=1 << 20)])
    used = int(own_server.ask("INFO", "memory").split("used_memory:")[1].split()[0])
    own_server.ask("CONFIG", "SET", "maxmemory", used + (1 << 19))
    return own_server


@pytest.mark.parametrize("capacity", [0, 1 << 30])
def test_a_server_without_room(full, open_tier, capacity):
    tier = open_tier(full, capacity=capacity)
    before = names(full)
    with pytest.raises(StoreFull, match="OOM") as failed:
        tier.write([TWO, THREE], [frame(key, nbytes=1 << 20) for key in (TWO, THREE)])
    assert failed.value.missing == 2 << 20
    assert [name for name in names(full) if "{space}" not in name] == before, (
        "parts of what could not be stored are left"
    )
    assert tier.contains(KEYS) == [True, False, False]
    full.ask("CONFIG", "SET", "maxmemory", 0)
    works(tier)


def test_one_frame_without_room_leaves_the_others_of_its_batch(full, open_tier):
    tier = open_tier(full)
    outcomes = tier.write([TWO, THREE], [frame(TWO), frame(THREE, nbytes=1 << 20)])
    assert outcomes[0] is None and isinstance(outcomes[1], StoreFull)
    assert read(tier, TWO, THREE) == ["hit", "miss"]


def test_a_server_without_room_even_for_a_name(full, open_tier):
    """It is full when the engine starts: no reason to serve without it, for it can still be read."""
    full.ask("CONFIG", "SET", "maxmemory", 1)
    tier = open_tier(full, capacity=1 << 30)
    assert "OOM" in tier.facts()["url"]
    assert tier.contains([ONE]) == [True]
    with pytest.raises(StoreFull):
        write(tier, TWO)


def test_a_server_that_evicts_parts_and_manifests(own_server, open_tier):
    """With allkeys-lru it takes what it likes. Whole frames come up, or nothing."""
    tier, keys = open_tier(own_server), make_keys(200)
    used = int(own_server.ask("INFO", "memory").split("used_memory:")[1].split()[0])
    own_server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    own_server.ask("CONFIG", "SET", "maxmemory", used + 100 * NBYTES)
    for key in keys:
        write(tier, key)
    outcomes = read(tier, *keys)
    assert set(outcomes) == {"hit", "miss"}
    assert len(parts(own_server)) < PARTS * len(keys)


# -- a server that refuses -------------------------------------------------------------------------


@pytest.fixture
def guarded(own_server, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "s3cret")
    own_server.ask("CONFIG", "SET", "requirepass", "s3cret")
    own_server.password = "s3cret"
    return own_server


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "redis.sock: NOAUTH"),
        ({"password": EnvSecret("KVTIER_TEST_OTHER")}, "redis.sock: WRONGPASS"),
        ({"password": EnvSecret("KVTIER_TEST_PASSWORD"), "username": "nobody"}, "redis.sock: WRONGPASS"),
        ({"password": EnvSecret("KVTIER_TEST_NOTHING")}, "variable KVTIER_TEST_NOTHING is not set"),
    ],
)
def test_a_wrong_password_stops_the_start(guarded, open_tier, monkeypatch, settings, why):
    monkeypatch.setenv("KVTIER_TEST_OTHER", "an0ther")
    with pytest.raises(BackendError, match=why) as refused:
        open_tier(guarded, **settings)
    assert "s3cret" not in str(refused.value) and "an0ther" not in str(refused.value)


def test_the_right_password(guarded, open_tier):
    works(open_tier(guarded, password=EnvSecret("KVTIER_TEST_PASSWORD")))
    works(open_tier(guarded, password=EnvSecret("KVTIER_TEST_PASSWORD"), username="default"))


def test_a_password_that_is_changed_while_the_engine_runs(guarded, open_tier):
    tier = open_tier(guarded, password=EnvSecret("KVTIER_TEST_PASSWORD"))
    works(tier)
    guarded.ask("CONFIG", "SET", "requirepass", "n3w")
    guarded.password = "n3w"
    guarded.ask("CLIENT", "KILL", "TYPE", "normal")
    with pytest.raises(BackendError, match="redis.sock: WRONGPASS"):
        read(tier, ONE)


@pytest.mark.parametrize(
    ("missing", "call"), [("mget", "contains"), ("get", "read"), ("set", "write"), ("getdel", "delete")]
)
def test_a_missing_permission_is_named(server, open_tier, monkeypatch, missing, call):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "pass")
    server.ask("ACL", "SETUSER", "engine", "reset", "on", ">pass", "~*", "+@all", f"-{missing}")
    tier = open_tier(server, username="engine", password=EnvSecret("KVTIER_TEST_PASSWORD"))
    if missing == "get":
        write(tier, *KEYS)
    try:
        told = CALLS[call](tier)
    except BackendError as error:
        told = [str(error)]
    assert all("NOPERM" in each for each in told)
    assert not manifests(server) or missing == "get"
