"""Requests with a salt over a disk that encrypts: what one stored, one with the same salt finds after a restart."""

from __future__ import annotations

import pytest
from fake_host import CHUNK, FRAME, Host

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import KVIdentity

PROMPT = list(range(4 * CHUNK))
OURS, THEIRS = KVIdentity(salt=b"a tenant's"), KVIdentity(salt=b"another tenant's")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """``host()`` is a new engine over the same disk; ``store_after`` is the disk's."""
    monkeypatch.setenv("KVTIER_TEST_SEAL", "a secret that is long enough for a key")

    def start(store_after=1):
        heap = {"type": "heap", "capacity": f"{32 * FRAME}B"}
        disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": f"{100 * FRAME}B", "min_free": "0B"}
        disk |= {"seal_key": "env:KVTIER_TEST_SEAL", "encrypt": True, "store_after": store_after, "eviction": "lru"}
        values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "10s", "tiers": [heap, disk]}
        return Host(load_config(values, Registry.of(kvtier_disk.plugin)))

    return start


def ask(host, *identities):
    """How many tokens the last of these requests found. The engine ends then, and others may open the disk."""
    found = [host.ask(f"request {number}", PROMPT, identity=each) for number, each in enumerate(identities)]
    host.assert_at_rest()
    host.close()
    return found[-1]


@pytest.mark.parametrize("identity", [OURS, KVIdentity()], ids=["salted", "without a salt"])
def test_stored_chunks_are_found_after_a_restart(host, identity):
    assert ask(host(), identity) == 0
    assert ask(host(), identity) == len(PROMPT)
    assert ask(host(), THEIRS) == 0


def test_chunks_written_when_they_are_named_again_are_found_too(host):
    ask(host(store_after=2), OURS, OURS)
    assert ask(host(), OURS) == len(PROMPT)
