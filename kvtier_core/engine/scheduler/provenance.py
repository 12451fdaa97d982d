"""Tracks which of the engine's blocks hold KV that may be stored.

A block is trusted if kvtier loaded it, or if this engine's forward computed it from KV that was trusted up to there.
Everything else may come from another connector: an engine may have several, may learn late or never that a load
was wrong, and keeps loaded blocks in its own prefix cache, where later requests find them. Untrusted KV is never
stored, nor is KV that was computed from it.

A block is written by a load or by a forward: `allocated` is called before every load, `computed` before every forward.

Engines name the blocks of their own prefix cache by the tokens up to their end. With draft layers KV also depends on
tokens ahead of it, so a block is trusted only for requests that have the same ones there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set

import attrs

from kvtier_core.engine.step import BlockTables, ScheduledRequest, Step
from kvtier_core.interfaces import NO_BLOCK

#: What the KV of a request before a number of its tokens depends on after them; None if that is not known yet.
Ahead = Callable[[int], bytes | None]


@attrs.define(eq=False)
class Trust:
    """What is trusted of the KV that a request has."""

    tokens: int | None = None  #: number of tokens, from the first one on; None: not known yet
    #: Blocks that it computed before it was known what is ahead of them, with the number of tokens before their end.
    open: dict[int, int] = attrs.field(factory=dict)


class Provenance:
    """The trusted blocks. A block is trusted only if it is known to be."""

    def __init__(self, block_tokens: Sequence[int], lookahead: int = 0):
        """``block_tokens`` has the tokens of a block, for each group. KV depends on ``lookahead`` tokens ahead."""
        self._block_tokens = block_tokens
        self._lookahead = lookahead
        #: What is ahead of each trusted block; until that is known, the trust of the request that computed it.
        self._trusted: dict[int, bytes | Trust | None] = {}

    def allocated(self, tables: BlockTables, computed: int) -> None:
        """A request was given these blocks. All after its first ``computed`` tokens are about to be overwritten."""
        for blocks, size in zip(tables, self._block_tokens, strict=True):
            for block in blocks[-(-computed // size) :]:
                self._trusted.pop(block, None)

    def loaded(self, tables: BlockTables, loaded: Set[int], ahead: Ahead) -> None:
        """kvtier loads these blocks. If that fails the engine frees them, and `allocated` comes before their reuse."""
        for blocks, size in zip(tables, self._block_tokens, strict=True):
            for number, block in enumerate(blocks, 1):
                if block in loaded:
                    self._trusted[block] = ahead(number * size)

    def computed(self, trust: Trust, request: ScheduledRequest, step: Step, ahead: Ahead) -> int:
        """This step's forward computes tokens of a request. Call it in the order of scheduling.

        Returns the number of tokens with trusted KV after the step: all, unless the forward also reads other KV or
        leaves some unwritten.
        """
        start, end, trusted = request.computed, request.end, trust.tokens
        if trusted is None or any(not start % size or start // size < end // size for size in self._block_tokens):
            tables = list(zip(step.block_tables(request.request_id), self._block_tokens, strict=True))
            if trusted is None:
                trusted = min(self._leading(blocks[: -(-start // size)], size, ahead) * size for blocks, size in tables)
            for blocks, size in tables:
                for block in blocks[start // size : -(-end // size)]:
                    self._trusted.pop(block, None)
            if trusted >= start and step.writes_all:
                for blocks, size in tables:
                    for number in range(start // size, end // size):
                        if blocks[number] != NO_BLOCK:
                            self._trusted[blocks[number]] = trust
                            trust.open[blocks[number]] = (number + 1) * size
        trust.tokens = end if trusted >= start and step.writes_all else min(trusted, start)
        self.look_ahead(trust, ahead)
        return trust.tokens

    def look_ahead(self, trust: Trust, ahead: Ahead) -> None:
        """Note what is ahead of the blocks of a request, where it is known by now and has been computed with."""
        final = (trust.tokens or 0) + bool(self._lookahead) - self._lookahead
        for block, end in list(trust.open.items()):
            if self._trusted.get(block) is not trust:
                del trust.open[block]  # it is another's by now
            elif end <= final and (known := ahead(end)) is not None:
                self._trusted[block] = known
                del trust.open[block]

    def _leading(self, blocks: Sequence[int], size: int, ahead: Ahead) -> int:
        """How many blocks are trusted, or not kept by the engine, before the first that is neither."""
        for number, block in enumerate(blocks):
            known = ahead((number + 1) * size)
            if block != NO_BLOCK and (known is None or self._trusted.get(block) != known):
                return number
        return len(blocks)

    def trusts_any(self, blocks: Collection[int]) -> bool:
        """Is at least one of these blocks trusted?"""
        return not self._trusted.keys().isdisjoint(blocks)

    def distrust_all(self) -> None:
        """Trust none of the blocks as they are now."""
        self._trusted.clear()
