"""A capacity that several engines share: it is never exceeded, the oldest leave, and what a killed one left heals."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
from frames import NBYTES, PART, PARTS, frame, manifests, parts, read, write

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import Nbytes, Seconds
from kvtier_redis import account
from kvtier_redis.account import Account, Ledger, entry_of
from kvtier_redis.client import Client
from kvtier_redis.config import RedisConfig
from kvtier_redis.link import Deadline
from kvtier_redis.names import Manifest, Names, frame_name
from kvtier_testing.network import Proxy, Way
from kvtier_testing.samples import make_context, make_key, make_keys

CAPACITY = 64 * NBYTES


def taken(server):
    return int(server.ask("GET", "kvtier:{space}:taken") or 0) - int(server.ask("GET", "kvtier:{space}:freed") or 0)


def ledger(server):
    return server.ask("ZRANGE", "kvtier:{space}:frames", 0, -1)


def stored(server):
    """Bytes of all parts."""
    return sum(server.ask("STRLEN", part) for part in parts(server))


def accounts_for_everything(server):
    """The counter is what the ledger holds, and that is what is there."""
    entries = [entry.split() for entry in ledger(server)]
    assert {(name, write) for name, _, _, _, write in entries} == {
        (name, server.ask("GET", name).split()[-1]) for name in manifests(server)
    }
    assert taken(server) == sum(int(nbytes) for _, _, nbytes, _, _ in entries) == stored(server)
    return True


def test_the_counter_follows_every_call(server, open_tier):
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(6)
    write(tier, *keys)
    assert taken(server) == 6 * NBYTES and accounts_for_everything(server)
    tier.write(keys[:2], [frame(key, nbytes=2 * NBYTES) for key in keys[:2]])
    assert taken(server) == 8 * NBYTES and accounts_for_everything(server)
    tier.delete(keys[1:3])
    assert taken(server) == 5 * NBYTES and accounts_for_everything(server)


def test_the_oldest_leave(server, open_tier):
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(100)
    for key in keys:
        write(tier, key)
        assert stored(server) <= CAPACITY
    there = tier.contains(keys)
    assert there == sorted(there) and 60 <= sum(there) <= 64
    assert accounts_for_everything(server)


def entries_of(keys, nbytes=NBYTES):
    """In the ledger, of frames that are not on the server: those have expired, say."""
    return [entry_of(frame_name("kvtier:0123456789abcdef:", key), Manifest.new(nbytes, PART)) for key in keys]


def put(server, entries):
    """Enter them as engines did long ago, 256 at a time."""
    for first in range(0, len(entries), 256):
        words = [word for entry in entries[first : first + 256] for word in (f"{first:.6f}", entry)]
        server.ask("ZADD", "kvtier:{space}:frames", *words)


def test_a_ledger_is_read_in_pages_though_entries_of_one_time_and_others_leave(server, monkeypatch):
    monkeypatch.setattr(account, "_PAGE", 100)
    entries = entries_of(make_keys(1000))
    put(server, entries)
    with contextlib.closing(Client(RedisConfig(url=server.url))) as client:
        of_all = Ledger(client, Names("kvtier"))
        with of_all.until(Deadline(60.0)):
            listed = of_all.oldest()
            found = [next(listed)[0] for _ in range(300)]
            server.ask("ZREM", "kvtier:{space}:frames", *found[::2], *entries[-3:])
            found += [entry for entry, nbytes in listed if nbytes == NBYTES]
            assert sorted(of_all.entered_before(255.0)) == sorted(set(entries[:256]) - set(found[:300:2]))
    assert sorted(found) == sorted(entries[:-3]), "all that stayed, once each"


def calls(server, command):
    found = re.search(rf"cmdstat_{command}:calls=(\d+)", server.ask("INFO", "commandstats"))
    return int(found[1]) if found else 0


def test_an_eviction_among_two_hundred_thousand_frames_lists_a_part_and_removes_few(server, open_tier):
    """Above the number that it lists it takes as long for ten million."""
    many = 200_000
    put(server, entries_of(make_keys(many)))
    server.ask("SET", "kvtier:{space}:taken", many * NBYTES)
    tier = open_tier(server, capacity=many * NBYTES)
    server.ask("CONFIG", "RESETSTAT")
    write(tier, *make_keys(2))
    assert calls(server, "zrangebyscore") <= account._MOST_LISTED // account._PAGE + 1
    assert 1024 <= calls(server, "zrem") <= 1024 + 2 + 16
    assert taken(server) == server.ask("ZCARD", "kvtier:{space}:frames") * NBYTES < many * NBYTES
    server.ask("CONFIG", "RESETSTAT")
    write(tier, *make_keys(4)[2:])
    assert calls(server, "zrangebyscore") == 0, "there is room for more"


def test_frames_of_an_engine_whose_clock_is_ahead_leave_in_their_turn(server, open_tier, monkeypatch):
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(100)
    with monkeypatch.context() as ahead:
        ahead.setattr("time.time", lambda: 4e9)
        write(tier, *keys[:32])
    for key in keys[32:]:
        write(tier, key)
    assert not any(tier.contains(keys[:32])) and all(tier.contains(keys[50:]))


def test_a_frame_that_is_written_again_is_the_newest(server, open_tier):
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(65)
    for key in [*keys[:64], keys[0], keys[64]]:
        write(tier, key)
    assert tier.contains([keys[0], keys[1], keys[64]]) == [True, False, True]


def test_three_engines_never_exceed_it(server, open_tier):
    """Each writes frames of its own and some of the others', all at the same time."""
    engines = [open_tier(server, capacity=CAPACITY) for _ in range(3)]
    wrong = []

    def engine(number):
        for i in range(80):
            try:
                write(engines[number], make_key(i), make_key(1000 * number + i))
            except BackendError as error:
                wrong.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert taken_and_stored(server) <= CAPACITY
    for thread in threads:
        thread.join()
    assert not wrong
    assert accounts_for_everything(server)
    assert 50 * NBYTES < taken(server) <= CAPACITY


