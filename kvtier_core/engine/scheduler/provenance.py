"""Tracks which of the engine's blocks hold KV that may be stored.

A block is trusted if kvtier loaded it, or if this engine's forward computed it from KV that was trusted up to there.
Everything else may come from another connector: an engine may have several, may learn late or never that a load
was wrong, and keeps loaded blocks in its own prefix cache, where later requests find them. Untrusted KV is never
stored, nor is KV that was computed from it.

A block is written by a load or by a forward: `allocated` is called before every load, `computed` before every forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from kvtier_core.engine.step import BlockTables, ScheduledRequest, Step
from kvtier_core.interfaces import NO_BLOCK


class Provenance:
    """The trusted blocks. A block is trusted only if it is known to be."""

    def __init__(self, block_tokens: Sequence[int]):
        """``block_tokens`` has the tokens of a block, for each group."""
        self._block_tokens = block_tokens
        self._trusted: set[int] = set()

    def allocated(self, tables: BlockTables, computed: int) -> None:
        """A request was given these blocks. All after its first ``computed`` tokens are about to be overwritten."""
        for blocks, size in zip(tables, self._block_tokens, strict=True):
            self._trusted.difference_update(blocks[-(-computed // size) :])

    def loaded(self, blocks: Iterable[int]) -> None:
        """kvtier loads these blocks. If that fails the engine frees them, and `allocated` comes before their reuse."""
        self._trusted.update(blocks)

    def computed(self, trusted: int | None, request: ScheduledRequest, step: Step) -> int:
        """This step's forward computes tokens of a request. Call it in the order of scheduling.

        ``trusted`` is the number of tokens, from the first one on, with trusted KV before the step; with None it is
        determined from the blocks. Returns that number after the step: all, unless the forward also reads other KV or
        leaves some unwritten.
        """
        start, end = request.computed, request.end
        if trusted is None or any(not start % size or start // size < end // size for size in self._block_tokens):
            tables = list(zip(step.block_tables(request.request_id), self._block_tokens, strict=True))
            if trusted is None:
                trusted = min(self._leading(blocks[: -(-start // size)]) * size for blocks, size in tables)
            for blocks, size in tables:
                self._trusted.difference_update(blocks[start // size : -(-end // size)])
            if trusted >= start and step.writes_all:
                for blocks, size in tables:
                    self._trusted.update(blocks[start // size : end // size])
                self._trusted.discard(NO_BLOCK)
        return end if trusted >= start and step.writes_all else min(trusted, start)

    def _leading(self, blocks: Sequence[int]) -> int:
        """How many blocks are trusted, or not kept by the engine, before the first that is neither."""
        return sum(1 for _ in takewhile(lambda block: block == NO_BLOCK or block in self._trusted, blocks))

    def trusts_any(self, blocks: Collection[int]) -> bool:
        """Is at least one of these blocks trusted?"""
        return not self._trusted.isdisjoint(blocks)

    def distrust_all(self) -> None:
        """Trust none of the blocks as they are now."""
        self._trusted.clear()
