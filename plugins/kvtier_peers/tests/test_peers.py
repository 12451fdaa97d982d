"""Nodes that show each other their frames, and peers that fail, hang, lie, or must not be let in."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

import attrs
import pytest
from nodes import FRAMES, KEYS, NBYTES, finds, holders, open_node, read
from patience import HANG, assert_never, wait_until
from servers.ports import free_port
from servers.redis import make_certificate

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.stack.store_tier.reads import read_frames
from kvtier_core.types import EnvSecret, ReadStatus, Seconds
from kvtier_peers.link import _GREETING
from kvtier_peers.settings import Address
from kvtier_testing import Proxy
from kvtier_testing.samples import make_context, make_frame, make_layout, make_namespace

SECRET = "a secret of thirty-two characters"
over_both = pytest.mark.parametrize("secured", ["a token", "TLS"], indirect=True)


def test_nodes_read_from_each_other(node):
    """What each shows the other finds; what nobody has is a miss."""
    first = node({KEYS[0]: FRAMES[KEYS[0]]})
    second = node({KEYS[1]: FRAMES[KEYS[1]]}, peers=[first.address])
    third = node(peers=[first.address, second.address])
    wait_until(lambda: finds(third, *KEYS[:2]))
    assert list(third.contains(KEYS)) == [True, True, False, False]
    assert read(third, KEYS) == [FRAMES[KEYS[0]], FRAMES[KEYS[1]], b"", b""]
    wait_until(lambda: finds(second, KEYS[0]))
    assert list(second.contains(KEYS)) == [True, False, False, False], "its own frames are in its arena"


def test_frames_of_another_namespace_are_not_shown(node):
    first = node({KEYS[0]: FRAMES[KEYS[0]]})
    same = node(peers=[first.address])
    other = node(peers=[first.address], ctx=make_context(namespace=make_namespace("another")))
    wait_until(lambda: finds(same, KEYS[0]))
    time.sleep(0.1)
    assert not finds(other, KEYS[0]) and read(other, KEYS[:1]) == [b""]


def test_namespaces_of_a_process_share_a_listener(node):
    """As those of a server do: each stack shows its own frames at the same address."""
    address = f"127.0.0.1:{free_port()}"
    other = make_context(namespace=make_namespace("another"))
    node({KEYS[0]: FRAMES[KEYS[0]]}, listen=address)
    second = open_node({KEYS[1]: FRAMES[KEYS[1]]}, ctx=other, listen=address)
    ours, theirs = node(peers=[address]), node(peers=[address], ctx=other)
    wait_until(lambda: finds(ours, KEYS[0]) and finds(theirs, KEYS[1]))
    assert not finds(ours, KEYS[1]) and not finds(theirs, KEYS[0])
    second.close()
    wait_until(lambda: not finds(theirs, KEYS[1]))
    assert finds(ours, KEYS[0])


class Fleeting(dict):
    """Memory whose slots are used again as soon as a thread has looked at a frame."""

    def get(self, key, default=None):
        return self.pop(key, default)


def test_a_frame_whose_slot_is_used_again_while_it_is_sent_is_a_miss(node):
    """Although every byte may have been sent before."""
    goes = Fleeting()
    first = node(goes)
    second = node(peers=[first.address])
    wait_until(lambda: goes.update(FRAMES) or finds(second, *KEYS))
    goes.update(FRAMES)
    assert read(second, KEYS) == [b""] * len(KEYS)
    assert not goes


def test_a_frame_that_is_longer_than_a_slot_is_a_miss(node):
    first = node(FRAMES)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS[:1], NBYTES - 1) == [b""]
    assert read(second, KEYS[:1]) == [FRAMES[KEYS[0]]]


# -- peers that fail ---------------------------------------------------------------------------------


@over_both
def test_another_peer_sends_what_one_failed_to_send(node, behind):
    address, proxy = behind
    third = node(peers=[address, node(FRAMES).address])
    wait_until(lambda: holders(third) == [2] * len(KEYS))
    proxy.truncate(NBYTES)
    assert read(third, KEYS) == [FRAMES[key] for key in KEYS]


def test_a_peer_that_lacks_what_it_announces_is_not_asked_first_again(node):
    class Boast(dict):
        asked = 0

        def get(self, key, default=None):
            self.asked += 1

    boast = Boast(FRAMES)
    third = node(peers=[node(boast).address, node(FRAMES).address])
    wait_until(lambda: holders(third) == [2] * len(KEYS))
    for _ in range(5):
        assert read(third, KEYS) == [FRAMES[key] for key in KEYS]
    assert boast.asked <= len(KEYS)


def test_a_frame_that_one_peer_has_damaged_is_read_whole_from_another(node):
    """Whoever sent the damaged one is left alone, and the key is not given up."""
    key, layout = KEYS[0], make_layout((1024, 3072), 4)
    codec, frame = FrameCodec(make_namespace(), layout), make_frame(key, layout.frame_nbytes)
    damaged = node({key: bytes(len(frame)), KEYS[1]: frame})

    def read_as_a_stack(node):
        (found,) = read_frames(node, codec, [(key, memoryview(bytearray(len(frame))))], {})
        return found.status

    one = node(peers=[damaged.address])
    wait_until(lambda: finds(one, *KEYS[:2]))
    assert read_as_a_stack(one) is ReadStatus.CORRUPT
    assert one.facts()[damaged.address] == "it sent a damaged frame" and not finds(one, KEYS[1])
    both = node(peers=[damaged.address, node({key: frame}).address])
    wait_until(lambda: holders(both)[0] == 2)
    assert [read_as_a_stack(both) for _ in range(2)] == [ReadStatus.VERIFIED] * 2


@over_both
def test_a_peer_that_is_gone_is_a_miss_and_is_found_again(node, behind):
    address, proxy = behind
    second = node(peers=[address])
    wait_until(lambda: finds(second, *KEYS))
    proxy.drop()
    wait_until(lambda: second.facts()[address] != "shares its frames")
    assert read(second, KEYS) == [b""] * len(KEYS)
    assert list(second.contains(KEYS)) == [False] * len(KEYS)
    proxy.heal()
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS) == [FRAMES[key] for key in KEYS]


@over_both
def test_a_peer_that_hangs_costs_one_call_its_patience(node, behind):
    """The next calls leave it alone, and others are asked as ever."""
    address, proxy = behind
    other = node({KEYS[3]: FRAMES[KEYS[3]]})
    third = node(peers=[address, other.address], patience=Seconds(0.2))
    wait_until(lambda: finds(third, *KEYS) and holders(third)[3] == 2)
    proxy.stall()
    begun = time.monotonic()
    wait_until(lambda: read(third, KEYS)[3] == FRAMES[KEYS[3]])  # also the other may need more than its patience
    assert time.monotonic() - begun >= 0.2
    asked = proxy.connections
    assert [list(third.contains(KEYS)) for _ in range(100)] == [[False, False, False, True]] * 100
    assert proxy.connections <= asked + 3, "it is tried again, at growing distances, and not by every call"


def test_peers_that_hang_cost_one_wait_together(node):
    """All of them are asked before any has answered."""
    with contextlib.ExitStack() as closing:
        proxies = []
        for key in KEYS:
            owner = node({key: FRAMES[key]})
            proxies.append(closing.enter_context(Proxy(("127.0.0.1", int(owner.address.rpartition(":")[2])))))
        reader = node(
            peers=[f"127.0.0.1:{proxy.port}" for proxy in proxies],
            patience=Seconds(HANG),
            ctx=attrs.evolve(make_context(), timeout=Seconds(HANG)),
        )
        wait_until(lambda: finds(reader, *KEYS))
        before = [proxy.connections for proxy in proxies]
        for proxy in proxies:
            proxy.stall()
        reading = threading.Thread(target=read, args=(reader, KEYS))
        reading.start()
        wait_until(lambda: all(proxy.connections > met for proxy, met in zip(proxies, before, strict=True)))
        for proxy in proxies:
            proxy.heal()
        reading.join()


@over_both
def test_a_connection_to_a_silent_peer_is_given_up(node, behind):
    """If it were not, it would end as one that was closed."""
    address, proxy = behind
    link, _ = node(patience=Seconds(0.2))._door.enter(Address.of(address), math.inf)
    proxy.stall()
    closes = threading.Timer(30, proxy.drop)
    closes.start()
    with contextlib.closing(link), pytest.raises((TimeoutError, BlockingIOError)):
        link.follow(0, 0)
    closes.cancel()


@over_both
def test_a_peer_that_is_silent_has_nothing(node, behind, monkeypatch):
    """Although nobody has read from it meanwhile."""
    monkeypatch.setattr("kvtier_peers.peer._SILENCE", 0.1)
    address, proxy = behind
    second = node(peers=[address], patience=Seconds(1))
    wait_until(lambda: finds(second, *KEYS))
    passed = sum(proxy.forwarded.values())
    wait_until(lambda: sum(proxy.forwarded.values()) > passed + 500)
    wait_until(lambda: finds(second, *KEYS), "it says that nothing has changed")
    proxy.stall()
    wait_until(lambda: not any(second.contains(KEYS)))


@over_both
def test_garbage_is_a_miss(node, behind):
    address, proxy = behind
    second = node(peers=[address])
    wait_until(lambda: finds(second, *KEYS))
    proxy.garble()
    assert all(isinstance(each, BackendError) or each == b"" or len(each) == NBYTES for each in read(second, KEYS))
    assert_never(lambda: finds(node(peers=[address]), KEYS[0]))


def test_a_stranger_learns_nothing_and_stops_no_one(node):
    first = node(FRAMES)
    second = node(peers=[first.address])
    host, port = first.address.split(":")
    with contextlib.ExitStack() as strangers:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"kvtier peers 9\r\n" + bytes(48), bytes(4096)):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said)
        wait_until(lambda: finds(second, *KEYS))
        assert read(second, KEYS) == [FRAMES[key] for key in KEYS]


def test_connections_are_bounded_whether_they_have_said_anything_or_not(node, monkeypatch):
    monkeypatch.setattr("kvtier_peers.listener._MOST_CONNECTIONS", 2)
    first = node(FRAMES)
    host, port = first.address.split(":")
    with contextlib.ExitStack() as strangers:
        for _ in range(2):
            strangers.enter_context(socket.create_connection((host, int(port)))).recv(1)  # its greeting
        third = strangers.enter_context(socket.create_connection((host, int(port))))
        third.settimeout(HANG)
        assert third.recv(1) == b""
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))


def test_wrong_proofs_are_limited_and_named_once(node, monkeypatch, caplog):
    """Who is let in already does not notice."""
    monkeypatch.setattr("kvtier_peers.listener._MOST_STRANGERS", 2)
    monkeypatch.setattr("kvtier_peers.listener._PENALTY", HANG)
    first = node(FRAMES)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS) and read(second, KEYS) == [FRAMES[key] for key in KEYS])
    host, port = first.address.split(":")
    with contextlib.ExitStack() as strangers:
        for _ in range(2):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(_GREETING + bytes(48) + bytes(32))
        wait_until(lambda: "127.0.0.1 is refused: its token does not match ours" in caplog.text)
        third = strangers.enter_context(socket.create_connection((host, int(port))))
        third.settimeout(HANG)
        assert third.recv(1) == b""
        assert read(second, KEYS) == [FRAMES[key] for key in KEYS]
    assert caplog.text.count("is refused") == 1


# -- who is let in -----------------------------------------------------------------------------------


@pytest.fixture
def secrets(monkeypatch):
    """Two tokens."""
    monkeypatch.setenv("OURS", SECRET)
    monkeypatch.setenv("THEIRS", SECRET[::-1])
    monkeypatch.setenv("SHORT", "a word")
    return EnvSecret("OURS"), EnvSecret("THEIRS")


def test_only_who_knows_the_token_is_shown_a_frame(node, secrets):
    ours, theirs = secrets
    first = node(FRAMES, token=ours)
    second = node(peers=[first.address], token=ours)
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS) == [FRAMES[key] for key in KEYS]
    for stranger in (node(peers=[first.address], token=theirs), node(peers=[first.address], token=None)):
        assert_never(lambda stranger=stranger: finds(stranger, KEYS[0]))


def test_nor_does_who_knows_it_take_frames_from_others(node, secrets):
    ours, _ = secrets
    first = node(FRAMES, token=None)
    second = node(peers=[first.address], token=ours)
    assert_never(lambda: finds(second, KEYS[0]))


@pytest.fixture
def certificates(tmp_path):
    """Of two fleets."""
    for fleet in ("ours", "theirs"):
        (tmp_path / fleet).mkdir()
        make_certificate(tmp_path / fleet)
    return [
        {"ca": tmp_path / fleet / "ca.pem", "cert": tmp_path / fleet / "ca.pem", "key": tmp_path / fleet / "key.pem"}
        for fleet in ("ours", "theirs")
    ]


def test_with_tls_only_who_has_a_certificate_is_shown_a_frame(node, certificates):
    ours, theirs = certificates
    first = node(FRAMES, **ours, token=None)
    second = node(peers=[first.address], **ours, token=None)
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS) == [FRAMES[key] for key in KEYS]
    for stranger in (node(peers=[first.address], **theirs), node(peers=[first.address])):
        assert_never(lambda stranger=stranger: finds(stranger, KEYS[0]))


def test_beyond_loopback_nothing_is_shown_without_a_token_or_tls(secrets, certificates):
    where = f"0.0.0.0:{free_port()}"
    with pytest.raises(BackendError, match="beyond loopback needs a token or TLS"):
        open_node(listen=where, token=None)
    for settings in ({"token": secrets[0]}, {"token": None, **certificates[0]}):
        open_node(listen=where, **settings).close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"token": EnvSecret("SHORT")}, "a token must have at least 32 characters"),
        ({"token": EnvSecret("NOT_THERE")}, "NOT_THERE is not set"),
    ],
)
def test_a_malformed_token_is_refused(secrets, settings, why):
    with pytest.raises(BackendError, match=why):
        open_node(**settings)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"{where}: Address already in use; each engine on a machine needs "):
            open_node(listen=where)


# -- who the peers are -------------------------------------------------------------------------------


def test_a_node_does_not_read_from_itself(node):
    address = f"127.0.0.1:{free_port()}"
    first = node(FRAMES, listen=address, peers=[address])
    assert_never(lambda: finds(first, KEYS[0]))


def test_a_file_of_addresses_is_read_again(node, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvtier_peers.roster._AGAIN", 0.05)
    file = tmp_path / "peers"
    second = node(file=file)
    wait_until(lambda: finds(second, *KEYS) or "No such file" in caplog.text)
    first = node(FRAMES)
    file.write_text(f"# our nodes\nlocalhost:{first.address.rpartition(':')[2]}  # by name\nno address\n")
    wait_until(lambda: finds(second, *KEYS))
    wait_until(lambda: finds(second, *KEYS) and "write an address as host:port, not 'no address'" in caplog.text)
    file.write_text(node({KEYS[0]: FRAMES[KEYS[0]]}).address)
    wait_until(lambda: second.contains(KEYS[:2]) == [True, False])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.write_text(""), "it does not name any peers"),
        (lambda file: file.write_text("# none\n"), "it does not name any peers"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "can't decode"),
        (lambda file: file.unlink(), "No such file"),
    ],
    ids=["empty", "comments", "not UTF-8", "missing"],
)
def test_a_file_that_cannot_be_read_leaves_its_last_addresses(node, tmp_path, monkeypatch, caplog, spoil, why):
    monkeypatch.setattr("kvtier_peers.roster._AGAIN", 0.05)
    file = tmp_path / "peers"
    file.write_text(node(FRAMES).address)
    second = node(file=file)
    wait_until(lambda: finds(second, *KEYS))
    spoil(file)
    wait_until(lambda: second.contains(KEYS[:1]) and why in caplog.text)
    assert finds(second, *KEYS)


def test_a_name_that_is_not_resolved_for_a_moment_leaves_its_last_addresses(node, monkeypatch, caplog):
    monkeypatch.setattr("kvtier_peers.roster._AGAIN", 0.05)
    first = node(FRAMES)
    second = node(peers=[f"localhost:{first.address.rpartition(':')[2]}"])
    wait_until(lambda: finds(second, *KEYS))

    def fails(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("kvtier_peers.roster.socket.getaddrinfo", fails)
    wait_until(lambda: second.contains(KEYS[:1]) and "Temporary failure" in caplog.text)
    assert finds(second, *KEYS)


# -- a system in trouble -----------------------------------------------------------------------------


def test_threads_that_the_system_refuses_are_started_later(node, monkeypatch, caplog):
    """Those of the roster, of connections to peers, and of connections from them; a line says so."""
    monkeypatch.setattr("kvtier_peers.roster._AGAIN", 0.05)
    start, left = threading.Thread.start, {"kvtier-peers-roster", "kvtier-peers-connect", "kvtier-peer"}

    def refuses_once(thread):
        if thread.name in left:
            left.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    first = node(FRAMES)
    monkeypatch.setattr(threading.Thread, "start", refuses_once)
    second = node(peers=[first.address])
    wait_until(lambda: finds(second, *KEYS))
    assert read(second, KEYS) == [FRAMES[key] for key in KEYS] and not left
    assert "can't start new thread; retrying" in caplog.text


@over_both
def test_a_node_that_closes_waits_for_who_reads(node, secured):
    """The memory of its frames is gone afterwards."""
    first, reading = node(), threading.Event()

    class Slow(dict):
        def get(self, key, default=None):
            reading.set()
            time.sleep(0.2)
            return FRAMES.get(key)

    slow = open_node(Slow(FRAMES), **secured)
    second = node(peers=[slow.address])
    wait_until(lambda: finds(second, KEYS[0]))
    reading.clear()
    thread = threading.Thread(target=read, args=(second, KEYS[:1]))
    thread.start()
    reading.wait()
    slow.close()
    assert not slow._listener._looks and not slow._listener.shown
    thread.join()
    assert first.contains(KEYS[:1]) == [False]


@over_both
def test_a_node_closes_although_a_peer_takes_nothing_of_what_it_asked_for(node, secured):
    """Nor does it wait for the patience of the connection, which is that of the whole test."""
    long = make_frame(KEYS[0], 64 << 20)
    first = open_node({KEYS[0]: long}, **secured, patience=Seconds(HANG))
    link, _ = node()._door.enter(Address.of(first.address), math.inf)
    link.request(KEYS[:1], [len(long)])
    wait_until(lambda: first._listener._looks)
    first.close()
    link.close()


def test_a_namespace_is_hidden_although_a_peer_takes_nothing_of_what_it_asked_for(node):
    """And the listener serves others."""
    long, address = make_frame(KEYS[0], 64 << 20), f"127.0.0.1:{free_port()}"
    other = make_context(namespace=make_namespace("another"))
    node(FRAMES, listen=address, patience=Seconds(HANG))
    second = open_node({KEYS[0]: long}, ctx=other, listen=address)
    link, _ = node(ctx=other)._door.enter(Address.of(address), math.inf)
    link.request(KEYS[:1], [len(long)])
    wait_until(lambda: second._listener._looks)
    second.close()
    link.close()
    reader = node(peers=[address])
    wait_until(lambda: finds(reader, *KEYS))
