"""The shape of an engine: what both of its processes must know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

import kvtier_cpu.plugin
import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.layouts import ChunkLayout
from kvtier_testing.samples import make_group


@attrs.frozen
class Setup:
    """By default small, so that blocks and slots are used again soon."""

    device: str = "cpu"  #: ``cuda:0`` for a real one
    seed: int = 0
    ranks: int = 1
    block_tokens: int = 4
    chunk_tokens: int = 8
    token_words: tuple[int, ...] = (2, 6)  #: of each layer, words of 8 bytes that a token has
    blocks: int = 48  #: of which block 0 belongs to nobody
    slots: int = 24
    slots_below: int = 0  #: of a second arena
    budget: int = 16  #: tokens that a request computes in a step
    active: int = 6  #: requests at a time
    prompt_tokens: int = 72  #: of the longest prompt
    failures: float = 0.0  #: of the chunks, or on a GPU of the jobs, that are copied
    zeroes: bool = False  #: the engine zeroes new blocks before it calls a connector, as vLLM does for hybrid models
    block_major: bool = False  #: a block has the pages of all layers side by side
    sleeps: bool = False  #: its pages can be unmapped
    packs: bool = False  #: the arena packs
    staged: bool = False  #: stores are staged, so that the device computes checksums; else how is drawn, or measured
    busy: int = 0  #: matrices that each forward multiplies besides, on a GPU
    disk: Path | None = None  #: the folder of a tier below the arena
    bug: str = ""  #: one of `bugs.BUGS`

    @property
    def layout(self) -> ChunkLayout:
        pages = [8 * words * self.block_tokens for words in self.token_words]
        group = make_group(pages, block_tokens=self.block_tokens)
        return ChunkLayout([group], self.chunk_tokens, self.ranks, packed=self.packs)

    @property
    def stack(self) -> StackConfig:
        frame = self.layout.frame_nbytes
        arena = {"type": "cpu", "eviction": "lru", "huge_pages": "off"}
        tiers: list[Mapping[str, str]] = [arena | {"capacity": f"{self.slots * frame}B"}]
        if self.slots_below:
            tiers.append(arena | {"capacity": f"{self.slots_below * frame}B"})
        if self.disk:
            disk = {"type": "disk", "path": str(self.disk), "capacity": f"{400 * frame}B", "min_free": "0B"}
            tiers.append(disk | {"eviction": "lru"})
        # Answers are loaded too, so that chunks end where requests still write; and no clock decides what is loaded.
        # An audit would read pages that the device has not written yet: the one here has no order with torch.
        values = {"version": 1, "chunk_tokens": self.chunk_tokens, "load": "always", "load_wait": "10s"}
        values |= {"save_decode": True, "audit_every": "off", "tiers": tiers}
        return load_config(values, Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin))
