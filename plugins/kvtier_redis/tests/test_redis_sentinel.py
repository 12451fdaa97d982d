"""Sentinels name the master; when it is gone, the one that took over is asked."""

from __future__ import annotations

import pytest
from frames import read, write
from patience import wait_until
from servers.redis_groups import sentinels

from kvtier_core.errors import BackendError
from kvtier_testing.samples import make_keys

KEYS = make_keys(4)


@pytest.fixture
def service(tmp_path):
    with sentinels(tmp_path / "sentinel") as service:
        yield service


def settings(service):
    return {"url": "redis:///0", "mode": "sentinel", "sentinels": service.addresses, "service": "kv"}


def test_the_master_fails_over(service, open_tier):
    tier = open_tier(service.master, **settings(service))
    write(tier, *KEYS)
    service.master.ask("WAIT", 1, 5000)
    service.master.kill()
    with pytest.raises(BackendError):
        read(tier, *KEYS)
    wait_until(lambda: service.named() == service.replica.port, "the sentinels name no new master")
    assert read(tier, *KEYS) == ["hit"] * 4
    write(tier, *KEYS)
    assert read(tier, *KEYS) == ["hit"] * 4


def test_a_master_that_became_a_replica_is_left(service, open_tier):
    """Its connections still work, and it says READONLY."""
    tier = open_tier(service.master, **settings(service))
    write(tier, *KEYS)
    service.sentinels[0].ask("SENTINEL", "FAILOVER", "kv")
    wait_until(lambda: service.named() == service.replica.port, "the sentinels name no new master")
    service.master.ask("REPLICAOF", "127.0.0.1", service.replica.port)  # as the sentinels will say, some time
    assert write(tier, *KEYS) == [None] * 4
    assert service.replica.ask("DBSIZE") > 0


def test_sentinels_that_are_gone_or_know_nothing(service, open_tier):
    for sentinel in service.sentinels[:2]:
        sentinel.kill()
    write(open_tier(service.master, **settings(service)), *KEYS)
    tier = open_tier(service.master, **{**settings(service), "service": "other"})
    with pytest.raises(
        BackendError, match=f"none of the sentinels {service.addresses[0]}, .* knows a running master of other"
    ):
        read(tier, *KEYS)
