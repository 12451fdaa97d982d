"""Tenants of one server: what each may have of its memory, and that one who floods it costs the others nothing."""

from __future__ import annotations

import random

import pytest
from books import used
from patience import HANG, wait_until
from served import FRAME, LAYOUT, keys_of, serving
from sizes import some
from test_operators import SECRET, Client
from test_shared_stack import steps_until, store

from kvtier_core.stack.outcomes import Terms
from kvtier_serve.operators.access import TOKEN
from kvtier_serve.operators.http import HTTP
from kvtier_serve.tenants import ANONYMOUS, UNBOUNDED, Quota, Tenants
from kvtier_testing.samples import make_keys

OURS, THEIRS = b'{"cache_salt": "ours"}', b'{"cache_salt": "theirs"}'


def path_of(served, salt, seed, chunks):
    """The keys of a prompt of a tenant."""
    (space,) = served.server.spaces
    tokens = [random.Random(seed).randrange(1000) for _ in range(chunks * LAYOUT.tokens)]
    return keys_of(space.namespace, tokens, salt)


def ask(stack, path, salt):
    """One request: how many of its chunks were found, and all of them are stored then."""
    stack.on_request(path, {}, salt)
    while (lookup := stack.lookup(path, "request", Terms(salt=salt))).pending:  # the machine is busy
        stack.drain(0.1)
    found = len(lookup.slots)
    stack.release("request")
    if stack.reserve(path, "store", salt):
        stack.commit("store")
    stack.drain(HANG)
    return found


def hit_rate(served, stack, *, flood, salt_of=lambda number: THEIRS):
    """Of a tenant with four prompts that return, beside others, by default one, with prompts that never do."""
    for salt in (OURS, OURS, THEIRS, THEIRS):  # who comes back has quotas of its own
        ask(stack, path_of(served, salt, 0, 1), salt)
    drawn, found, asked = random.Random(1), 0, 0
    for number in range(60):
        path = path_of(served, OURS, drawn.randrange(4), 8)
        found, asked = found + ask(stack, path, OURS), asked + len(path)
        for each in range(number * flood, (number + 1) * flood):
            salt = salt_of(each)
            ask(stack, path_of(served, salt, 1000 + each, 16), salt)
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


@pytest.mark.parametrize("eviction", some(["gittins", "lru"]))
@pytest.mark.parametrize("salt_of", [lambda each: f'{{"cache_salt": "{each}"}}'.encode(), lambda each: b""])
def test_new_salts_and_none_evade_no_quota(tmp_path, eviction, salt_of):
    rates = []
    for flood in (0, 3):
        (tmp_path / str(flood)).mkdir()
        with serving(tmp_path / str(flood), slots=66, eviction=eviction, quota=Quota(soft=32 * FRAME)) as served:
            rates.append(hit_rate(served, served.stack(), flood=flood, salt_of=salt_of))
    assert rates[0] > 0.9 and rates[1] == rates[0]


def test_a_salt_that_comes_back_has_quotas_of_its_own(tmp_path):
    with serving(tmp_path, slots=64) as served:
        stack, tenants = served.stack(), served.server.spaces.tenants
        path = path_of(served, OURS, 1, 5)
        ask(stack, path, OURS)
        assert used(tenants) == {ANONYMOUS: 5 * FRAME}
        ask(stack, path, OURS)
        assert used(tenants) == {tenants.name(OURS): 5 * FRAME}


def test_a_tenant_whose_stacks_are_closed_has_nothing(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(soft=10 * FRAME, hard=30 * FRAME)) as served:
        tenants = served.server.spaces.tenants
        for epoch in range(4):
            stack = served.stack(epoch=str(epoch))
            for _ in range(2):
                ask(stack, path_of(served, OURS, epoch, 10), OURS)
            assert used(tenants) == {tenants.name(OURS): 10 * FRAME}
            arenas = list(served.server.spaces._stacks)
            stack.close()
            wait_until(lambda: not served.server.spaces._stacks)
            assert arenas and not used(tenants)


