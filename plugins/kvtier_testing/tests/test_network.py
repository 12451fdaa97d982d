"""The proxy forwards what it is given, until it is told to fail; and then it fails as told."""

from __future__ import annotations

import contextlib
import random
import socket
import socketserver
import threading
import time
from pathlib import Path

import pytest
from patience import HANG

from kvtier_testing import Proxy, Way
from kvtier_testing.resources import READABLE, Resources

SHORT = 0.2  # seconds in which nothing may come


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


class TCPServer(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = False
    block_on_close = True


def serving(server):
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    return server


@pytest.fixture
def server():
    with TCPServer(("127.0.0.1", 0), Echo) as echo:
        yield serving(echo).server_address
        echo.shutdown()


@pytest.fixture
def proxy(server):
    with Proxy(server) as proxy:
        yield proxy


def connected(proxy):
    with contextlib.ExitStack() as unless_connected:
        unix = isinstance(proxy.address, Path)
        client = unless_connected.enter_context(socket.socket(socket.AF_UNIX if unix else socket.AF_INET))
        client.settimeout(HANG)
        client.connect(str(proxy.address) if unix else proxy.address)
        unless_connected.pop_all()
    return client


@pytest.fixture
def client(proxy):
    with connected(proxy) as client:
        yield client


def received(client, nbytes):
    """So many bytes, or fewer if the connection ends."""
    found = b""
    while len(found) < nbytes and (piece := client.recv(nbytes - len(found))):
        found += piece
    return found


def echo(client, data):
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    found = received(client, len(data))
    sender.join()
    return found


def hears_nothing(client):
    client.settimeout(SHORT)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(HANG)
    return True


def is_ended(client):
    """Whatever came before."""
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def test_bytes_pass_and_are_counted(proxy, client):
    data = random.Random(0).randbytes(3_000_001)
    assert echo(client, data) == data
    with connected(proxy) as another:
        assert echo(another, b"hello") == b"hello"
    assert proxy.connections == 2
    assert proxy.forwarded == {Way.REQUESTS: len(data) + 5, Way.ANSWERS: len(data) + 5}


def test_one_side_may_end_before_the_other(client):
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert received(client, 100) == b"last words"


def test_the_proxy_listens_on_a_unix_socket_and_forwards_to_one(tmp_path):
    with UnixServer(str(tmp_path / "server"), Echo) as echo_server:
        serving(echo_server)
        with Proxy(tmp_path / "server", listen=tmp_path / "proxy") as proxy, connected(proxy) as client:
            assert echo(client, b"hello") == b"hello"
            proxy.drop()
            with pytest.raises(ConnectionRefusedError):
                connected(proxy)
            proxy.heal()
            with connected(proxy) as again:
                assert echo(again, b"again") == b"again"
        assert not (tmp_path / "proxy").exists()
        echo_server.shutdown()


def test_delay_counts_each_way(proxy, client):
    proxy.delay(0.1)
    begin = time.monotonic()
    assert echo(client, b"slow") == b"slow"
    assert time.monotonic() - begin >= 0.2


def test_a_rate_is_shared_by_all_connections(proxy, client):
    proxy.limit(rate=1_000_000)
    begin = time.monotonic()
    with connected(proxy) as another:
        client.sendall(bytes(200_000))
        another.sendall(bytes(200_000))
        assert len(received(client, 200_000)) == len(received(another, 200_000)) == 200_000
    assert time.monotonic() - begin >= 0.39


def test_a_heal_waits_for_no_limit_that_was(proxy, client):
    proxy.limit(rate=1)
    client.sendall(bytes(1000))
    assert hears_nothing(client)
    proxy.heal()
    assert len(received(client, 1000)) == 1000


def test_stalled_connections_are_accepted_and_served_later(proxy, client):
    assert echo(client, b"before") == b"before"
    proxy.stall()
    client.sendall(b"old")
    with connected(proxy) as another:
        another.sendall(b"new")
        assert hears_nothing(another) and hears_nothing(client)
        assert proxy.forwarded[Way.REQUESTS] == len(b"before")
        proxy.heal()
        assert (received(client, 3), received(another, 3)) == (b"old", b"new")


def test_dropped_connections_end_and_new_ones_are_refused(proxy, client):
    assert echo(client, b"before") == b"before"
    port = proxy.port
    proxy.drop()
    assert is_ended(client)
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    proxy.drop()
    proxy.heal()
    assert proxy.port == port
    with connected(proxy) as again:
        assert echo(again, b"again") == b"again"


def test_truncated_answers_end_where_they_should(proxy, client):
    assert echo(client, b"before") == b"before"
    proxy.truncate(3)
    for each in (client, connected(proxy)):
        with each:
            each.sendall(b"answer")
            assert received(each, 6) == b"ans"
            assert is_ended(each)
    proxy.heal()
    with connected(proxy) as again:
        assert echo(again, b"again") == b"again"


def test_truncated_requests_end_where_they_should(proxy, client):
    proxy.truncate(3, Way.REQUESTS)
    client.sendall(b"request")
    assert is_ended(client)
    assert proxy.forwarded[Way.REQUESTS] == 3


def test_garbled_answers_are_other_bytes_of_the_same_length(proxy, client):
    proxy.garble()
    data = bytes(100_000)
    found = echo(client, data)
    assert len(found) == len(data) and found.count(0) < 1000
    proxy.heal()
    assert echo(client, data) == data


def test_heal_restores_the_link_that_was_made(server):
    with Proxy(server, delay=0.05) as proxy, connected(proxy) as client:
        proxy.delay(0)
        proxy.heal()
        begin = time.monotonic()
        assert echo(client, b"x") == b"x"
        assert time.monotonic() - begin >= 0.1


def test_a_server_that_is_not_there_ends_the_connection(server):
    with Proxy(("127.0.0.1", 0)) as proxy:
        with connected(proxy) as client:
            assert is_ended(client)
        proxy.server = server
        with connected(proxy) as client:
            assert echo(client, b"there") == b"there"


@pytest.mark.skipif(not READABLE, reason="what a process holds is read from /proc, which is not there")
@pytest.mark.parametrize("trouble", ["none", "stall", "drop"])
def test_the_proxy_leaves_nothing_behind(server, trouble):
    before = Resources.now()
    with Proxy(server) as proxy, connected(proxy) as client:
        echo(client, b"hello")
        if trouble == "stall":
            proxy.stall()
            client.sendall(b"held")
        elif trouble == "drop":
            proxy.drop()
    client.close()
    assert not before.since()


@pytest.mark.skipif(not READABLE, reason="what a process holds is read from /proc, which is not there")
def test_one_that_cannot_listen_leaves_nothing_behind(server, tmp_path):
    before = Resources.now()
    with pytest.raises(OSError, match="too long"), Proxy(server, listen=tmp_path / ("long" * 50)):
        pass
    assert not before.since()
