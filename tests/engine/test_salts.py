"""Requests with a salt: what one stores over a disk that encrypts, one with the same salt finds after a restart; the
keys of a tenant have its mark.
"""

from __future__ import annotations

import attrs
import pytest
from fake_host import BLOCK, CHUNK, FRAME, LAYOUT, Host

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.layouts import KVKind, is_marked, tenant_mark
from kvtier_testing.samples import make_group

PROMPT = list(range(4 * CHUNK))
WINDOW = make_group((256, 256), name="window", block_tokens=BLOCK, kind=KVKind.SLIDING_WINDOW, reach=2 * CHUNK)
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


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize(
    "layout", [LAYOUT, attrs.evolve(LAYOUT, groups=(*LAYOUT.groups, WINDOW))], ids=["one", "parts"]
)
def test_all_frames_of_a_tenant_have_its_mark_whatever_their_adapter(layout, lookahead):
    values = {
        "version": 1,
        "chunk_tokens": CHUNK,
        "tiers": [{"type": "heap", "capacity": f"{99 * layout.frame_nbytes}B"}],
    }
    host = Host(load_config(values, Registry.of()), layout=layout, lookahead=lookahead, blocks=200)
    seen = set()
    for salt, adapter in (("ours", ""), ("ours", "0a"), ("theirs", ""), ("", "0a"), ("", "")):
        assert host.ask(f"{salt} {adapter}", PROMPT, identity=KVIdentity.of(salt, adapter)) == 0
        fresh = set(host.manager.arenas[0].index.resident) - seen
        seen |= fresh
        assert len(fresh) >= 3
        for tenant in ("ours", "theirs"):
            assert {is_marked(key, tenant_mark(tenant)) for key in fresh} == {salt == tenant}
    host.close()
