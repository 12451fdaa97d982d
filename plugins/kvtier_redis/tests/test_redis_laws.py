"""Redis keeps the laws: at a Unix socket, over TCP for a user with few permissions, over TLS, and in a cluster."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from redis.crc import key_slot
from servers.redis import one_server, tls_server
from servers.redis_groups import cluster

from kvtier_core.types import EnvSecret, Nbytes
from kvtier_redis.config import RedisConfig
from kvtier_redis.names import Names, frame_name
from kvtier_testing import Proxy, SharedBackendLaws
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

README = Path(__file__).parents[1] / "README.md"
PART = Nbytes(8192)  # so that the frames of the laws have several parts
PASSWORD = "a b\nü"
#: Those that an engine needs without a capacity, those that it needs with one, and those of `kvtier fsck`.
LINES = [line.split() for line in README.read_text().splitlines() if line.startswith("    +")]
PERMISSIONS = [permission for line in LINES for permission in line]


class RedisLaws(SharedBackendLaws):
    persistent = True
    bounded = True
    settings = {}  # noqa: RUF012 - of RedisConfig; the fixture of a subclass adds where the server is

    def config(self, folder):
        return RedisConfig(prefix=f"kv:{folder.name}", part=PART, **self.settings)

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.stopped())
            yield True

    def listings(self, folder):
        """SCAN and KEYS, and reads of the ledger, that the servers have been asked for."""
        stats = "".join(server.ask("INFO", "commandstats") for server in self.servers)
        return sum(int(calls) for calls in re.findall(r"cmdstat_(?:scan|keys|zrange|zrangebyscore):calls=(\d+)", stats))

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


@pytest.mark.more
class TestTcp(RedisLaws):
    """With the permissions that the README names, over a network that can be made slow, and be cut."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with (
            one_server(tmp_path_factory.mktemp("tcp"), tcp=True) as server,
            Proxy(("127.0.0.1", server.port)) as proxy,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("KVTIER_TEST_PASSWORD", PASSWORD)
            server.ask("ACL", "SETUSER", "engine", "on", f">{PASSWORD}", "~kv:*", "resetchannels", *PERMISSIONS)
            server.ask("ACL", "SETUSER", "default", "~none")
            cls.servers, cls.proxy = [server], proxy
            secret = EnvSecret("KVTIER_TEST_PASSWORD")
            cls.settings = {"url": f"redis://127.0.0.1:{proxy.port}/3", "username": "engine", "password": secret}
            yield

    def spoil(self, folder, key):
        return False

    @contextlib.contextmanager
    def stalled_store(self, folder):
        self.proxy.limit(10_000)  # a frame takes five times as long as a call may
        yield True
        self.proxy.heal()

    @contextlib.contextmanager
    def interrupted(self, folder):
        self.proxy.drop()
        yield True
        self.proxy.heal()


@pytest.mark.more
class TestTls(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with tls_server(tmp_path_factory.mktemp("tls")) as server:
            cls.servers, cls.settings = [server], {"url": server.url, "ca": server.folder / "ca.pem"}
            yield


@pytest.mark.more
class TestCluster(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        with cluster(tmp_path_factory.mktemp("cluster")) as servers:
            cls.servers, cls.settings = servers, {"url": servers[0].url, "mode": "cluster"}
            yield

    def server_of(self, name):
        return self.servers[key_slot(name) * len(self.servers) // 16384]

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
    assert len({key_slot(frame_name(home, key)) * 3 // 16384 for key in make_keys(2)}) == 2


@pytest.mark.parametrize(("capacity", "lines"), [(0, LINES[:1]), (1 << 20, LINES[:2])])
def test_an_engine_needs_no_more_permissions_than_the_readme_says(tmp_path, monkeypatch, capacity, lines):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", PASSWORD)
    with one_server(tmp_path / "server") as server:
        permissions = [permission for line in lines for permission in line]
        server.ask("ACL", "SETUSER", "engine", "on", f">{PASSWORD}", "~kvtier:*", "resetchannels", *permissions)
        config = RedisConfig(url=server.url, username="engine", password=EnvSecret("KVTIER_TEST_PASSWORD"))
        tier, keys = config.open(make_context(capacity=capacity)), make_keys(30)
        for key in keys:
            assert tier.write([key], [make_frame(key)]) == [None]
        assert any(tier.contains(keys))
        assert any(tier.read(keys, [memoryview(bytearray(len(make_frame(keys[0])))) for _ in keys]))
        tier.delete(keys)
        assert list(tier.namespaces()) == []
        tier.close()
