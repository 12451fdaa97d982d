"""Rearranges frames of engines with another number of ranks, each of which has some heads of every layer.

A page that divides by head consists of rows, and a row of heads. A page of all heads has the same number of rows, which
are longer; each row of a rank is a piece of one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import attrs

from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, Part
from kvtier_core.transfer.copier import Copier
from kvtier_core.transfer.page_lists import Layer
from kvtier_core.work.buffers import Buffers, address_of


def divides_by_head(group: KVGroup) -> bool:
    """Do its pages consist of rows of heads, for keys and values alike?"""
    if len({(each.heads, each.of_head) for each in group.elements}) != 1 or len(group.elements) != 2:
        return False
    numbers = sum(each.heads * each.tokens * each.channels for each in group.elements)
    whole = numbers % _row(group) == 0 and not any(nbytes % numbers for nbytes in group.page_nbytes)
    return whole and all(map(_lies_by_head, group.elements))


def _lies_by_head(each: Elements) -> bool:
    """Are all elements of a head within its piece of a row?"""
    row = each.heads * each.of_head
    axes = (each.tokens, each.of_token), (each.channels, each.of_channel)
    inside = sum((length - 1) * step for length, step in axes if step < each.of_head)
    outside = [step for _, step in axes if step >= each.of_head]
    return each.first % row + inside < each.of_head and not any(step % row for step in outside)


def _row(group: KVGroup) -> int:
    """Elements of a row."""
    return group.elements[0].heads * group.elements[0].of_head


def _rows(group: KVGroup) -> int:
    """Rows of a page."""
    return sum(each.heads * each.tokens * each.channels for each in group.elements) // _row(group)


def with_heads(group: KVGroup, times: int, divided: int = 1) -> KVGroup:
    """A group that divides by head, with ``times`` as many heads, then ``divided`` among ranks.

    If both are equal, any group is returned as it is. Raises ValueError if a head would be divided.
    """
    if times == divided:
        return group
    heads, rest = divmod(group.elements[0].heads * times, divided)
    if rest:
        raise ValueError(f"{heads * divided + rest} heads cannot be divided among {divided} ranks ({group.name})")
    pages = [nbytes * times // divided for nbytes in group.page_nbytes]
    elements = [_with_heads(each, heads) for each in group.elements]
    return attrs.evolve(group, page_nbytes=pages, elements=elements)


def _with_heads(each: Elements, heads: int) -> Elements:
    """The same order with rows of another number of heads."""
    row = each.heads * each.of_head
    places = {"first": each.first, "of_token": each.of_token, "of_channel": each.of_channel}
    moved = {name: place // row * heads * each.of_head + place % row for name, place in places.items()}
    return attrs.evolve(each, heads=heads, **moved)


class Regrouping:
    """Rearranges frames with another number of shards than this engine's. Any thread may call any method."""

    def __init__(self, layout: ChunkLayout):
        """``layout`` is this engine's, with one part, unpacked."""
        self._layout = layout
        #: False if a frame of another number of shards cannot be rearranged.
        self.divides = all(map(divides_by_head, layout.groups))
        self._whole = Buffers(layout.payload_nbytes)
        self.part_with = functools.cache(self._part_with)

    def _part_with(self, shards: int) -> Part | None:
        """The layout of a frame with this many shards; None if it cannot be rearranged."""
        if not self.divides:
            return None
        try:
            groups = [with_heads(group, self._layout.shards, shards) for group in self._layout.groups]
        except ValueError:
            return None
        return attrs.evolve(self._layout, groups=groups, ranks=shards).parts[0]

    def rearrange(self, slot: memoryview, found: Part) -> None:
        """Rearrange the payload of a frame in a slot whose shards have the layout ``found``.

        The movers' copier copies it twice, with pieces of rows as pages: to a buffer of whole rows, and back to this
        engine's shards.
        """
        own, whole = self._layout.parts[0], self._whole.take()
        rows = range(max(blocks * _rows(group) for blocks, group in zip(own.blocks, self._layout.groups, strict=True)))
        base, frame = address_of(whole), address_of(slot)
        for number, shard in enumerate(found.shards):
            Copier(list(self._layers(found, number, base)), frame + shard.offset, 0).scatter([rows], [0])
        for number, shard in enumerate(own.shards):
            Copier(list(self._layers(own, number, base)), frame + shard.offset, 0).gather([rows], [0])
        self._whole.give_back([whole])

    def _layers(self, part: Part, number: int, whole: int) -> Iterator[Layer]:
        """The pieces of one shard in the rows of the buffer at the address ``whole``."""
        shards = len(part.shards)
        for layer in part.shards[number].layers:
            rows = _rows(self._layout.groups[layer.group])
            nbytes = layer.page_nbytes // rows
            begin = whole + shards * layer.offset + number * nbytes
            yield Layer(begin, shards * nbytes, nbytes, layer.offset, 0, rows * layer.blocks)