def test_an_adapter_is_of_the_tenant_whose_requests_have_it():
    tenants = Tenants()
    assert tenants.name(b'{"cache_salt": "ours", "adapter": "0a"}') == tenants.name(OURS) != tenants.name(THEIRS)
    assert tenants.name(b'{"adapter": "0a"}') == tenants.name(b"") == ANONYMOUS
    others = b"raw", b"[" * 100_000, b'{"cache_salt": 1}', b"\xff"
    assert len({tenants.name(salt) for salt in (OURS, *others)}) == 5


def test_beyond_the_soft_quota_memory_is_used_while_no_other_tenant_needs_it(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(soft=8 * FRAME)) as served:
        stack = served.stack()
        path = path_of(served, OURS, 1, 40)
        ask(stack, path, OURS)
        assert ask(stack, path, OURS) == 40


def test_beyond_the_hard_quota_nothing_is_kept(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(hard=8 * FRAME)) as served:
        stack = served.stack()
        ask(stack, path_of(served, OURS, 1, 1), OURS)
        ask(stack, path_of(served, OURS, 1, 40), OURS)
        (space,) = served.server.spaces
        stack.drain(HANG)
        assert used(space.tenants) == {space.tenants.name(OURS): 8 * FRAME}
        assert stack.usage()[0].chunks == 8


def test_pinned_chunks_beyond_a_quota_leave_when_released(tmp_path):
    with serving(tmp_path, slots=64) as served:
        stack = served.stack()
        path = path_of(served, OURS, 1, 10)
        ask(stack, path, OURS)
        assert len(stack.lookup(path, "request", Terms(salt=OURS)).slots) == 10
        (space,) = served.server.spaces
        bounds = {space.tenants.name(OURS): Quota(hard=0)}
        served.server.ask(lambda: space.tenants.set_quotas(UNBOUNDED, bounds)).result()
        stack.drain(HANG)
        assert used(space.tenants)
        stack.release("request")
        steps_until(stack, lambda: not used(space.tenants))  # the server evicts in its next turn


def test_requests_without_a_salt_are_bounded_together(tmp_path):
    with serving(tmp_path, slots=64, quota=Quota(hard=8 * FRAME)) as served:
        stack = served.stack()
        store(stack, make_keys(20))
        steps_until(stack, lambda: stack.usage() and stack.usage()[0].chunks == 8)
        served.server.ask(lambda: served.server.spaces.tenants.set_quotas(UNBOUNDED, {})).result()
        store(stack, make_keys(20))
        stack.drain(HANG)
        assert len(stack.lookup(make_keys(20), "request").slots) == 20


