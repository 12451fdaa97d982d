"""Loads: what the stack has for a request, and the transfers from its slots to the engine's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from kvtier_core.engine.messages import Transfer
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import ChunkKey, Presence, Slot


class Loads:
    """The loads under way. Their slots are pinned from `begin` until `end`, by the request as their holder."""

    def __init__(self, manager: StorageManager, *, chunk_tokens: int, block_tokens: int):
        self._manager = manager
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_tokens // block_tokens
        self._planned: list[tuple[str, Transfer]] = []
        self._pinned: dict[str, list[Slot]] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    def find(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """For a path, what could be loaded. Asks for the promotion of what is in a lower tier."""
        return self._manager.lookup(keys)

    def miss_reason(self, key: ChunkKey) -> str:
        """Why a key was a MISS just now, in plain words."""
        return self._manager.miss_reason(key)

    def begin(self, state: RequestState, block_ids: Sequence[int], tokens: int) -> list[int]:
        """Load ``tokens`` behind those that the engine had when it asked for a match, into the request's blocks.

        Pins the slots and plans the transfer for this step. Returns the blocks that it will write.
        """
        first, end = state.computed // self._chunk_tokens, state.computed + tokens
        keys = state.ready[: -(-end // self._chunk_tokens) - first]
        wanted = range(state.computed // self._block_tokens, -(-end // self._block_tokens))
        pages = tuple(
            tuple(block_ids[block] if block in wanted else NO_BLOCK for block in self._blocks_of(chunk))
            for chunk in range(first, first + len(keys))
        )
        tiers = self._manager.hit_sources(keys)
        state.sources = tokens_by_tier(tiers, first, state.computed, tokens, self._chunk_tokens)
        state.reason = ", ".join(f"{tier} {chunks * self._chunk_tokens}" for tier, chunks in Counter(tiers).items())
        request_id = state.view.request_id
        slots = self._pinned[request_id] = self._manager.pin(keys, _holder(request_id))
        self._planned.append((request_id, Transfer(tuple(slots), pages)))
        return [block_ids[block] for block in wanted]

    def take_planned(self) -> tuple[tuple[str, Transfer], ...]:
        """The transfers planned since the last call, by request."""
        planned, self._planned = self._planned, []
        return tuple(planned)

    def end(self, request_ids: Collection[str]) -> None:
        """Unpin the slots of loads that every rank has ended. Requests without a load are ignored."""
        for request_id in request_ids:
            self._manager.unpin(self._pinned.pop(request_id, ()), _holder(request_id))

    def under_way(self, request_ids: Collection[str]) -> set[str]:
        """Those of the requests that have a load under way."""
        return self._pinned.keys() & request_ids

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


def _holder(request_id: str) -> str:
    """The holder of the pins of a load."""
    return f"request {request_id}"