def taken_and_stored(server):
    """Bytes of the frames that can be found now."""
    sizes = [server.ask("GET", name) for name in manifests(server)]
    return sum(int(manifest.split()[1]) for manifest in sizes if manifest)


def test_a_frame_that_cannot_fit(server, open_tier):
    tier, key = open_tier(server, capacity=CAPACITY), make_key(0)
    with pytest.raises(StoreFull):
        tier.write([key], [frame(key, nbytes=CAPACITY + 4096)])
    assert (taken(server), ledger(server), parts(server)) == (0, [], [])


def test_remains_of_a_killed_engine_leave_with_the_oldest(server, open_tier):
    """It had entered frames, counted them and stored parts of them, when it was killed."""
    client = Client(RedisConfig(url=server.url))
    dead = Account(client, Names("kvtier"), CAPACITY)
    left = [(frame_name("kvtier:0123456789abcdef:", key), Manifest.new(NBYTES, PART)) for key in make_keys(32)]
    with dead.until(Deadline(5)):
        dead.take([entry_of(*each) for each in left])
    for name, manifest in left:
        server.ask("SET", manifest.part_names(name)[0], bytes(PART))
    client.close()
    tier, keys = open_tier(server, capacity=CAPACITY), [make_key(number) for number in range(100, 164)]
    for key in keys:
        write(tier, key)
    assert sum(tier.contains(keys)) >= 60
    assert accounts_for_everything(server)


