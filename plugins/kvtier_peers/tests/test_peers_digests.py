"""What nodes tell each other of what they show: digests, and changes that come late, twice, never, or are nonsense."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
import tracemalloc
from array import array
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from nodes import FRAMES, KEYS, finds, holders, open_node, read
from patience import wait_until
from servers.ports import free_port

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_peers import digest as digests
from kvtier_peers import table as tables
from kvtier_peers.digest import Changes, Digest, Memory, fingerprints
from kvtier_peers.link import _CHANGES, Link
from kvtier_peers.table import DigestTable
from kvtier_testing.samples import make_keys

MANY = make_keys(400)


def digest_of(shown):
    memory = Memory(shown)
    return Digest(b"", lambda: [memory])


class Copy:
    """A node's digest in the table of a reader."""

    def __init__(self, table=None):
        self.table, self.version = table or DigestTable(), 0
        self.number = self.table.enter(self)

    def apply(self, changes):
        self.version = self.table.apply(self.number, changes)

    def shown(self, keys):
        return {key for key, nodes in zip(keys, self.table.holders(keys), strict=True) if self in nodes}


def follow(digest, copy):
    """Bring a copy up to date. Returns what was sent for that."""
    changes = digest.since(copy.version, 0)
    copy.apply(changes)
    return changes


def marks_of(keys):
    return np.unique(fingerprints(keys))


#: Keys with fingerprints that are small numbers.
SMALL = [ChunkKey(number.to_bytes(4, sys.byteorder) + bytes(28)) for number in range(12)]


# -- digests -----------------------------------------------------------------------------------------


def test_a_copy_catches_up_however_far_it_was_behind():
    draw, shown = random.Random(0), dict.fromkeys(MANY[:200])
    digest, copies = digest_of(shown), [Copy() for _ in range(5)]
    for _ in range(300):
        for key in draw.sample(MANY, 20):
            shown.pop(key) if key in shown else shown.update({key: None})
        digest.look()
        copy = draw.choice(copies)
        follow(digest, copy)
        assert copy.shown(MANY) == set(shown)


@pytest.mark.parametrize("most", [0, 30, 1 << 20])
def test_a_table_knows_what_each_node_shows_however_often_it_merges_changes(monkeypatch, most):
    """Of nodes that come, change, begin anew and leave."""
    monkeypatch.setattr(tables, "_MOST_CHANGED", most)
    draw, table = random.Random(most), DigestTable()
    shown = {}
    for version in range(1, 500):
        act = draw.random()
        if len(shown) < 2 or (act < 0.05 and len(shown) < 6):
            shown[Copy(table)] = set()
            continue
        copy = draw.choice(list(shown))
        if act < 0.1:
            table.leave(copy.number)
            del shown[copy]
        elif act < 0.2 or not copy.version:
            shown[copy] = set(draw.sample(MANY, draw.randrange(100)))
            copy.apply(Changes(0, version, come=marks_of(shown[copy])))
        else:
            changed = set(draw.sample(MANY, draw.randrange(40)))
            gone, come = changed & shown[copy], changed - shown[copy]
            copy.apply(Changes(copy.version, version, marks_of(gone), marks_of(come)))
            shown[copy] ^= changed
        assert all(each.shown(MANY) == keys for each, keys in shown.items())
        assert {node for nodes in table.holders(MANY) for node in nodes} <= shown.keys()


def test_two_nodes_never_have_one_number():
    table = DigestTable()
    first = Copy(table)
    table._numbers = count((1 << 16) - 1)
    assert [first.number, Copy(table).number, Copy(table).number] == [0, (1 << 16) - 1, 1]


def test_a_number_that_is_given_again_brings_nothing_of_the_node_before():
    first = Copy()
    first.apply(Changes(0, 1, come=marks_of(SMALL)))
    first.table.leave(first.number)
    first.table._numbers = count()
    second = Copy(first.table)
    assert second.number == first.number and not second.shown(SMALL)


def test_nothing_is_added_to_a_node_that_has_left():
    copy = Copy()
    copy.apply(Changes(0, 1, come=marks_of(SMALL[:3])))
    copy.table.leave(copy.number)
    assert not copy.shown(SMALL)
    with pytest.raises(BackendError):
        copy.apply(Changes(1, 2, come=marks_of(SMALL[3:])))


def test_changes_are_no_longer_than_all_of_it_however_much_it_changes():
    shown = dict.fromkeys(MANY[:100])
    digest, copy, behind = digest_of(shown), Copy(), Copy()
    follow(digest, behind)
    for at in range(100, 400):
        shown.pop(MANY[at - 100])
        shown[MANY[at]] = None
        digest.look()
        assert len(follow(digest, copy)) in (2, 100)
        assert sum(map(len, digest._past)) <= 100
    assert len(follow(digest, behind)) == 100 and behind.shown(MANY) == set(shown)


