"""Rearranges the payloads of engines with another number of ranks, of which each has some heads of every layer.

From the frame's shards into a buffer where each row of a page has all heads side by side, and from there into shards
as this engine has them: two copies by the compiled copier, which holds no lock of Python's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import attrs

from kvtier_core.layouts import ChunkLayout, Part
from kvtier_core.transfer.buffers import Buffers, address_of
from kvtier_core.transfer.copier import Copier
from kvtier_core.transfer.page_lists import Layer


class Regrouping:
    """The layouts of one engine's frames with other numbers of shards. Any thread may call any method."""

    def __init__(self, layout: ChunkLayout):
        """``layout``: of an engine whose groups divide by head, or have the same shard on all ranks."""
        self._layout = layout
        self._whole = Buffers(layout.payload_nbytes)
        self._with = functools.lru_cache(maxsize=None)(self._with_shards)

    def part_with(self, shards: int) -> Part | None:
        """The layout of a frame with so many shards; None if no engine writes such frames in this namespace."""
        return self._with(shards)

    def _with_shards(self, shards: int) -> Part | None:
        own = self._layout.shards
        if not all(group.divides_by_head for group in self._layout.groups):
            return None
        try:
            groups = [group.with_heads(own, shards) for group in self._layout.groups]
        except ValueError:
            return None
        return attrs.evolve(self._layout, groups=groups, ranks=shards).parts[0]  # type: ignore[arg-type]

    def rearrange(self, slot: memoryview, found: Part) -> None:
        """Rearrange the payload of a frame in a slot whose shards lie as in ``found``."""
        own, whole = self._layout.parts[0], self._whole.take()
        rows = range(max(blocks * group.rows for blocks, group in zip(own.blocks, self._layout.groups, strict=True)))
        base, frame = address_of(whole), address_of(slot)
        for number, shard in enumerate(found.shards):
            layers = list(self._layers(found, number, base))
            Copier(layers, frame + shard.offset, 0).scatter([rows], [0])
        for number, shard in enumerate(own.shards):
            layers = list(self._layers(own, number, base))
            Copier(layers, frame + shard.offset, 0).gather([rows], [0])
        self._whole.give_back([whole])

    def _layers(self, part: Part, number: int, whole: int) -> Iterator[Layer]:
        """The heads of one shard, as pages of one row each in the buffer that begins at the address ``whole``."""
        shards = len(part.shards)
        for layer in part.shards[number].layers:
            rows = self._layout.groups[layer.group].rows
            nbytes = layer.page_nbytes // rows
            begin = whole + shards * layer.offset + number * nbytes
            yield Layer(begin, shards * nbytes, nbytes, layer.offset, 0, rows * layer.blocks)
