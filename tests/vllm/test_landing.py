"""Real vLLM whose workers read the slabs themselves: no frame passes through a slot on its way to the pages."""

from __future__ import annotations

import pytest
from conftest import cpu, prompt

from kvtier_gds.backend import GdsBackend
from kvtier_gds.landing import GdsLanding

ASKED = prompt(5, 530)
HITS = 512


def slabs(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    return {"type": "gds", "paths": paths, "capacity": "64MiB", "staging": "64MiB", "mode": "gds"}


@pytest.fixture
def landed(monkeypatch):
    """The extents that workers read. No other way from the slabs is open."""
    extents = []
    read = GdsLanding.read

    def noted(landing, wanted, into):
        extents.extend(wanted)
        return read(landing, wanted, into)

    def closed(backend, keys, into):
        raise AssertionError("a frame was read into a slot")

    monkeypatch.setattr(GdsLanding, "read", noted)
    monkeypatch.setattr(GdsBackend, "read", closed)
    return extents


@pytest.fixture
def own(engine, tmp_path):
    """The answer of the engine that stored the prompt, from its own prefix cache."""
    with engine({**cpu(), "tiers": [slabs(tmp_path)]}, enable_prefix_caching=True) as first:
        first.ask(ASKED)
        answer = first.ask(ASKED)[0]
        first.assert_at_rest()
    assert answer.cached == HITS
    return answer


@pytest.mark.parametrize("above", [[], cpu()["tiers"]], ids=["alone", "below cpu"])
def test_what_lands_is_bit_equal_to_the_engines_own_prefix_hit(engine, said, tmp_path, own, landed, above):
    with engine({**cpu(), "tiers": [*above, slabs(tmp_path)]}, enable_prefix_caching=True) as second:
        warm = second.ask(ASKED)[0]
        second.assert_at_rest()
        lines = said()
    assert any("hit 512 of 530 tokens: gds 512" in line for line in lines)
    assert any("mode: gds -> gds" in line and "land in the engine's pages: yes" in line for line in lines)
    assert len(landed) == len(set(landed)) == HITS // cpu()["chunk_tokens"]
    assert warm.cached == HITS
    assert warm.differs(own) == 0


@pytest.mark.parametrize("damage", ["a bit", "another chunk's frame"])
def test_a_frame_that_changes_between_lookup_and_read_reaches_no_request(
    engine, said, tmp_path, own, landed, monkeypatch, damage
):
    """Its request is computed, the frame is dropped, and its chunk is stored anew."""
    read = GdsLanding.read

    def after_damage(landing, extents, into):
        for at in range(1, len(extents), 3):
            wrong, other = extents[at], extents[at - 1]
            with open(tmp_path / "ab"[other.file] / "kvtier.slab", "rb") as slab:
                slab.seek(other.at)
                content = slab.read(other.nbytes)
            with open(tmp_path / "ab"[wrong.file] / "kvtier.slab", "r+b") as slab:
                slab.seek(wrong.at + 5000 if damage == "a bit" else wrong.at)
                slab.write(b"\xff" if damage == "a bit" else content)
        monkeypatch.setattr(GdsLanding, "read", read)
        return read(landing, extents, into)

    monkeypatch.setattr(GdsLanding, "read", after_damage)
    with engine({**cpu(), "tiers": [slabs(tmp_path)]}) as second:
        computed = second.ask(ASKED)[0]
        second.assert_at_rest()
        assert any("corrupt" in line for line in said())
        assert computed.cached == 0
        assert computed.differs(own) < 1e-4
        second.ask(ASKED)  # from memory; the slabs are offered again what was dropped
        second.assert_at_rest()
    with engine({**cpu(), "tiers": [slabs(tmp_path)]}) as third:
        again = third.ask(ASKED)[0]
        third.assert_at_rest()
    assert again.cached == HITS
    assert again.differs(own) == 0
