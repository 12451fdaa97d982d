"""A cluster: a node that is gone fails its own keys alone, and keys that move are found where they are."""

from __future__ import annotations

import re

import pytest
from frames import frame, read, told
from patience import wait_until
from redis.crc import key_slot
from servers.redis_groups import cluster
from servers.stopping import stop
from sizes import some

from kvtier_core.errors import BackendError
from kvtier_redis.names import Names, frame_name
from kvtier_testing.samples import make_frame, make_keys, make_namespace

KEYS = make_keys(24)
HOME = Names("kvtier").home(make_namespace())


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Three masters."""
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(running):
    """The same, empty."""
    for node in running:
        node.ask("FLUSHALL")
    return running


@pytest.fixture
def tier(nodes, open_tier):
    return open_tier(nodes[2], mode="cluster")


def slot(key):
    return key_slot(frame_name(HOME, key))


def on(number):
    """The keys of one of the three masters."""
    return [key for key in KEYS if slot(key) * 3 // 16384 == number]


def write(tier, keys):
    return [told(outcome) for outcome in tier.write(keys, [frame(key) for key in keys])]


def test_every_node_has_its_frames_whole(nodes, tier):
    write(tier, KEYS)
    assert read(tier, *KEYS) == ["hit"] * len(KEYS)
    for number, node in enumerate(nodes):
        names = [name for name in node.ask("KEYS", "*{*}*")]
        assert {name.split("{")[1].split("}")[0] for name in names} == {key.hex() for key in on(number)}


def test_nodes_without_memory_are_not_asked_for_the_slots_again(nodes, open_tier):
    tier = open_tier(nodes[2], mode="cluster", capacity=1 << 30)
    write(tier, KEYS[:3])
    before = _asked_for_slots(nodes)
    for node in nodes:
        node.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        for _ in range(5):
            with pytest.raises(BackendError, match="OOM"):
                tier.write(KEYS, [frame(key) for key in KEYS])
    finally:
        for node in nodes:
            node.ask("CONFIG", "SET", "maxmemory", 0)
    assert before and _asked_for_slots(nodes) == before


def _asked_for_slots(nodes):
    told = "".join(node.ask("INFO", "commandstats") for node in nodes)
    return sum(map(int, re.findall(r"cmdstat_cluster\|?(?:slots|shards)?:calls=(\d+)", told)))


@pytest.fixture
def nodes_of_which_one_goes(nodes):
    """The second one is back at the end, whatever became of the test."""
    yield nodes
    _comes_back(nodes[1])


def _comes_back(node):
    node.kill()
    node.start()
    wait_until(lambda: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the node does not come back")


@pytest.mark.parametrize("gone", some(["killed", "hangs"]))
def test_a_node_that_is_gone_fails_its_own_keys(nodes_of_which_one_goes, open_tier, gone):
    nodes = nodes_of_which_one_goes
    tier = open_tier(nodes[2], mode="cluster", timeout=1)
    wait_until(lambda: write(tier, KEYS) == [""] * len(KEYS))
    if gone == "killed":
        nodes[1].kill()
    else:
        stop(nodes[1].process.pid)
    served = [key not in on(1) for key in KEYS]
    wait_until(lambda: tier.contains(KEYS) == served)
    wait_until(lambda: [outcome == "hit" for outcome in read(tier, *KEYS)] == served)
    wait_until(lambda: [not outcome for outcome in write(tier, KEYS)] == served)
    for call in (tier.contains, lambda keys: read(tier, *keys), lambda keys: write(tier, keys)):
        with pytest.raises(BackendError, match=f"{nodes[1].port}|the call timed out"):
            call(on(1))
    _comes_back(nodes[1])
    wait_until(lambda: write(tier, KEYS) == [""] * len(KEYS))
    wait_until(lambda: read(tier, *KEYS) == ["hit"] * len(KEYS))


def test_a_replica_takes_over(tmp_path, open_tier):
    with cluster(tmp_path / "cluster", replicas=1) as nodes:
        _must_take_over(nodes, open_tier(nodes[2], mode="cluster"))


def _must_take_over(nodes, tier):
    write(tier, KEYS)
    nodes[0].ask("WAIT", 1, 5000)
    nodes[0].kill()
    nodes[3].ask("CLUSTER", "FAILOVER", "TAKEOVER")  # as it would by itself, some seconds later
    wait_until(lambda: "role:master" in nodes[3].ask("INFO", "replication"), "the replica does not take over")
    wait_until(lambda: _serves(nodes[2], nodes[3]), "the cluster does not agree on its new node")
    wait_until(lambda: all(tier.contains(KEYS)), "the tier does not find the new node")
    assert read(tier, *KEYS) == ["hit"] * len(KEYS)
    assert write(tier, KEYS) == [""] * len(KEYS)


def _serves(asked, node):
    return any(each[2][1] == node.port for each in asked.ask("CLUSTER", "SLOTS"))


def test_keys_that_move_are_found_by_the_same_call(nodes, tier):
    """Of writes, too, and each command that is sent to the old node is answered with MOVED."""
    key = on(0)[0]
    write(tier, KEYS)
    _move(slot(key), nodes[0], nodes[1], nodes)
    assert read(tier, *KEYS) == ["hit"] * len(KEYS)
    _move(slot(key), nodes[1], nodes[0], nodes)
    assert write(tier, KEYS) == [""] * len(KEYS)
    assert read(tier, *KEYS) == ["hit"] * len(KEYS)


def test_a_key_that_is_just_moving_is_no_frame_of_another(nodes, tier):
    """Half of its slot is here and half there: a miss or an error, and the other keys are served."""
    key = on(0)[0]
    write(tier, KEYS)
    ids = [node.ask("CLUSTER", "MYID") for node in nodes[:2]]
    nodes[1].ask("CLUSTER", "SETSLOT", slot(key), "IMPORTING", ids[0])
    nodes[0].ask("CLUSTER", "SETSLOT", slot(key), "MIGRATING", ids[1])
    names = nodes[0].ask("CLUSTER", "GETKEYSINSLOT", slot(key), 100)
    nodes[0].ask("MIGRATE", "127.0.0.1", nodes[1].port, "", 0, 5000, "KEYS", *names[: len(names) // 2])
    outcomes = dict(zip(KEYS, read(tier, *KEYS), strict=True))
    for node in nodes[:2]:
        node.ask("CLUSTER", "SETSLOT", slot(key), "STABLE")
    assert outcomes.pop(key) != "other bytes"
    assert set(outcomes.values()) == {"hit"}


def _move(number, source, target, nodes):
    names = source.ask("CLUSTER", "GETKEYSINSLOT", number, 100)
    ids = [node.ask("CLUSTER", "MYID") for node in (source, target)]
    target.ask("CLUSTER", "SETSLOT", number, "IMPORTING", ids[0])
    source.ask("CLUSTER", "SETSLOT", number, "MIGRATING", ids[1])
    assert source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names) == "OK"
    for node in (target, source, *nodes):
        node.ask("CLUSTER", "SETSLOT", number, "NODE", ids[1])


def test_a_cluster_slot_that_no_node_serves_fails_its_own_keys(nodes, tier):
    key = on(0)[0]
    write(tier, KEYS)
    for node in nodes:
        node.ask("CLUSTER", "DELSLOTS", slot(key))
    try:
        assert tier.contains(KEYS) == [slot(each) != slot(key) for each in KEYS]
        with pytest.raises(BackendError):
            tier.contains([key])
    finally:
        nodes[0].ask("CLUSTER", "ADDSLOTS", slot(key))


def test_the_capacity_of_a_cluster(nodes, open_tier):
    tier = open_tier(nodes[0], mode="cluster", capacity=10 * len(make_frame(KEYS[0])))
    for key in KEYS:
        tier.write([key], [make_frame(key)])
    there = tier.contains(KEYS)
    assert there == sorted(there), "the oldest leave first"
    assert 8 <= sum(there) <= 10