def test_a_digest_takes_four_bytes_a_chunk_and_errs_as_it_says():
    keys = make_keys(1 << 16)
    copy = Copy()
    copy.apply(Changes(0, 1, come=marks_of(keys[: 1 << 15])))
    assert digests.FINGERPRINT_NBYTES == 4
    assert copy.shown(keys[: 1 << 15]) == set(keys[: 1 << 15]), "none is forgotten"
    assert len(copy.shown(keys[1 << 15 :])) <= 3, "a quarter is expected of 32 768"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(Changes(6, 8, come=marks_of(SMALL[3:][:1])), id="of another version"),
        pytest.param(Changes(7, 8, come=marks_of(SMALL[1:][:1])), id="comes though it is there"),
        pytest.param(Changes(7, 8, gone=marks_of(SMALL[3:][:1])), id="goes though it is not there"),
        pytest.param(Changes(0, 8, gone=marks_of(SMALL[1:][:1])), id="of nothing"),
        pytest.param(Changes(0, 0), id="that make no version"),
        pytest.param(Changes(0, 8, come=marks_of(SMALL[:11])), id="too many"),
        pytest.param(Changes(7, 8, come=marks_of(SMALL[3:12])), id="too many together"),
    ],
)
def test_changes_that_cannot_be_are_refused_and_change_nothing(monkeypatch, changes):
    monkeypatch.setattr(tables, "MOST_CHUNKS", 10)
    copy = Copy()
    copy.apply(Changes(0, 7, come=marks_of(SMALL[1:3])))
    with pytest.raises(BackendError):
        copy.apply(changes)
    assert (copy.version, copy.shown(SMALL)) == (7, set(SMALL[1:3]))


def test_all_of_a_digest_takes_four_bytes_a_chunk_however_many_ask_for_it():
    """Until it has been sent, which a reader that takes nothing delays for ten seconds."""
    digest = digest_of(dict.fromkeys(MANY))
    first, second = digest.since(0, 0), digest.since(0, 0)
    assert first.come is second.come and len(first.come) == len(MANY)
    assert first.come.itemsize == 4


def test_a_digest_takes_a_reader_few_bytes_a_chunk_however_much_has_changed():
    drawn = make_keys(1 << 17)
    keys = list(dict(zip(fingerprints(drawn).tolist(), drawn, strict=True)).values())
    half, step = len(keys) // 2, 512
    tracemalloc.start()
    try:
        copy = Copy()
        copy.apply(Changes(0, 1, come=marks_of(keys[:half])))
        for at in range(0, half - step, step):
            gone, come = keys[at : at + step], keys[half + at : half + at + step]
            copy.apply(Changes(copy.version, copy.version + 1, marks_of(gone), marks_of(come)))
            assert tracemalloc.get_traced_memory()[0] < 24 * half
    finally:
        tracemalloc.stop()
    assert copy.shown(keys) == set(keys[at + step : half + at + step])


def test_who_does_not_take_changes_in_time_is_given_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        pytest.raises(TimeoutError),
    ):
        link = Link(ours, 1.0)
        link.until(time.monotonic() - 1)
        link.send(b"x")


def test_a_node_announces_no_more_chunks_than_its_peers_take(monkeypatch):
    monkeypatch.setattr(digests, "MOST_CHUNKS", 100)
    shown = dict.fromkeys(MANY)
    digest, copy = digest_of(shown), Copy()
    assert len(follow(digest, copy).come) == 100
    for key in MANY[:350]:
        del shown[key]
    digest.look()
    follow(digest, copy)
    assert copy.shown(MANY) <= set(shown)


@pytest.mark.parametrize("count", [(digests.MOST_CHUNKS + 1, 0), (0, (1 << 32) - 1)])
def test_a_digest_that_is_too_long_is_refused_before_it_is_received(count):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        theirs.sendall(_CHANGES.pack(0, 1, *count))
        with pytest.raises(BackendError, match="announces more than"):
            Link(ours, 1.0).follow(0, 0.1)


# -- between nodes -----------------------------------------------------------------------------------


def test_digests_follow_frames_that_come_and_go(node):
    shown = {}
    first = node(shown)
    second = node(peers=[first.address])
    wait_until(lambda: second.facts().get(first.address) == "shares its frames")
    for key in KEYS:
        shown[key] = FRAMES[key]
        wait_until(lambda key=key: finds(second, key))
    shown.pop(KEYS[0])
    wait_until(lambda: list(second.contains(KEYS)) == [False, True, True, True])


def test_the_reader_decides_how_often_it_asks_for_changes(node, monkeypatch):
    """Though the other side answers at once, as no node of this version does."""
    since, pauses = Digest.since, []
    monkeypatch.setattr(Digest, "since", lambda *args: since(*args[:2], 0))
    monkeypatch.setattr("kvtier_peers.peer._PACE", 1000.0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda pause: pauses.append(pause) or time.sleep(0.001))
    monkeypatch.setattr("kvtier_peers.peer.time", clock)
    first = node(FRAMES)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS) and len(pauses) > 5)
    assert all(500 < pause <= 1000 for pause in pauses)