@pytest.fixture
def operated(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B"}
    with serving(tmp_path, 64, disk) as served:
        http = HTTP(served.server)
        yield served, Client(f"http://127.0.0.1:{http.open_port('127.0.0.1', 0)}")
        http.close()


def test_a_tenant_is_erased_from_memory_and_disk_and_others_stay(operated):
    served, client = operated
    stack = served.stack()
    ours, theirs = path_of(served, OURS, 1, 5), path_of(served, THEIRS, 1, 7)
    ask(stack, ours, OURS)
    ask(stack, theirs, THEIRS)
    told = client("erase", {"cache_salt": "ours"})
    assert told["deleted"] == {"cpu": 5, "disk": 5} and told["tenant"] == served.server.spaces.tenants.name(OURS)
    stack.drain(HANG)
    assert not stack.lookup(ours, "request", Terms(salt=OURS)).slots
    assert len(stack.lookup(theirs, "other", Terms(salt=THEIRS)).slots) == 7
    assert client("erase", {"cache_salt": "ours"})["deleted"] == {"cpu": 0, "disk": 0}


def test_a_namespace_is_erased_and_others_stay(operated):
    served, client = operated
    first, second = served.stack("first"), served.stack("second")
    store(first, make_keys(3))
    store(second, make_keys(4))
    first.drain(HANG)
    (namespace, _) = client("status")["namespaces"]
    told = client("erase", {"namespace": namespace["namespace"]})
    assert told["deleted"] == {"cpu": 3, "disk": 3} and told["overwritten"] == {"cpu": True, "disk": False}
    assert told["namespaces"] == [namespace["namespace"]] and not told["tenant"]
    assert len(second.lookup(make_keys(4), "request").slots) == 4
    assert "name a cache_salt" in client("erase", {}, status=409)["error"]


def test_quotas_are_set_and_usage_is_told_by_names_that_tell_no_salt(operated):
    served, client = operated
    stack = served.stack()
    ask(stack, path_of(served, OURS, 1, 5), OURS)
    store(stack, make_keys(2), "plain")
    ask(stack, path_of(served, OURS, 1, 5), OURS)
    name = served.server.spaces.tenants.name(OURS)
    told = client("set_quota", {"cache_salt": "ours", "soft": 1, "hard": 10 * FRAME})
    assert told["tenants"] == {name: {"soft": 1, "hard": 10 * FRAME}} and "--quotas" in told["lost"]
    assert client("quotas") == told
    tenants = {each["tenant"]: each for each in client("tenants")}
    assert tenants[name] == {"tenant": name, "nbytes": 5 * FRAME, "soft": 1, "hard": 10 * FRAME}
    assert tenants[ANONYMOUS]["nbytes"] == 2 * FRAME and tenants[ANONYMOUS]["hard"] is None
    assert "ours" not in str(told) + str(tenants) and Tenants().name(OURS) != name


@pytest.mark.parametrize(
    ("operation", "quota", "status", "why"),
    [
        ("set_quota", {"cache_salt": "", "hard": 1}, 400, "length"),
        ("set_quota", {"cache_salt": "ours", "hard": -1}, 400, ">= 0"),
        ("set_quota", {"cache_salt": "ours", "soft": 2, "hard": 1}, 409, "less than the soft one"),
        ("set_model_quota", {"model": "model", "soft": 2, "hard": 1}, 409, "less than the soft one"),
        ("set_model_quota", {"model": "modle", "hard": 1}, 409, "no engine of 'modle'"),
    ],
)
def test_a_quota_that_cannot_be_meant_is_refused_and_changes_nothing(operated, operation, quota, status, why):
    served, client = operated
    served.stack("model")
    before = client("quotas")
    assert why in client(operation, quota, status=status)["error"]
    assert client("quotas") == before


def test_the_quota_of_a_model_is_set(operated):
    served, client = operated
    stack = served.stack("model")
    store(stack, make_keys(30))
    stack.drain(HANG)
    (memory,) = served.server.spaces.memories
    taken = memory.extents.of_model("model")
    assert client("set_model_quota", {"model": "model"})["models"] == {"model": {"soft": None, "hard": None}}
    assert memory.extents.of_model("model") == taken and taken * memory.extents.extent_nbytes >= 30 * FRAME
    client("set_model_quota", {"model": "model", "hard": 10 * FRAME})
    assert memory.extents.of_model("model") * memory.extents.extent_nbytes <= 10 * FRAME
    stack.drain(HANG)
    assert stack.usage()[0].chunks <= 10


def test_books_of_tenants_balance_whatever_comes_and_goes(tmp_path):
    drawn = random.Random(3)
    with serving(tmp_path, slots=32, quota=Quota(soft=8 * FRAME, hard=20 * FRAME)) as served:
        stack = served.stack()
        (space,) = served.server.spaces
        for number in range(150):
            salt = drawn.choice([b"", OURS, THEIRS])
            path = path_of(served, salt, drawn.randrange(6), drawn.randrange(1, 20))
            found = stack.lookup(path, f"request {number}", Terms(salt=salt))
            slots = stack.reserve(path, f"store {number}", salt)
            if slots and drawn.random() < 0.7:
                stack.commit(f"store {number}")
            stack.release(f"store {number}")
            if found.slots and drawn.random() < 0.7:
                stack.release(f"request {number}")
            stack.drain(HANG)
            arena = space.stack.arenas[0]
            taken = len(arena.index) + arena.reserved
            assert sum(used(space.tenants).values()) == taken * FRAME
            assert all(nbytes > 0 for nbytes in used(space.tenants).values())
