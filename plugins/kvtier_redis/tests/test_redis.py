"""How frames lie in Redis, and what happens to those that expire, are replaced or are evicted by the server."""

from __future__ import annotations

import time

import pytest
from frames import NBYTES, PARTS, frame, manifests, names, parts, read, write
from patience import HANG, wait_until

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT, Seconds
from kvtier_testing.samples import Poisoned, make_keys, make_namespace

ONE, TWO, THREE = KEYS = make_keys(3)


def test_a_frame_is_a_manifest_and_its_parts(server, tier):
    write(tier, ONE)
    (manifest,) = manifests(server)
    assert manifest == f"kvtier:{make_namespace().digest.hex()[:16]}:{{{ONE.hex()}}}"
    version, nbytes, part, name = server.ask("GET", manifest).split()
    assert (version, int(nbytes), int(part)) == ("kvtier-1", NBYTES, 2 * FRAME_ALIGNMENT)
    assert parts(server) == [f"{manifest}:{name}:{number}" for number in range(PARTS)]
    assert [server.ask("STRLEN", part) for part in parts(server)] == [8192, 8192, 4096]


def test_existence_of_many_keys_is_one_command(server, tier):
    write(tier, ONE)
    server.ask("CONFIG", "RESETSTAT")
    assert tier.contains([ONE] * 64 + [TWO] * 64) == [True] * 64 + [False] * 64
    called = {line.split(",")[0] for line in server.ask("INFO", "commandstats").splitlines()}
    assert called - {"# Commandstats", "cmdstat_config|resetstat:calls=1"} == {"cmdstat_mget:calls=1"}


def test_a_replaced_frame_leaves_nothing_behind(server, tier, open_tier):
    other = open_tier(server)
    for seed in (1, 2, 0):
        write(tier, ONE, TWO, seed=seed)
        write(other, TWO, THREE, seed=seed)
    assert read(tier, *KEYS) == ["hit"] * 3
    assert (len(manifests(server)), len(parts(server))) == (3, 3 * PARTS)


def test_a_deleted_frame_leaves_nothing_behind(server, tier):
    write(tier, *KEYS)
    tier.delete(KEYS)
    assert names(server) == ["kvtier:namespaces"]


@pytest.mark.parametrize("number", range(PARTS))
def test_a_frame_without_one_of_its_parts_is_a_miss(server, tier, number):
    write(tier, *KEYS)
    server.ask("UNLINK", parts(server)[number])
    assert sorted(read(tier, *KEYS)) == ["hit", "hit", "miss"]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 8191, 8193, 1 << 20])
def test_a_part_of_another_length_is_a_miss(server, tier, nbytes):
    """And the connection goes on with the answer behind it."""
    write(tier, *KEYS)
    server.ask("SET", next(part for part in parts(server) if ONE.hex() in part), bytes(nbytes))
    assert read(tier, *KEYS) == ["miss", "hit", "hit"]


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"kvtier-2 20480 8192 " + b"0" * 24,
        b"kvtier-1 0 8192 " + b"0" * 24,
        b"kvtier-1 20480 0 " + b"0" * 24,
        b"kvtier-1 20480 1 " + b"0" * 24,
        b"kvtier-1 999999999999999 4096 " + b"0" * 24,
        b"kvtier-1 9999999999999999 4096 " + b"0" * 24,
        b"kvtier-1 -1 8192 " + b"0" * 24,
        b"kvtier-1 20480 8192 " + b"X" * 24,
        b"\xff" * 100,
        b"x" * (1 << 20),
    ],
)
def test_a_manifest_that_lies_is_a_miss(server, tier, manifest):
    write(tier, *KEYS)
    server.ask("SET", next(name for name in manifests(server) if ONE.hex() in name), manifest)
    room = Poisoned(NBYTES)
    assert list(tier.read([ONE], [room.view])) == [0]
    assert room.untouched_beyond(0)
    assert read(tier, TWO) == ["hit"]
    write(tier, ONE)
    assert read(tier, *KEYS) == ["hit"] * 3


def test_frames_expire_and_their_parts_a_little_later(server, open_tier):
    tier = open_tier(server, ttl=Seconds(60))
    write(tier, ONE)
    (manifest,) = manifests(server)
    lives = [server.ask("PTTL", part) for part in parts(server)]
    assert 0 < server.ask("PTTL", manifest) <= 60_000 < min(lives) <= max(lives) <= 60_000 + 2000 * HANG


def test_an_expired_frame_is_a_miss(server, open_tier):
    tier = open_tier(server, ttl=Seconds(1))
    write(tier, ONE)
    wait_until(lambda: not any(tier.contains([ONE])), "a frame outlives its ttl")
    assert read(tier, ONE) == ["miss"]


def test_without_a_ttl_nothing_expires(server, tier):
    write(tier, ONE)
    assert {server.ask("PTTL", name) for name in names(server)} == {-1}


def test_tiers_with_other_prefixes_share_nothing(server, tier, open_tier):
    other = open_tier(server, prefix="other")
    write(tier, ONE)
    assert read(other, ONE) == ["miss"]


def test_the_namespaces_of_others_are_reported(server, tier, open_tier):
    other = open_tier(server, namespace=make_namespace("large"))
    again = open_tier(server, namespace=make_namespace("large"))
    assert list(tier.namespaces()) == [make_namespace("large")]
    assert list(other.namespaces()) == list(again.namespaces()) == [make_namespace()]


@pytest.mark.parametrize("facts", ["", "{}", "[]", "null", "{", "[" * 100_000, '{"a": 1}', b"\xff"])
def test_foreign_values_are_passed_over(server, tier, facts):
    server.ask("HSET", "kvtier:namespaces", "x", facts)
    assert make_namespace() not in list(tier.namespaces())


def test_facts_that_are_no_hash_stop_nothing(server, open_tier):
    server.ask("SET", "kvtier:namespaces", "text")
    tier = open_tier(server)
    write(tier, ONE)
    assert read(tier, ONE) == ["hit"]
    with pytest.raises(BackendError, match="WRONGTYPE"):
        tier.namespaces()


def test_a_large_frame_is_more_parts_than_a_server_is_asked_for_at_once(server, open_tier):
    tier, key = open_tier(server), make_keys(4)[3]
    large = frame(key, nbytes=101 * FRAME_ALIGNMENT)
    tier.write([key], [large])
    into = memoryview(bytearray(len(large)))
    assert list(tier.read([key], [into])) == [len(large)]
    assert into == large


def test_the_time_of_a_write_is_in_its_name(server, tier):
    """By it `kvtier fsck` knows what may still be under way."""
    write(tier, ONE)
    began = int(parts(server)[0].split(":")[-2][:8], 16)
    assert abs(began - time.time()) < 3600
