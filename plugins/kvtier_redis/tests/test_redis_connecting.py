"""Connections are made by redis-py, and trusted as the settings say."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import redis
from servers.redis import one_server, tls_server

from kvtier_core.errors import BackendError
from kvtier_redis.link import Deadline, Link
from kvtier_testing.samples import make_keys

KEYS = make_keys(1)


def test_redis_py_shows_the_sockets_of_its_connections(server):
    connection = redis.UnixDomainSocketConnection(path=str(server.socket))
    connection.connect()
    shown = isinstance(getattr(connection, "_sock", None), socket.socket)
    connection.disconnect()
    assert shown, f"redis-py {redis.__version__} has no Connection._sock: `Link` has to find the socket otherwise"


def test_a_connection_without_its_socket_is_a_backend_error():
    with pytest.raises(BackendError, match="does not expose the sockets"):
        Link(redis.Connection(), Deadline(1))


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    with tls_server(tmp_path_factory.mktemp("tls")) as server:
        yield server


def test_a_certificate_of_an_unknown_authority_is_refused(tls, open_tier):
    assert "CERTIFICATE_VERIFY_FAILED" in open_tier(tls).facts()["url"]
    assert open_tier(tls, verify=False).contains(KEYS) == [False]
    assert open_tier(tls, ca=tls.folder / "ca.pem").contains(KEYS) == [False]


def test_a_certificate_for_another_name_is_refused(tls, open_tier):
    settings = {"url": tls.url.replace("127.0.0.1", "localhost"), "ca": tls.folder / "ca.pem"}
    assert "Hostname mismatch" in open_tier(tls, **settings).facts()["url"]


@pytest.mark.parametrize("file", ["ca", "cert", "key"])
def test_a_file_of_tls_that_is_not_there_stops_the_start(tls, open_tier, file):
    with pytest.raises(BackendError, match="nowhere.pem: file does not exist"):
        open_tier(tls, **{file: Path("nowhere.pem")})


def test_a_wrong_database_stops_the_start(tmp_path, open_tier):
    with one_server(tmp_path / "tcp", tcp=True) as server, pytest.raises(BackendError, match="ERR DB index"):
        open_tier(server, url=f"{server.url}/9999")


def test_a_user_without_a_password_is_the_user(own_server, open_tier):
    own_server.ask("ACL", "SETUSER", "engine", "on", "nopass", "~*", "&*", "+@all")
    open_tier(own_server, username="engine")
    assert "user=engine" in own_server.ask("CLIENT", "LIST")


def test_a_user_whose_password_is_missing_is_refused(own_server, open_tier):
    own_server.ask("ACL", "SETUSER", "engine", "on", ">secret", "~*", "&*", "+@all")
    with pytest.raises(BackendError, match="WRONGPASS|invalid username-password"):
        open_tier(own_server, username="engine")
