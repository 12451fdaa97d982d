"""Real vLLM in this process over a disk whose codec is lossy."""

from __future__ import annotations

import pytest
from real_engines import CHUNK, cpu_and_disk, prompt

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.interfaces import Serializer


class Rounded(Serializer):
    """The lower four bits of each byte are gone, or nothing is."""

    def __init__(self, mask):
        self.table = bytes(byte & mask for byte in range(256))

    def bound(self, layout):
        return layout.payload_nbytes

    def encode(self, payload, into):
        into[: len(payload)] = bytes(payload).translate(self.table)
        return len(payload)

    decode = encode


@pytest.mark.parametrize("lossless", [False, True])
def test_kv_computed_on_lossy_kv_is_not_stored(engine, tmp_path, monkeypatch, said, lossless):
    """A prompt goes on behind one that came up from the disk. Its own chunks stand on KV that is not exact."""
    monkeypatch.setattr(RawConfig, "type", "rounded")
    monkeypatch.setattr(RawConfig, "lossless", lossless)
    monkeypatch.setattr(RawConfig, "open", lambda self, ctx: Rounded(0xFF if lossless else 0xF0))
    first = prompt(60, 5 * CHUNK)
    longer = prompt(61, 9 * CHUNK, first)
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["accept_quality"] = "unmeasured"
    with engine(stack) as served:
        served.ask(first)
        served.settle()
    with engine(stack) as served:
        said()
        (answer,) = served.ask(longer)
        (line,) = [line for line in said() if " from kvtier" in line]
        assert ("; lossy: the answer may differ)" in line) is not lossless
        assert answer.cached >= 4 * CHUNK, "the first prompt did not come up from the disk"
        served.settle()
        loaded = answer.cached // CHUNK
        arena, disk = served.manager.usage()
        assert arena.chunks == disk.chunks == (9 if lossless else loaded)
        assert served.ask(longer)[0].cached >= answer.cached, "the engine's own cache, or the arena, has it still"
        served.settle()
        arena, disk = served.manager.usage()
        assert arena.chunks == disk.chunks == (9 if lossless else loaded), "it was stored when it was asked for again"
        served.assert_at_rest()