def test_a_lookup_asks_no_peer(node, behind):
    address, proxy = behind
    second = node(peers=[address])
    wait_until(lambda: finds(second, *KEYS))
    passed = sum(proxy.forwarded.values())
    assert [finds(second, *KEYS) for _ in range(1000)] == [True] * 1000
    assert sum(proxy.forwarded.values()) < passed + 1000, "a question for changes has 37 bytes, and one is due in 5 s"


def test_a_key_with_the_fingerprint_of_another_is_a_miss(node):
    twin = ChunkKey(KEYS[0][: digests.FINGERPRINT_NBYTES] + KEYS[1][digests.FINGERPRINT_NBYTES :])
    first, other = node(FRAMES), node({twin: FRAMES[KEYS[1]]})
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))
    assert finds(second, twin) and read(second, [twin, KEYS[0]]) == [b"", FRAMES[KEYS[0]]]
    third = node(peers=[first.address, other.address])
    wait_until(lambda: holders(third)[0] == 2)
    assert read(third, [twin, KEYS[0]]) == [FRAMES[KEYS[1]], FRAMES[KEYS[0]]], "each from who has it"


def test_a_frame_evicted_between_digest_and_read_is_a_miss(node, monkeypatch):
    monkeypatch.setattr("kvtier_peers.listener._PACE", 60.0)
    shown = dict(FRAMES)
    first = node(shown)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))
    del shown[KEYS[0]]
    assert finds(second, *KEYS) and read(second, KEYS) == [b"", *(FRAMES[key] for key in KEYS[1:])]


def test_after_changes_that_were_lost_all_of_the_digest_is_sent(node, monkeypatch):
    follow, lose = Link.follow, threading.Event()

    def losing(link, version, within):
        changes = follow(link, version, within)
        if lose.is_set() and changes.come:
            lose.clear()
            changes = follow(link, changes.version, within)
        return changes

    monkeypatch.setattr(Link, "follow", losing)
    shown = {KEYS[0]: FRAMES[KEYS[0]]}
    first = node(shown)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, KEYS[0]))
    lose.set()
    shown[KEYS[1]] = FRAMES[KEYS[1]]
    wait_until(lambda: not lose.is_set())
    shown[KEYS[2]] = FRAMES[KEYS[2]]
    wait_until(lambda: finds(second, *KEYS[:3]))


def test_a_peer_that_was_restarted_has_what_it_has_now(node):
    address = f"127.0.0.1:{free_port()}"
    before = open_node({KEYS[0]: FRAMES[KEYS[0]]}, listen=address)
    second = node(peers=[address])
    wait_until(lambda: finds(second, KEYS[0]))
    before.close()
    node({KEYS[1]: FRAMES[KEYS[1]]}, listen=address)
    wait_until(lambda: finds(second, KEYS[1]))
    assert list(second.contains(KEYS)) == [False, True, False, False]


def test_a_node_that_took_the_place_of_another_is_not_believed_to_have_its_frames(node, behind):
    """Although the connection to the other one seems to live on."""
    address, proxy = behind
    third = node({KEYS[1]: FRAMES[KEYS[1]]})
    second = node(peers=[address])
    wait_until(lambda: finds(second, *KEYS))
    proxy.server = ("127.0.0.1", int(third.address.rpartition(":")[2]))
    (error,) = read(second, KEYS[:1])
    assert isinstance(error, BackendError) and "it is a different engine" in str(error)
    assert list(second.contains(KEYS)) == [False] * len(KEYS)
    wait_until(lambda: finds(second, KEYS[1]))
    assert list(second.contains(KEYS)) == [False, True, False, False]
    assert read(second, KEYS[1:2]) == [FRAMES[KEYS[1]]]


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(_CHANGES.pack(5, 6, 0, 0), id="of no version"),
        pytest.param(_CHANGES.pack(0, 6, 1, 0) + array("I", [1]).tobytes(), id="gone before it came"),
        pytest.param(_CHANGES.pack(0, 6, 0, 1 << 31), id="endless"),
    ],
)
def test_a_peer_whose_digest_is_nonsense_is_left_alone(node, monkeypatch, told):
    tell = Link.tell
    monkeypatch.setattr(Link, "tell", lambda link, changes: link.send(told))
    first = node(FRAMES)
    second = node(peers=[first.address])
    wait_until(lambda: "digest" in (state := second.facts().get(first.address, "")) or "announces" in state)
    time.sleep(0.1)
    assert not any(second.contains(KEYS))
    monkeypatch.setattr(Link, "tell", tell)
    wait_until(lambda: finds(second, *KEYS))
