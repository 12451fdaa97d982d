"""Redis keeps the laws: at a Unix socket, over TCP for a user with few permissions, over TLS, and in a cluster."""

from __future__ import annotations

import contextlib

import pytest
from servers.redis import cluster, one_server, tls_server

from kvtier_core.testing import SharedBackendLaws
from kvtier_core.testing.samples import make_context, make_keys, make_namespace
from kvtier_core.types import EnvSecret, Nbytes
from kvtier_redis.config import RedisConfig
from kvtier_redis.names import Names, frame_name
from kvtier_redis.servers import slot_of

PART = Nbytes(8192)  # so that the frames of the laws have several parts
COMMANDS = "+mget +get +set +getdel +unlink +hsetnx +hgetall +incrby +zadd +zrem +zrange +select"


class RedisLaws(SharedBackendLaws):
    persistent = True
    excused = {  # noqa: RUF012
        law: "scan() names nothing: of a shared store a tier asks for keys"
        for law in ("test_scan_finds_what_survived", "test_a_killed_writer_leaves_no_torn_frame")
    }
    settings = {}  # noqa: RUF012 - of RedisConfig; the fixture of a subclass adds where the server is

    def config(self, folder):
        return RedisConfig(prefix=f"kv:{folder.name}", part=PART, **self.settings)

    def spoil(self, folder, key):
        """Somebody else keeps a list under the name of the frame."""
        name = frame_name(Names(f"kv:{folder.name}").home(make_namespace()), key)
        server = self.server_of(name)
        server.ask("UNLINK", name)
        server.ask("RPUSH", name, "nothing")
        return True

    def server_of(self, name):
        return self.servers[0]


class TestUnixSocket(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with one_server(tmp_path_factory.mktemp("unix")) as server:
            cls.servers, cls.settings = [server], {"url": server.url}
            yield


class TestTcp(RedisLaws):
    """With the permissions that the README names."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with one_server(tmp_path_factory.mktemp("tcp"), tcp=True) as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVTIER_TEST_PASSWORD", "a b\n€")
            server.ask("ACL", "SETUSER", "engine", "on", ">a b\n€", "~kv:*", "resetchannels", *COMMANDS.split())
            server.ask("ACL", "SETUSER", "default", "~none")
            secret = EnvSecret("KVTIER_TEST_PASSWORD")
            cls.servers = [server]
            cls.settings = {"url": f"{server.url}/3", "username": "engine", "password": secret}
            yield

    def spoil(self, folder, key):
        return False


class TestTls(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with tls_server(tmp_path_factory.mktemp("tls")) as server:
            cls.servers, cls.settings = [server], {"url": server.url, "ca": server.folder / "ca.pem"}
            yield


class TestCluster(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with cluster(tmp_path_factory.mktemp("cluster")) as servers:
            cls.servers, cls.settings = servers, {"url": servers[0].url, "mode": "cluster"}
            yield

    def server_of(self, name):
        return self.servers[slot_of(name) * len(self.servers) // 16384]

    @contextlib.contextmanager
    def stalled(self, folder, key):
        """The node of this key hangs, and none of the others of the law is on it."""
        home = Names(f"kv:{folder.name}").home(make_namespace())
        slow, quick = (self.server_of(frame_name(home, each)) for each in (key, make_keys(2)[1]))
        if slow is quick:
            yield False
            return
        with slow.stopped():
            yield True


def test_the_keys_of_the_law_about_slow_reads_are_on_two_nodes():
    """Else the law is skipped."""
    home = Names("kv").home(make_context().namespace)
    assert len({slot_of(frame_name(home, key)) * 3 // 16384 for key in make_keys(2)}) == 2
