"""Loads: lookups in the stack for a request, and the transfers from slots to the engine's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from kvtier_core.engine.messages import Transfer
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.stack.interface import LoadLimit, Lookup, Stack
from kvtier_core.types import ChunkKey

#: Steps for which a waiting request keeps its pins if the engine does not ask about it again.
_KEPT_STEPS = 2


class Loads:
    """What requests found in the stack, and the loads under way.

    The slots that a lookup found stay pinned, with the request as their holder, until its load has ended on every rank
    or the request no longer needs them.
    """

    def __init__(self, stack: Stack, *, chunk_tokens: int, block_tokens: int):
        self._stack = stack
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_tokens // block_tokens
        self._planned: list[tuple[str, Transfer]] = []
        self._holders: dict[str, str] = {}  # of the loads under way, by request id
        self._waiting: dict[str, int] = {}  # by holder: steps since its last lookup

    def __len__(self) -> int:
        return len(self._holders)

    def find(self, state: RequestState, keys: Sequence[ChunkKey], limit: LoadLimit | None) -> Lookup:
        """Look up a path. Requests the promotion of chunks in lower tiers, as far as they are worth it.

        Nothing is found while a load of the request is under way: its slots must stay pinned until that has ended.
        """
        if self._holders.get(state.view.request_id) == state.holder:
            return Lookup(miss_reason="its load is under way")
        self._waiting[state.holder] = 0
        return self._stack.lookup(keys, state.holder, limit, state.view.identity.salt)

    def release(self, state: RequestState) -> None:
        """Release what the request found, unless it is being loaded."""
        if self._waiting.pop(state.holder, None) is not None:
            self._stack.release(state.holder)

    def release_forgotten(self) -> None:
        """Release what waiting requests found if the engine no longer asks about them. Call this once a step."""
        for holder, steps in list(self._waiting.items()):
            if steps < _KEPT_STEPS:
                self._waiting[holder] = steps + 1
            else:
                del self._waiting[holder]
                self._stack.release(holder)

    def begin(self, state: RequestState, block_ids: Sequence[int], tokens: int) -> list[int]:
        """Load ``tokens`` into the request's blocks, behind those that the engine had when it asked for a match.

        Plans the transfer for this step. Returns the blocks that will hold exactly the KV that an engine computed: all
        that are loaded, unless some of it came through a lossy codec.
        """
        first, end = state.computed // self._chunk_tokens, state.computed + tokens
        slots = state.found.slots[: -(-end // self._chunk_tokens) - first]
        tiers = state.found.sources[: len(slots)]
        wanted = range(state.computed // self._block_tokens, -(-end // self._block_tokens))
        pages = tuple(
            (tuple(block_ids[block] if block in wanted else NO_BLOCK for block in self._blocks_of(chunk)),)
            for chunk in range(first, first + len(slots))
        )
        state.sources = tokens_by_tier(tiers, first, state.computed, tokens, self._chunk_tokens)
        state.reason = ", ".join(f"{tier} {chunks * self._chunk_tokens}" for tier, chunks in Counter(tiers).items())
        del self._waiting[state.holder]
        self._holders[state.view.request_id] = state.holder
        self._planned.append((state.view.request_id, Transfer(tuple(slots), pages)))
        return [block for (row,) in pages[: state.found.exact] for block in row if block != NO_BLOCK]

    def take_planned(self) -> tuple[tuple[str, Transfer], ...]:
        """The transfers planned since the last call, by request."""
        planned, self._planned = self._planned, []
        return tuple(planned)

    def end(self, request_ids: Collection[str]) -> None:
        """Release the slots of loads that every rank has ended. Requests without a load are ignored."""
        for request_id in request_ids:
            if holder := self._holders.pop(request_id, None):
                self._stack.release(holder)

    def under_way(self, request_ids: Collection[str]) -> set[str]:
        """The requests among these that have a load under way."""
        return self._holders.keys() & request_ids

    def _blocks_of(self, chunk: int) -> range:
        return range(chunk * self._chunk_blocks, (chunk + 1) * self._chunk_blocks)


def tokens_by_tier(tiers: Sequence[str], first: int, computed: int, tokens: int, chunk_tokens: int) -> Counter[str]:
    """How many of the ``tokens`` behind the first ``computed`` each tier supplied. The counts add up to ``tokens``.

    ``tiers`` names the tier of each chunk, from chunk number ``first`` on.
    """
    counts: Counter[str] = Counter()
    for chunk, tier in enumerate(tiers, start=first):
        begin, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        counts[tier] += min(end, computed + tokens) - max(begin, computed)
    return counts
