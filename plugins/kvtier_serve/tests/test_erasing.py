"""What is erased is nowhere any more: each chunk holds a mark of its tenant, which is looked for in every byte."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
from patience import wait_until
from served import LAYOUT, serving
from test_kept_memory import adopted
from test_operators import SECRET, Client
from test_shared_stack import steps_until
from test_tenants import OURS, THEIRS, path_of

from kvtier_core.stack.outcomes import Terms
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey
from kvtier_serve.operators.access import TOKEN
from kvtier_serve.operators.http import HTTP

CHUNKS = 32
ADAPTED = b'{"cache_salt": "ours", "adapter": "0a"}'
STORES = {
    "disk": {"type": "disk", "path": "disk", "capacity": "8MiB", "min_free": "0B"},
    "gds": {"type": "gds", "paths": ["one", "two"], "capacity": "8MiB", "mode": "bounce"},
}


def mark_of(salt):
    """As long as the room between two addresses of a cache line, and nowhere else."""
    return (b"a mark of " + salt).ljust(64, b".")


@pytest.fixture(params=STORES)
def operated(tmp_path, monkeypatch, request):
    """Kept memory and a private store, in folders that can be searched, behind HTTP; each call begins a server."""
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.chdir(tmp_path)
    keep = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvtier-test-"))

    @contextlib.contextmanager
    def operated():
        with serving(tmp_path, 128, STORES[request.param], keep=keep) as served:
            http = HTTP(served.server)
            served.keep = keep
            try:
                yield served, Client(f"http://127.0.0.1:{http.open_port('127.0.0.1', 0)}")
            finally:
                http.close()

    yield operated
    shutil.rmtree(keep)


def fill(served, stack, path, salt):
    """Store chunks full of their tenant's mark, and wait until the tier below has them."""
    (space,) = served.server.spaces
    arena, (tier,) = space.stack.arenas[0], space.stack.tiers
    stack.on_request(path, {}, salt)
    slots = stack.reserve(path, "store", salt)
    assert len(slots) == len(path)

    def write():
        for slot in slots.values():
            payload = arena.memory.view(slot.index)[FRAME_HEADER_NBYTES:]
            payload[:] = (mark_of(salt) * len(payload))[: len(payload)]

    served.server.ask(write).result()
    stack.commit("store")
    steps_until(stack, lambda: all(tier.has(key) for key in path))


def found(served, mark):
    """How often these bytes lie in the memory and in the folders of the store."""
    folders = served.keep, *map(Path, ("disk", "one", "two"))
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum(file.read_bytes().count(mark) for file in files)


def erase(client, **condemned):
    """Erase until nothing is left; returns the first receipt."""
    receipt = client("erase", condemned)
    wait_until(lambda: not any(client("erase", condemned)["left"].values()))
    return receipt


def test_no_mark_of_a_tenant_is_left_and_those_of_others_are(operated):
    with operated() as (served, client):
        stack = served.stack()
        ours, adapted, theirs = (path_of(served, salt, 1, CHUNKS) for salt in (OURS, ADAPTED, THEIRS))
        for path, salt in ((ours, OURS), (adapted, ADAPTED), (theirs, THEIRS)):
            fill(served, stack, path, salt)
        assert found(served, mark_of(OURS)) >= 2048 and all(found(served, key) for key in ours)
        before = found(served, mark_of(THEIRS))
        receipt = erase(client, cache_salt="ours")
        assert set(receipt["deleted"].values()) == {2 * CHUNKS}
        assert receipt["tenant"] == served.server.spaces.tenants.name(OURS) and "ours" not in str(receipt)
        assert found(served, mark_of(OURS)) == found(served, mark_of(ADAPTED)) == 0
        assert not any(found(served, key) or list(Path().rglob(f"*{key.hex()}*")) for key in (*ours, *adapted))
        assert found(served, mark_of(THEIRS)) == before
        assert not stack.lookup(ours, "ours", Terms(salt=OURS)).slots
        assert len(stack.lookup(theirs, "theirs", Terms(salt=THEIRS)).slots) == CHUNKS


def used_while_erased(served, client):
    """An engine whose request uses a path of our tenant while it is erased."""
    stack = served.stack()
    path = path_of(served, OURS, 1, CHUNKS)
    fill(served, stack, path, OURS)
    assert len(stack.lookup(path, "request", Terms(salt=OURS)).slots) == CHUNKS
    assert client("erase", {"cache_salt": "ours"})["left"]["cpu"] == CHUNKS
    return stack


