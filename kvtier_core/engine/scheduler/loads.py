"""Loads: lookups in the stack for a request, and the transfers from slots to the engine's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from kvtier_core.engine.messages import ChunkPages, Transfer
from kvtier_core.engine.request_view import ANY_MEDIUM
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.engine.step import BlockTables
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout, part_key
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Missing, Terms
from kvtier_core.types import ChunkKey, FrameRead, StoredFrame

#: Steps for which a waiting request keeps its pins if the engine does not ask about it again.
_KEPT_STEPS = 2


class Loads:
    """The hits of requests, and the loads under way.

    The slots that a lookup found stay pinned, with the request as their holder, until its load has ended on every rank
    or the request no longer needs them.
    """

    def __init__(self, stack: Stack, layout: ChunkLayout):
        self._stack = stack
        self._layout = layout
        self._parted = len(layout.parts) > 1
        self._planned: list[tuple[str, Transfer]] = []
        self._impossible: list[str] = []  # requests that were promised a load which cannot begin
        self._holders: dict[str, str] = {}  # of the loads under way, by request id
        self._waiting: dict[str, int] = {}  # by holder: the step in which the engine last asked about it, oldest first
        self._step = 0
        self._unread: dict[str, dict[ChunkKey, FrameRead]] = {}  # of loads under way, by request id

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> set[str]:
        """The holders of the loads under way, whose requests may have ended."""
        return set(self._holders.values())

    def find(self, state: RequestState, keys: Sequence[ChunkKey], limit: LoadLimit | None) -> Lookup:
        """Look up a path. Requests the promotion of chunks in lower tiers that are worth loading.

        Nothing is found while a load of the request is under way: its slots must stay pinned until that has ended.
        """
        if self._holders.get(state.view.request_id) == state.holder:
            return Lookup(rest=Missing("its load is in progress"))
        self.asked(state)
        skipped = state.match.computed // self._layout.tokens
        return self._stack.lookup(keys, state.holder, self.terms(state, limit, skipped))

    def terms(self, state: RequestState, limit: LoadLimit | None, skipped: int = 0) -> Terms:
        """The terms of a request's lookups: without the store tiers that it asked not to load from."""
        without: list[str] = []
        if state.view.media != ANY_MEDIUM:
            arenas, media = self._stack.handles, self._stack.media
            without += (name for name, medium in media.items() if name not in arenas and medium not in state.view.media)
        return Terms(limit, state.identity.salt, skipped, without=without)

    def release(self, state: RequestState) -> None:
        """Release what the request found, unless it is being loaded."""
        if self._waiting.pop(state.holder, None) is not None:
            self._stack.release(state.holder)

    def asked(self, state: RequestState) -> None:
        """The engine asks about a request: keep what it has found."""
        self._waiting.pop(state.holder, None)
        self._waiting[state.holder] = self._step

    def release_forgotten(self) -> None:
        """Release what waiting requests found if the engine no longer asks about them. Call this once a step."""
        self._step += 1
        while self._waiting and next(iter(self._waiting.values())) < self._step - _KEPT_STEPS:
            holder = next(iter(self._waiting))
            del self._waiting[holder]
            self._stack.release(holder)

    def begin(self, state: RequestState, tables: BlockTables, tokens: int) -> set[int]:
        """Load ``tokens`` tokens into the request's blocks, after those that the engine had when it asked for a match.

        Plans the transfer for this step; if the engine keeps blocks that would not be filled, the load has failed.
        Returns the blocks that will hold exactly the KV that an engine computed: all that are loaded, unless some of it
        passed through a lossy codec.
        """
        size, match = self._layout.tokens, state.match
        first, end = match.computed // size, match.computed + tokens
        last = -(-end // size)
        places = match.found.parts or [(number, 0) for number in range(len(match.found.slots))]
        loaded = [(first + number, part) for number, part in places if first + number < last]
        pages = tuple(self._pages(*each, tables, match.computed, end) for each in loaded)
        tiers = _tier_of_each_chunk(places, match.found.sources, last - first)
        state.load.sources = tokens_by_tier(tiers, first, match.computed, tokens, size)
        match.reason = ", ".join(f"{tier} {chunks * size}" for tier, chunks in Counter(tiers).items())
        if len(loaded) > match.found.exact:
            match.reason += "; lossy: the answer may differ"
        state.load.frames, arenas = {}, list(self._stack.handles)
        for slot, (number, part) in zip(match.found.slots, loaded, strict=False):
            tier = slot.tier if isinstance(slot, StoredFrame) else arenas[slot.arena]
            key = state.path[number]
            state.load.frames.setdefault(tier, []).append(part_key(key, part) if self._parted else key)
        del self._waiting[state.holder]
        self._holders[state.view.request_id] = state.holder
        if self._expected(tables, match.computed, end) - _blocks_of(pages):
            self._impossible.append(state.view.request_id)
            return set()
        slots = tuple(match.found.slots[: len(loaded)])
        self._stack.load_begins([slot for slot in slots if isinstance(slot, StoredFrame)], state.holder)
        self._planned.append((state.view.request_id, Transfer(slots, pages)))
        return _blocks_of(pages[: match.found.exact])

    def _pages(self, chunk: int, part: int, tables: BlockTables, computed: int, end: int) -> ChunkPages:
        """The blocks that one part of a chunk is loaded into: those after ``computed`` tokens and before ``end``."""
        groups = self._layout.parts[part].groups
        return tuple(
            tuple(
                table[block] if block in _span(computed, end, group.block_tokens) else NO_BLOCK
                for block in self._layout.stored_blocks(number, chunk)
            )
            if number in groups
            else ()
            for number, (group, table) in enumerate(zip(self._layout.groups, tables, strict=True))
        )

    def _expected(self, tables: BlockTables, computed: int, end: int) -> set[int]:
        """The blocks that the engine keeps for these tokens, of every group."""
        spans = (_span(computed, end, group.block_tokens) for group in self._layout.groups)
        blocks = (table[span.start : span.stop] for table, span in zip(tables, spans, strict=True))
        return set(chain.from_iterable(blocks)) - {NO_BLOCK}

    def take_planned(self) -> tuple[tuple[str, Transfer], ...]:
        """The transfers planned since the last call, by request."""
        planned, self._planned = self._planned, []
        return tuple(planned)

    def fail_planned(self) -> None:
        """The loads planned since the last step cannot begin: their slots no longer exist."""
        self._impossible += [request_id for request_id, _ in self.take_planned()]

    def take_impossible(self) -> tuple[str, ...]:
        """The requests since the last call that were promised a load which cannot begin."""
        impossible, self._impossible = self._impossible, []
        return tuple(impossible)

    def note_unread(self, unread: Mapping[str, Mapping[ChunkKey, FrameRead]]) -> None:
        """Note frames that ranks could not use, by request. Their loads end later, when every rank has ended them."""
        for request_id, frames in unread.items():
            if request_id in self._holders:
                self._unread.setdefault(request_id, {}).update(frames)

    def end(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """Release the slots of loads that every rank has ended. Requests without a load are ignored."""
        for request_id in request_ids:
            if holder := self._holders.pop(request_id, None):
                self._stack.load_ended(holder, self._unread.pop(request_id, {}), ok=request_id not in failed)
                self._stack.release(holder)

    def under_way(self, request_ids: Collection[str]) -> set[str]:
        """The requests among these that have a load under way."""
        return self._holders.keys() & request_ids


def _span(computed: int, end: int, block_tokens: int) -> range:
    """The blocks that hold tokens after ``computed`` and before ``end``."""
    return range(computed // block_tokens, -(-end // block_tokens))


def _blocks_of(pages: Sequence[ChunkPages]) -> set[int]:
    return set(chain.from_iterable(chain.from_iterable(pages))) - {NO_BLOCK}


def _tier_of_each_chunk(places: Sequence[tuple[int, int]], sources: Sequence[str], chunks: int) -> list[str]:
    """The tier that supplied each chunk; for a chunk of which nothing needs to be loaded, that of the next one."""
    tiers: dict[int, str] = {}
    for (number, _), tier in zip(places, sources, strict=True):
        tiers.setdefault(number, tier)
    of_each: list[str] = []
    for number in sorted(tiers):
        of_each += [tiers[number]] * (number + 1 - len(of_each))
    return of_each[:chunks]


def tokens_by_tier(tiers: Sequence[str], first: int, computed: int, tokens: int, chunk_tokens: int) -> Counter[str]:
    """How many of the ``tokens`` after the first ``computed`` each tier supplied. The counts add up to ``tokens``.

    ``tiers`` names the tier of each chunk, from chunk number ``first`` on.
    """
    counts: Counter[str] = Counter()
    for chunk, tier in enumerate(tiers, start=first):
        begin, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        counts[tier] += min(end, computed + tokens) - max(begin, computed)
    return counts
