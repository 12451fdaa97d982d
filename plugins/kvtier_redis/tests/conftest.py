"""A server for each file of tests, and tiers on it that are closed."""

from __future__ import annotations

import attrs
import pytest
from frames import PART
from patience import HANG
from servers.redis import one_server

from kvtier_core.types import Nbytes, Seconds
from kvtier_redis.config import RedisConfig
from kvtier_testing.samples import make_context


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server that all tests of a file use."""
    with one_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running):
    """The same, empty."""
    running.ask("FLUSHALL")
    return running


@pytest.fixture
def own_server(tmp_path):
    """A server that one test may do anything to."""
    with one_server(tmp_path / "server") as server:
        yield server


@pytest.fixture
def open_tier():
    """Opens tiers on a server, with settings of RedisConfig and of OpenContext."""
    opened = []

    def open_tier(server, *, capacity=0, timeout=HANG, namespace=None, **settings):
        ctx = make_context(capacity=capacity, namespace=namespace)
        config = RedisConfig(**{"url": server.url, "part": Nbytes(PART), **settings})
        opened.append(config.open(attrs.evolve(ctx, timeout=Seconds(timeout))))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(server, open_tier):
    """A tier on the server, in parts of two pages."""
    return open_tier(server)