@pytest.mark.parametrize("wrong", [-CAPACITY, CAPACITY // 2, 10 * CAPACITY])
def test_an_account_that_is_wrong_is_corrected(server, open_tier, monkeypatch, wrong):
    monkeypatch.setattr("kvtier_core.storekit.shared_space._SETTLED", 0.0)  # as if every write were long over
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(64)
    write(tier, *keys[:40])
    server.ask("INCRBY", "kvtier:{space}:taken", wrong)
    for _ in range(3):
        for key in keys[40:]:
            write(tier, key)
    if wrong > 0:
        assert sum(tier.contains(keys)) >= 60
    assert abs(taken(server) - stored(server)) <= max(0, -wrong)


def test_frames_that_expired_leave_the_ledger_when_they_are_the_oldest(server, open_tier):
    brief = open_tier(server, capacity=CAPACITY, ttl=Seconds(1))
    write(brief, *make_keys(32))
    while any(brief.contains(make_keys(32))):
        pass
    assert len(ledger(server)) == 32
    tier, keys = open_tier(server, capacity=CAPACITY), [make_key(number) for number in range(100, 164)]
    for key in keys:
        write(tier, key)
    assert sum(tier.contains(keys)) >= 60


def test_a_frame_that_is_evicted_while_it_is_written_is_not_left_uncounted(server, open_tier, monkeypatch):
    tier, key = open_tier(server, capacity=CAPACITY), make_key(0)

    def evicted_first(account, entries):
        server.ask("ZREM", "kvtier:{space}:frames", *entries)
        server.ask("INCRBY", "kvtier:{space}:freed", NBYTES)
        return entries

    monkeypatch.setattr(Account, "keep", evicted_first)
    with pytest.raises(BackendError, match="evicted by another engine"):
        write(tier, key)
    assert (taken(server), manifests(server), parts(server)) == (0, [], [])


def test_connections_that_break_in_a_write_never_exceed_it(server, open_tier):
    """Every write breaks at another byte: in a part, in the manifest, in the clean-up, or in an answer."""
    with Proxy(server.socket) as proxy:
        tier = open_tier(server, capacity=CAPACITY, url=f"redis://127.0.0.1:{proxy.port}")
        for number in range(24):
            proxy.truncate(1500 + 1000 * number, Way.REQUESTS)
            with contextlib.suppress(BackendError):  # the last ones break behind the manifest
                write(tier, make_key(number % 20))
            proxy.heal()
            assert stored(server) <= taken(server) <= CAPACITY
        proxy.drop()
        while int(server.ask("INFO", "clients").split("connected_clients:")[1].split()[0]) > 1:
            pass  # what the server had received it carries out
    assert len(parts(server)) > PARTS * len(manifests(server)), "no write broke behind a part: the test says nothing"
    assert stored(server) <= taken(server) <= CAPACITY
    healthy = open_tier(server, capacity=CAPACITY)
    for number in range(100, 228):
        write(healthy, make_key(number))
        assert stored(server) <= taken(server) <= CAPACITY
    assert accounts_for_everything(server)


def test_parts_that_the_server_refuses_to_unlink_stay_counted(server, open_tier):
    tier, key = open_tier(server, capacity=CAPACITY), make_key(0)
    write(tier, key)
    server.ask("ACL", "SETUSER", "default", "-unlink")
    try:
        with pytest.raises(BackendError):
            tier.delete([key])
        write(tier, make_key(1))
        write(tier, make_key(1))  # replaces it
    finally:
        server.ask("ACL", "SETUSER", "default", "+unlink")
    assert stored(server) == taken(server) == 3 * NBYTES


def test_a_lock_that_a_killed_engine_held_goes_by_itself(server, open_tier):
    tier = open_tier(server, capacity=CAPACITY)
    server.ask("SET", "kvtier:{space}:evicting", "dead", "PX", 300)
    write(tier, *make_keys(64))
    write(tier, make_key(64))
    assert tier.contains([make_key(64)]) == [True]


@pytest.mark.parametrize("name", ["taken", "freed", "frames"])
def test_an_account_that_another_program_overwrote_is_an_error(server, open_tier, name):
    tier = open_tier(server, capacity=CAPACITY)
    server.ask("SET", f"kvtier:{{space}}:{name}", "text")
    with pytest.raises(BackendError):
        write(tier, make_key(0))
    assert read(tier, make_key(0)) == ["miss"]


def test_entries_that_another_program_made_are_removed(server, open_tier):
    tier = open_tier(server, capacity=CAPACITY)
    others = ["", "text", "kvtier:namespaces kvtier-1 1 4096 " + "0" * 24, "é" * 99]
    for entry in others:
        server.ask("ZADD", "kvtier:{space}:frames", 1, entry)
    for key in make_keys(70):
        write(tier, key)
    assert len(ledger(server)) == len(manifests(server)) and not set(others) & set(ledger(server))
    assert server.ask("EXISTS", "kvtier:namespaces") == 1


def test_a_recount_accounts_for_every_frame(server, open_tier):
    tier, keys = open_tier(server, capacity=CAPACITY), make_keys(10)
    write(tier, *keys)
    server.ask("ZREM", "kvtier:{space}:frames", *ledger(server)[:3])
    server.ask("ZADD", "kvtier:{space}:frames", 1, f"kvtier:x kvtier-1 {NBYTES} {PART} {'0' * 24}")
    server.ask("SET", "kvtier:{space}:taken", 12345)
    RedisConfig(url=server.url).recount(Nbytes(CAPACITY))
    assert accounts_for_everything(server)


def test_an_engine_without_a_capacity_counts_nothing(server, open_tier):
    tier = open_tier(server)
    write(tier, *make_keys(3))
    assert (ledger(server), taken(server)) == ([], 0)
    assert make_context().capacity, "the tests of capacity would say nothing with 0"
