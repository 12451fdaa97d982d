"""`kvtier fsck redis`, over a server in which everything is wrong that can be."""

from __future__ import annotations

import time

import pytest
from frames import PART, frame, manifests, names, parts, write
from servers.redis_groups import cluster

from kvtier_core.cli import main
from kvtier_redis.config import RedisConfig
from kvtier_testing.samples import make_frame, make_keys

WHOLE, TORN, GONE, LYING, SWAPPED = KEYS = make_keys(5)
WHOLE_ALONE = {"whole": 1, "torn": 0, "incompatible": 0, "foreign": 0, "orphaned": 0, "unreadable": 0}


@pytest.fixture
def spoiled(server, open_tier, tmp_path, monkeypatch):
    """A server with a whole frame, and every kind of damage."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n"
        f'  - {{type: redis, capacity: 1GiB, url: "{server.url}", part: 8KiB}}\n'
    )
    tier = open_tier(server, capacity=1 << 30)
    write(tier, *KEYS)
    tier.write([SWAPPED], [frame(WHOLE)])
    server.ask("SETRANGE", of(server, TORN)[0], 5000, b"torn")
    server.ask("UNLINK", of(server, GONE)[1])
    server.ask("SET", next(name for name in manifests(server) if LYING.hex() in name), "kvtier-1 lies")
    manifest = next(name for name in manifests(server) if WHOLE.hex() in name)
    server.ask("SET", f"{manifest}:{int(time.time()) - 7200:08x}{'0' * 16}:0", bytes(PART))
    server.ask("SET", f"{manifest}:{int(time.time()):08x}{'0' * 16}:0", bytes(PART))
    return server


def of(server, key):
    return [part for part in parts(server) if key.hex() in part]


def counts(out):
    rows = [line.split() for line in out.splitlines() if ":" not in line]
    return {row[0]: int(row[1]) for row in rows}


def fsck(*options):
    return main(["fsck", "redis", "--config", "kvtier.yaml", *options])


def test_everything_is_reported(spoiled, capsys):
    before = names(spoiled)
    assert fsck() == 1
    out = capsys.readouterr().out
    assert counts(out) == {**WHOLE_ALONE, "torn": 1, "foreign": 2, "orphaned": 1, "unreadable": 1}
    assert "a part of it is gone" in out
    assert names(spoiled) == before


def test_repair_leaves_what_is_whole_and_what_may_be_under_way(spoiled, capsys):
    assert fsck("--repair") == 0
    capsys.readouterr()
    assert fsck() == 0
    assert counts(capsys.readouterr().out) == WHOLE_ALONE
    assert len(manifests(spoiled)) == 1
    young = f"{int(time.time()):08x}"[:4]
    left = [part for part in parts(spoiled) if WHOLE.hex() in part and part.split(":")[-2].startswith(young)]
    assert len(left) == 4, "its three parts, and one of a write that may still be under way"


def test_parts_of_a_frame_that_is_gone_are_found_when_they_are_old(spoiled, capsys):
    """Those of LYING are young: its writer may be about to write its manifest."""
    assert fsck("--repair") == 0
    assert len(of(spoiled, LYING)) == 3


def test_a_server_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n  - {type: redis, capacity: 1GiB, url: unix:///nowhere}\n"
    )
    assert fsck() == 2
    assert "/nowhere: No such file or directory" in capsys.readouterr().err


def test_all_nodes_of_a_cluster_are_looked_at(tmp_path, open_tier):
    with cluster(tmp_path / "cluster") as nodes:
        tier, keys = open_tier(nodes[0], mode="cluster"), make_keys(30)
        tier.write(keys, [make_frame(key) for key in keys])
        with RedisConfig(url=nodes[0].url, mode="cluster").walk() as found:
            assert sorted(each.key for each in found) == sorted(keys)


def test_opening_and_measuring_leave_nothing(spoiled, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text(file.read_text().replace("capacity: 1MiB", "capacity: 64MiB"))
    before = names(spoiled), spoiled.ask("HLEN", "kvtier:namespaces")
    assert main(["check", "kvtier.yaml", "--open"]) == 0
    assert main(["doctor", "kvtier.yaml"]) == 0
    assert (names(spoiled), spoiled.ask("HLEN", "kvtier:namespaces")) == before