def test_what_a_request_uses_is_overwritten_when_it_is_released(operated):
    with operated() as (served, client):
        stack = used_while_erased(served, client)
        assert (served.keep / "memory").read_bytes().count(mark_of(OURS))
        stack.release("request")
        wait_until(lambda: not any(client("erase", {"cache_salt": "ours"})["left"].values()))
        assert not found(served, mark_of(OURS))


def test_what_was_in_use_when_the_server_ended_is_overwritten_by_the_next(operated):
    with operated() as (served, client):
        used_while_erased(served, client)
        served.stop()
        assert (served.keep / "memory").read_bytes().count(mark_of(OURS))
    with operated() as (served, client):
        adopted(served)
        wait_until(lambda: not any(client("erase", {"cache_salt": "ours"})["left"].values()))
        assert not found(served, mark_of(OURS))


def test_a_tenant_is_erased_after_a_restart_though_no_request_has_come_since(operated):
    with operated() as (served, client):
        stack = served.stack()
        for salt in (OURS, ADAPTED, THEIRS):
            fill(served, stack, path_of(served, salt, 1, CHUNKS), salt)
        before = found(served, mark_of(THEIRS))
    with operated() as (served, client):
        adopted(served)
        served.stack()
        assert set(erase(client, cache_salt="ours")["deleted"].values()) == {2 * CHUNKS}
        assert found(served, mark_of(OURS)) == found(served, mark_of(ADAPTED)) == 0
        assert found(served, mark_of(THEIRS)) == before


def test_prefetches_and_pins_belong_to_their_tenant_after_a_restart(operated):
    with operated() as (served, client):
        tokens = list(range(4 * LAYOUT.tokens))
        prompt = {"tokens": tokens, "cache_salt": "ours"}
        stack = served.stack()
        path = [ChunkKey(bytes.fromhex(each["key"])) for each in client("explain", prompt)["chunks"]]
        fill(served, stack, path, OURS)
        served.server.ask(lambda: [space.stack.arenas[0].invalidate_all() for space in served.server.spaces]).result()
    with operated() as (served, client):
        adopted(served)
        stack = served.stack()
        client("prefetch", prompt)
        (space,) = served.server.spaces
        arena = space.stack.arenas[0]
        wait_until(lambda: served.server.ask(lambda: all(map(arena.has, path))).result())
        name = space.tenants.name(OURS)
        assert set(arena.of_tenant(name)) == set(path)
        client("pin", prompt, name="kept")
        receipt = client("erase", {"cache_salt": "ours"})
        assert set(receipt["deleted"].values()) == {4} and receipt["left"]["cpu"] == 4
        client("unpin", name="kept")
        erase(client, cache_salt="ours")
        assert not found(served, mark_of(OURS))


def test_damaged_frames_that_are_kept_are_erased(operated):
    with operated() as (served, client):
        stack = served.stack()
        path = path_of(served, OURS, 1, 4)
        fill(served, stack, path, OURS)
        (space,) = served.server.spaces
        served.server.ask(lambda: space.stack.arenas[0].invalidate_all()).result()
        damaged = list(Path("disk").rglob("*.kv"))
        for file in damaged:
            file.write_bytes(file.read_bytes()[:-64] + b"damaged".ljust(64))
        stack.lookup(path, "request", Terms(salt=OURS))
        steps_until(stack, lambda: len(list(Path("disk").glob("quarantine/*"))) == len(damaged))
        stack.release("request")
        erase(client, cache_salt="ours")
        assert not list(Path("disk").glob("quarantine/*"))


def test_no_tenant_protects_its_chunks_by_naming_many_others(operated):
    with operated() as (served, client):
        stack = served.stack()
        path = path_of(served, OURS, 1, 4)
        fill(served, stack, path, OURS)
        (space,) = served.server.spaces
        many = [ChunkKey(number.to_bytes(32, "big")) for number in range(1 << 20)]

        def name():
            space.came(many, THEIRS)
            space.stack.on_request(many, {}, THEIRS)

        served.server.ask(name).result()
        assert set(erase(client, cache_salt="ours")["deleted"].values()) == {4}
