"""Which blocks hold what is to be stored of a request's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from kvtier_core.engine.messages import ChunkPages
from kvtier_core.engine.step import BlockTables, OfferedStates
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout, KVKind, Part, part_key
from kvtier_core.types import ChunkKey


class PagesOfChunks:
    """The pages of the chunks of ``path``, as the block tables are in one step."""

    def __init__(self, layout: ChunkLayout, path: Sequence[ChunkKey], tables: BlockTables):
        self._layout = layout
        self._path = path
        self._tables = tables
        self._parts: dict[ChunkKey, ChunkPages] = {}

    @property
    def parts(self) -> Sequence[ChunkKey]:
        """The keys of what is to be stored besides part 0 of each chunk."""
        return list(self._parts)

    def add_boundaries(self, boundaries: Iterable[int], offered: Mapping[int, OfferedStates]) -> None:
        """Add the parts that these boundaries need, unless the engine no longer keeps one of their pages.

        ``offered`` has the states that the engine offers, by the tokens behind which they are.
        """
        for boundary in boundaries:
            states = offered.get(boundary * self._layout.tokens, {})
            pages = {
                part_key(self._path[number], part.number): self._pages(part, number, states)
                for part in self._layout.parts[1:]
                for number in self._layout.needed(part, boundary)
            }
            if not any(map(_has_holes, pages.values())):
                self._parts.update(pages)

    def whole_from(self, first: int) -> int:
        """The first chunk, from ``first`` on, behind which the engine keeps all pages of part 0."""
        (part, *_), numbers = self._layout.parts, range(len(self._path) - 1, first - 1, -1)
        if self._layout.groups[part.groups[0]].kind is KVKind.FULL_ATTENTION:
            return first
        return next((number + 1 for number in numbers if _has_holes(self._pages(part, number, {}))), first)

    def by_key(self, first: int) -> Mapping[ChunkKey, ChunkPages]:
        """The pages of all chunks from ``first`` on, and of the parts that were added."""
        part = self._layout.parts[0]
        chunks = {key: self._pages(part, number, {}) for number, key in enumerate(self._path[first:], first)}
        return chunks | self._parts

    def _pages(self, part: Part, chunk: int, states: OfferedStates) -> ChunkPages:
        return tuple(
            ((states[number],) if number in states else self._blocks(number, chunk)) if number in part.groups else ()
            for number in range(len(self._layout.groups))
        )

    def _blocks(self, group: int, chunk: int) -> tuple[int, ...]:
        blocks = self._layout.stored_blocks(group, chunk)
        return tuple(self._tables[group][blocks.start : blocks.stop])


def _has_holes(pages: ChunkPages) -> bool:
    return NO_BLOCK in chain.from_iterable(pages)
