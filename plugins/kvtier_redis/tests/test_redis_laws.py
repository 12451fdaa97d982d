"""Redis keeps the laws: at a Unix socket, over TCP with a user, over TLS, and in a cluster."""

from __future__ import annotations

import contextlib

import pytest
from servers.redis import cluster, one_server, tls_server

from kvtier_core.testing import SharedBackendLaws
from kvtier_core.types import EnvSecret, Nbytes
from kvtier_redis.config import RedisConfig
from kvtier_redis.names import Names, frame_name
from kvtier_redis.servers import slot_of

PART = Nbytes(8192)  # so that the frames of the laws have several parts
USER = "user engine on >secret ~kv:* +@all -@dangerous +cluster|slots"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("redis")


class RedisLaws(SharedBackendLaws):
    persistent = True
    excused = {  # noqa: RUF012
        law: "scan() names nothing: of a shared store a tier asks for keys"
        for law in ("test_scan_finds_what_survived", "test_a_killed_writer_leaves_no_torn_frame")
    }


class TestUnixSocket(RedisLaws):
    @pytest.fixture(autouse=True, scope="class")
    def server(self, place):
        with one_server(place / "unix") as server:
            type(self).url = server.url
            yield server

    def config(self, folder):
        return RedisConfig(url=self.url, prefix=f"kv:{folder.name}", part=PART)
