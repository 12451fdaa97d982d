"""Tenants of one server: what each may have of its memory, and that one who floods it costs the others nothing."""

from __future__ import annotations

import random

import pytest
from served import FRAME, LAYOUT, serving
from test_operators import SECRET, Client
from test_shared_stack import steps_until, store

from kvtier_core.builtin.chained import Chained
from kvtier_core.server.http import HTTP, TOKEN
from kvtier_core.server.tenants import NOBODY, Quota, Tenants
from kvtier_core.testing.samples import make_keys

OURS, THEIRS = b'{"cache_salt": "ours"}', b'{"cache_salt": "theirs"}'


def path_of(served, salt, seed, chunks):
    """The keys of a prompt of a tenant."""
    (space,) = served.server.spaces
    tokens = [random.Random(seed).randrange(1000) for _ in range(chunks * LAYOUT.tokens)]
    return Chained(space.namespace, LAYOUT.tokens).keys(tokens, salt=salt)


def ask(stack, path, salt):
    """One request: how many of its chunks were found, and all of them are stored then."""
    stack.on_request(path, {}, salt)
    while (lookup := stack.lookup(path, "request", salt=salt)).pending:  # the machine is busy
        stack.drain(0.1)
    found = len(lookup.slots)
    stack.release("request")
    if stack.reserve(path, "store", salt):
        stack.commit("store")
    stack.drain(5)
    return found


def hit_rate(served, stack, *, flood):
    """Of a tenant with four prompts that return, beside another one with prompts that never do."""
    drawn, found, asked = random.Random(1), 0, 0
    for number in range(200):
        path = path_of(served, OURS, drawn.randrange(4), 8)
        found, asked = found + ask(stack, path, OURS), asked + len(path)
        for each in range(flood):
            ask(stack, path_of(served, THEIRS, 1000 + number * 10 + each, 16), THEIRS)
    return found / asked


def test_a_tenant_that_floods_the_memory_costs_others_nothing(tmp_path):
    quota = Quota(soft=32 * FRAME)  # what ours needs, and half of the memory
    rates = []
    for flood in (0, 3):
        (tmp_path / str(flood)).mkdir()
        with serving(tmp_path / str(flood), slots=64, quota=quota) as served:
            stack = served.stack()
            rates.append(hit_rate(served, stack, flood=flood))
    assert rates[0] > 0.9 and rates[1] == rates[0]
    (tmp_path / "unbounded").mkdir()
    with serving(tmp_path / "unbounded", slots=64) as served:
        assert hit_rate(served, served.stack(), flood=3) < rates[0], "the flood is no threat: this test shows nothing"


def test_beyond_the_soft_quota_memory_is_used_while_nobody_else_needs_it(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(soft=8 * FRAME)) as served:
        stack = served.stack()
        path = path_of(served, OURS, 1, 40)
        ask(stack, path, OURS)
        assert ask(stack, path, OURS) == 40


def test_beyond_the_hard_quota_nothing_is_kept(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(hard=8 * FRAME)) as served:
        stack = served.stack()
        ask(stack, path_of(served, OURS, 1, 40), OURS)
        (space,) = served.server.spaces
        stack.drain(5)
        assert space.tenants.used == {space.tenants.name(OURS): 8 * FRAME}
        assert stack.usage()[0].chunks == 8


def test_pinned_chunks_beyond_a_quota_leave_when_released(tmp_path):
    with serving(tmp_path, slots=64) as served:
        stack = served.stack()
        path = path_of(served, OURS, 1, 10)
        ask(stack, path, OURS)
        assert len(stack.lookup(path, "request", salt=OURS).slots) == 10
        (space,) = served.server.spaces
        served.server.ask(lambda: space.tenants.set_quota(OURS, Quota(hard=0))).result()
        stack.drain(5)
        assert space.tenants.used
        stack.release("request")
        steps_until(stack, lambda: not space.tenants.used)  # the server evicts in its next turn


def test_requests_without_a_salt_are_bounded_by_no_quota(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(soft=0, hard=0)) as served:
        stack = served.stack()
        store(stack, make_keys(20))
        stack.drain(5)
        assert len(stack.lookup(make_keys(20), "request").slots) == 20


