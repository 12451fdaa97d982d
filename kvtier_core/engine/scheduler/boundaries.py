"""Chooses where later requests may continue: the chunks of a prompt that are stored whole, and their blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvtier_core.engine.messages import ChunkPages
from kvtier_core.engine.step import BlockTables, OfferedStates
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout, KVKind, Part, part_key
from kvtier_core.types import ChunkKey, size


class Boundaries:
    """Chooses the boundaries of prompts for one engine.

    The blocks of a window exist while the engine computes past it, so any boundary can be stored: the end of each
    prompt, where the next turn of its conversation continues; places where a request found that a prompt shared with
    others continues without a boundary; and others, at regular distances at which they take no more room than the
    chunks between them. A recurrent state exists only where the engine offers it.
    """

    def __init__(self, layout: ChunkLayout):
        self._layout = layout
        self._states = frozenset(
            number for part in layout.parts for number in part.groups if layout.groups[number].kind is KVKind.STATE
        )
        self.spacing = _spacing(layout)  #: chunks between two boundaries that are stored in any case

    def describe(self) -> Iterator[str]:
        """A line for each group, and one that states where requests can continue."""
        for part in self._layout.parts:
            for group in (self._layout.groups[number] for number in part.groups):
                nbytes = group.stored(self._layout.tokens) * sum(group.page_nbytes) * self._layout.ranks
                where = "of every chunk" if part.number == 0 else "of chunks that a boundary needs"
                yield f"{group.name}: {group.needs}: {size(nbytes)} {where}"
        tokens = self._layout.tokens
        if self._states:
            yield f"requests can continue where the engine keeps states, at multiples of {tokens} tokens"
        elif self.spacing == 1:
            yield f"requests can continue at multiples of {tokens} tokens"
        else:
            yield (
                f"requests can continue at multiples of {self.spacing * tokens} tokens, at the last {tokens} of each "
                "prompt, and where prompts that begin alike part"
            )

    def among(self, first: int, end: int, asked: Collection[int], offered: Mapping[int, OfferedStates]) -> list[int]:
        """The boundaries to store after more than ``first`` and at most ``end`` chunks of a prompt.

        ``asked`` are those where others are likely to continue; ``offered`` has the states that the engine offers, by
        the number of tokens before them.
        """
        tokens = self._layout.tokens
        if self._states:
            return [n for n in range(first + 1, end + 1) if self._states <= offered.get(n * tokens, {}).keys()]
        return [n for n in range(first + 1, end + 1) if n in asked or not n % self.spacing]


def _spacing(layout: ChunkLayout) -> int:
    """Number of chunks whose parts 0 are as large as a boundary's windows; 1 if windows are no larger in any chunk."""
    chunk, others = layout.parts[0].payload_nbytes, layout.parts[1:]
    if sum(part.payload_nbytes for part in others) <= chunk:
        return 1
    longest = max(layout.tokens, *(layout.groups[part.groups[0]].reach for part in others)) // layout.tokens
    behind = range(longest, 2 * longest + 1)
    most = max(sum(len(layout.needed(part, n)) * part.payload_nbytes for part in others) for n in behind)
    return -(-most // chunk)


class PagesOfChunks:
    """The pages of the chunks of ``path``, as the block tables are in one step."""

    def __init__(self, layout: ChunkLayout, path: Sequence[ChunkKey], tables: BlockTables):
        self._layout = layout
        self._path = path
        self._tables = tables
        self._parts: dict[ChunkKey, ChunkPages] = {}

    @property
    def parts(self) -> Sequence[ChunkKey]:
        """The keys of the parts to store besides part 0 of each chunk."""
        return list(self._parts)

    def add_boundaries(self, boundaries: Iterable[int], offered: Mapping[int, OfferedStates]) -> None:
        """Add the parts that these boundaries need, unless the engine no longer keeps one of their pages.

        ``offered`` has the states that the engine offers, by the number of tokens before them.
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
        """The first chunk, not before ``first``, from which on the engine keeps all pages of part 0."""
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
