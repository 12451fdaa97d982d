"""Pages of a host in the tiers of a configuration: what comes back is what was stored, or nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from chunk_files import sizes
from disks import tmpfs
from faulty_backend import hanging
from patience import wait_until
from servers.redis import one_server

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, ContractError
from kvtier_core.types import Namespace
from kvtier_disk.backend import DiskBackend
from kvtier_hosts.pages import PageStore, Result

NBYTES = 30_000  # no multiple of anything
FRAME = 36_864
FACTS = Namespace.of({"weights": "these"})
KEYS = [b"%d" % number for number in range(40)]


def page(key: bytes, salt: int = 0) -> bytearray:
    return bytearray((key * NBYTES)[: NBYTES - 1] + bytes([salt]))


class Host:
    """A store, and the pages that a host has lent it."""

    def __init__(self, tiers, namespace=FACTS, *, follow=False, **settings):
        document = {"version": 1, "tiers": tiers, "load_wait": "20s", **settings}
        self.store = PageStore(load_config(document, Registry.discover()), namespace, NBYTES, follow=follow)
        self.followed: set[bytes] = set()  # pages that the tiers have, as `changes` says

    def wait(self, ticket: int) -> Result:
        (result,) = wait_until(lambda: list(self.store.poll()), "the job does not end")
        assert result.ticket == ticket, "results are told once, in the order of their ends"
        return result

    def put(self, keys=KEYS[:8], salt=0) -> set[bytes]:
        return set(self.wait(self.store.put(keys, [memoryview(page(key, salt)) for key in keys])).keys)

    def follow(self) -> set[bytes]:
        """What `changes` says that the tiers have, when nothing is on its way any more."""
        wait_until(lambda: not self.store.busy)
        self.store.cancel()  # the owner has ended its turn
        for key, came in self.store.changes():
            assert came != (key in self.followed), "each change is told once"
            (self.followed.add if came else self.followed.discard)(key)
        return self.followed

    def contains(self, keys=KEYS[:8]) -> set[bytes]:
        return set(self.wait(self.store.contains(keys)).keys)

    def get(self, keys=KEYS[:8], salt=0) -> set[bytes]:
        """The keys that were read. Pages that were are compared, and all others must be as they were."""
        pages = {key: bytearray(b"\xa5" * NBYTES) for key in keys}
        got = set(self.wait(self.store.get(keys, [memoryview(each) for each in pages.values()])).keys)
        for key, found in pages.items():
            assert found == (page(key, salt) if key in got else b"\xa5" * NBYTES)
        return got


@pytest.fixture
def host(request) -> Iterator:
    """``host(*tiers)`` has an arena above them. All are closed in the end."""
    opened = []

    def start(*tiers, arena=64, namespace=FACTS, **settings) -> Host:
        opened.append(Host([{"type": "cpu", "capacity": f"{arena * FRAME}B"}, *tiers], namespace, **settings))
        return opened[-1]

    yield start
    for each in opened:
        each.store.close()


def disk(path, capacity="64MiB", **settings):
    return {"type": "disk", "path": str(path), "capacity": capacity, "min_free": "0B", **settings}


def frames(path):
    return [file for file, nbytes in sizes(path).items() if nbytes == FRAME]


def test_pages_that_were_put_are_found_and_read(host, tmp_path):
    pages = host(disk(tmp_path / "kv"))
    assert pages.contains() == pages.get() == set()
    assert pages.put() == set(KEYS[:8])
    assert pages.contains(KEYS[:10]) == set(KEYS[:8])
    assert pages.get(KEYS[:10]) == set(KEYS[:8])


def test_more_pages_than_the_arena_has_slots_come_back_after_a_restart(host, tmp_path):
    first = host(disk(tmp_path / "kv"), arena=6)
    assert first.put(KEYS) == set(KEYS)
    first.store.close()
    second = host(disk(tmp_path / "kv"), arena=6)
    assert second.contains(KEYS) == second.get(KEYS) == set(KEYS)


def test_who_follows_learns_what_came_and_what_left_every_tier(host, tmp_path):
    pages = host(disk(tmp_path / "kv", f"{12 * FRAME}B"), arena=6, follow=True)
    for first in range(0, len(KEYS), 4):
        pages.put(KEYS[first : first + 4])
        assert pages.follow() == pages.contains(KEYS)
    assert 6 < len(pages.contains(KEYS)) < len(KEYS)
    pages.store.close()
    pages.followed.difference_update(key for key, came in pages.store.changes() if not came)
    assert pages.followed == set()

    again = host(disk(tmp_path / "kv", f"{12 * FRAME}B"), arena=6, follow=True)
    assert again.follow() == set(), "what a tier kept is told when it is read"
    got = again.get(KEYS)
    assert again.follow() == got & again.contains(KEYS) != set()
    again.store.renew()
    assert again.follow() == set()


def test_what_only_a_shared_store_has_is_not_told(host, tmp_path):
    first = host(disk(tmp_path / "kv", shared=True), arena=4, follow=True)
    assert first.put(KEYS[:8]) == set(KEYS[:8])
    assert len(first.follow()) == 4 and first.contains() == set(KEYS[:8])


@pytest.mark.parametrize("where", ["PYTHONPATH", "sys.path"])
def test_another_package_makes_it_cold_unless_one_has_brought_its_own(host, tmp_path, monkeypatch, where):
    """Whoever imports setuptools, say, has more places where packages lie than before."""
    first = host(disk(tmp_path / "kv"))
    first.put()
    first.store.close()
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    if where == "sys.path":
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setenv(where, str(tmp_path), prepend=":")
    assert host(disk(tmp_path / "kv")).contains() == (set(KEYS[:8]) if where == "sys.path" else set())


@pytest.mark.parametrize("at", [0, 40, FRAME - 4600], ids=["magic", "header", "payload"])
def test_a_page_with_one_flipped_bit_is_not_got(host, tmp_path, at):
    first = host(disk(tmp_path / "kv"))
    first.put()
    first.store.close()
    damaged = frames(tmp_path)[3]
    content = bytearray(damaged.read_bytes())
    content[at] ^= 1
    damaged.write_bytes(content)
    second = host(disk(tmp_path / "kv"))
    assert len(second.get()) == 7
    assert len(second.contains()) == 7


def test_other_facts_find_nothing_and_take_nothing_away(host, tmp_path):
    for namespace in (FACTS, Namespace.of({"weights": "others"})):
        pages = host(disk(tmp_path / "kv"), namespace=namespace)
        assert pages.get() == set()
        pages.put()
        pages.store.close()
    assert host(disk(tmp_path / "kv")).get() == set(KEYS[:8])


def test_after_new_weights_nothing_earlier_is_found_nor_what_follows_after_a_restart(host, tmp_path):
    pages = host(disk(tmp_path / "kv"))
    pages.put()
    pages.store.renew()
    assert pages.contains() == pages.get() == set()
    pages.put(salt=1)
    assert pages.get(salt=1) == set(KEYS[:8])
    pages.store.close()
    assert host(disk(tmp_path / "kv")).get() == set()


def test_pages_of_new_weights_are_deleted_at_the_end(host, tmp_path):
    """No other engine could find it."""
    pages = host(disk(tmp_path / "kv"))
    pages.store.renew()
    pages.put()
    pages.store.close()
    assert not frames(tmp_path)


def test_the_capacity_is_kept(host, tmp_path):
    pages = host(disk(tmp_path / "kv", capacity=f"{10 * FRAME}B", eviction="lru"), arena=4)
    for start in range(0, 40, 4):
        pages.put(KEYS[start : start + 4])
        assert len(frames(tmp_path)) <= 10
    pages.store.close()
    assert 0 < len(frames(tmp_path)) <= 10


def test_a_full_disk_is_no_more_than_misses(host, tmp_path):
    with tmpfs(tmp_path, 1 << 20) as small:
        pages = host(disk(small.folder / "kv"), arena=4)
        small.fill()
        pages.put(KEYS)
        assert pages.get(KEYS) <= set(KEYS)
        small.make_room()


def test_a_store_that_hangs_holds_no_page_of_the_host(host, tmp_path):
    """A job ends within ``load_wait``, or at once if it is cancelled; what comes later goes nowhere."""
    pages = host(disk(tmp_path / "kv"), arena=4, load_wait="200ms")
    with hanging(DiskBackend, "read", "write"):
        taken = pages.put(KEYS[:12])
        assert taken < set(KEYS[:12])
        lent = [bytearray(NBYTES) for _ in KEYS]
        ticket = pages.store.get(KEYS, [memoryview(each) for each in lent])
        pages.store.cancel()
        assert [result.ticket for result in pages.store.poll()] == [ticket]
        before = [bytes(each) for each in lent]
    assert pages.put(KEYS[12:14]) == set(KEYS[12:14])
    assert [bytes(each) for each in lent] == before


def test_jobs_of_many_threads_end_although_the_store_is_closed_meanwhile(host, tmp_path):
    pages = host(disk(tmp_path / "kv"), arena=8)
    tickets: list[int] = []

    def load() -> None:
        for number in range(200):
            keys = KEYS[number % 30 :][:8]
            views = [memoryview(page(key)) for key in keys]
            tickets.append((pages.store.put if number % 2 else pages.store.get)(keys, views))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for each in threads:
        each.start()
    pages.store.close()
    for each in threads:
        each.join()
    tickets.append(pages.store.contains(KEYS))
    told = [result.ticket for result in pages.store.poll()]
    assert sorted(told) == sorted(tickets) == sorted(set(tickets))
    assert pages.store.poll() == []


def test_many_threads_may_close_it(host, tmp_path, caplog):
    pages = host(disk(tmp_path / "kv"))
    pages.put()
    threads = [threading.Thread(target=pages.store.close, daemon=True) for _ in range(8)]
    for each in threads:
        each.start()
    failed = "no longer stored or found"
    wait_until(lambda: failed in caplog.text or not any(each.is_alive() for each in threads))
    assert failed not in caplog.text


def test_two_hosts_share_a_server(host, tmp_path):
    with one_server(tmp_path) as server:
        tier = {"type": "redis", "url": server.url}
        ours, theirs = host(tier), host(tier)
        assert theirs.contains() == set()
        ours.put()
        ours.store.close()
        time.sleep(1.1)  # that they were absent is remembered for a second
        assert theirs.contains(KEYS[:10]) == theirs.get(KEYS[:10]) == set(KEYS[:8])
        assert host(tier, namespace=Namespace.of({"weights": "others"})).get() == set()


def test_a_page_of_another_length_is_refused(host, tmp_path):
    with pytest.raises(ContractError, match=f"expected a page of {NBYTES} writable bytes, got 5"):
        host(disk(tmp_path / "kv")).store.put([b"a"], [memoryview(bytearray(5))])


def test_settings_that_a_host_decides_about_are_refused(host, tmp_path):
    for settings in ({"chunk_tokens": 64}, {"requests": {"store": "no"}}, {"log_requests": "off"}):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"{name}: it has no effect where the host moves the pages; remove it"):
            host(disk(tmp_path / "kv"), **settings)


def test_in_a_forked_process_jobs_end_at_once_with_nothing(host, tmp_path):
    """The owner's thread is the parent's, for which nothing has changed."""
    parent = host(disk(tmp_path))
    child = os.fork()
    if not child:
        ended = False
        try:
            ticket = parent.store.contains(KEYS)
            parent.store.cancel()
            ended = [(each.ticket, set(each.keys)) for each in parent.store.poll()] == [(ticket, set())]
        finally:
            os._exit(not ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parent.put() == parent.contains() == set(KEYS[:8])