@pytest.fixture
def operated(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B"}
    with serving(tmp_path, 64, disk) as served:
        http = HTTP(served.server, "127.0.0.1", 0)
        yield served, Client(f"http://127.0.0.1:{http.port}")
        http.close()


def test_a_tenant_is_erased_from_memory_and_disk_and_others_stay(operated):
    served, client = operated
    stack = served.stack()
    ours, theirs = path_of(served, OURS, 1, 5), path_of(served, THEIRS, 1, 7)
    ask(stack, ours, OURS)
    ask(stack, theirs, THEIRS)
    told = client("erase", {"cache_salt": "ours"})
    assert told["deleted"] == {"cpu": 5, "disk": 5} and "disk" in told["unreachable"][0]
    stack.drain(5)
    assert not stack.lookup(ours, "request", salt=OURS).slots
    assert len(stack.lookup(theirs, "other", salt=THEIRS).slots) == 7
    assert client("erase", {"cache_salt": "ours"})["deleted"] == {"cpu": 0, "disk": 0}


def test_a_namespace_is_erased_and_others_stay(operated):
    served, client = operated
    first, second = served.stack("first"), served.stack("second")
    store(first, make_keys(3))
    store(second, make_keys(4))
    first.drain(5)
    (namespace, _) = client("status")["namespaces"]
    assert client("erase", {"namespace": namespace["namespace"]}) == {
        "deleted": {"cpu": 3, "disk": 3},
        "unreachable": [],
    }
    assert len(second.lookup(make_keys(4), "request").slots) == 4
    assert "name a cache_salt" in client("erase", {}, status=409)["error"]


def test_quotas_are_set_and_usage_is_told_by_names_that_tell_no_salt(operated):
    served, client = operated
    stack = served.stack()
    ask(stack, path_of(served, OURS, 1, 5), OURS)
    store(stack, make_keys(2), "plain")
    told = {each["tenant"]: each for each in client("set_quota", {"cache_salt": "ours", "soft": 1, "hard": 10 * FRAME})}
    name = served.server.spaces.tenants.name(OURS)
    assert told[name] == {"tenant": name, "nbytes": 5 * FRAME, "soft": 1, "hard": 10 * FRAME}
    assert told[NOBODY]["nbytes"] == 2 * FRAME and told[NOBODY]["hard"] is None
    assert "ours" not in str(told) and Tenants().name(OURS) != name


def test_the_quota_of_a_model_is_set(operated):
    served, client = operated
    stack = served.stack("model")
    store(stack, make_keys(30))
    stack.drain(5)
    (had,) = client("set_model_quota", {"model": "model"}).values()
    assert had >= 30 * FRAME
    (has,) = client("set_model_quota", {"model": "model", "hard": 10 * FRAME}).values()
    assert has <= 10 * FRAME
    stack.drain(5)
    assert stack.usage()[0].chunks <= 10


def test_books_of_tenants_balance_whatever_comes_and_goes(tmp_path):
    drawn = random.Random(3)
    with serving(tmp_path, slots=32, quota=Quota(soft=8 * FRAME, hard=20 * FRAME)) as served:
        stack = served.stack()
        (space,) = served.server.spaces
        for number in range(150):
            salt = drawn.choice([b"", OURS, THEIRS])
            path = path_of(served, salt, drawn.randrange(6), drawn.randrange(1, 20))
            found = stack.lookup(path, f"request {number}", salt=salt)
            slots = stack.reserve(path, f"store {number}", salt)
            if slots and drawn.random() < 0.7:
                stack.commit(f"store {number}")
            stack.release(f"store {number}")
            if found.slots and drawn.random() < 0.7:
                stack.release(f"request {number}")
            stack.drain(5)
            arena = space.stack.arenas[0]
            taken = len(arena.index) + arena.reserved
            assert sum(space.tenants.used.values()) == taken * FRAME
            assert all(nbytes > 0 for nbytes in space.tenants.used.values())
