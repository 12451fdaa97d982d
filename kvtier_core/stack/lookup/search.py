"""The common part of the two kinds of lookups."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import attrs

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.lookup.leases import Lease, Leases
from kvtier_core.stack.outcomes import ANY, Arriving, Lookup, Terms, TooSmall, Whereabouts
from kvtier_core.stack.promotion import Promotions
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey

#: Prefetched chunks that no request has used take at most one in this many slots of the hottest arena.
_PREFETCH_SHARE = 4
_NOT_STORED = "not stored"


@attrs.frozen(eq=False)
class Search(abc.ABC):
    """Finds the part of a path that a stack holds. Called on the owner's thread."""

    _arenas: Sequence[Arena]
    _tiers: Sequence[StoreTier]
    _promotions: Promotions
    _leases: Leases
    _layout: ChunkLayout

    @abc.abstractmethod
    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms) -> Lookup:
        """See `StorageManager.lookup`."""

    @abc.abstractmethod
    def prefetch(self, path: Sequence[ChunkKey], terms: Terms) -> None:
        """See `StorageManager.prefetch`."""

    def whereabouts(self, key: ChunkKey) -> Whereabouts:
        """See `Stack.whereabouts`."""
        arenas = [arena.name for arena in self._arenas if arena.has(key)]
        stores = [tier.name for tier in self._tiers if tier.leasable([key])]
        held = (*arenas, *(tier.name for tier in self._tiers if tier.holds(key)))
        if arenas or stores:
            return Whereabouts((*arenas, *stores), held=held)
        if arena := self._arriving(key):
            return Whereabouts((), f"on its way into {arena.name}", held, arrives=True)
        reason = self._miss_reason(key)
        shared = [tier.name for tier in self._tiers if tier.backend.shared]
        if reason == _NOT_STORED and shared:
            reason = f"not known here; {', '.join(shared)}: queried when a request names it"
        return Whereabouts((), reason, held)

    @property
    def _room_ahead(self) -> int:
        """How many chunks may be prefetched now."""
        unused = len(self._leases.promoted_from) + self._promotions.under_way
        return max(0, self._arenas[0].capacity // _PREFETCH_SHARE - unused)

    def _is_ready(self, key: ChunkKey) -> bool:
        return any(arena.has(key) for arena in self._arenas)

    def _arriving(self, key: ChunkKey) -> Arena | None:
        """The arena in which this chunk is being filled."""
        return next((arena for arena in self._arenas if arena.arrives(key)), None)

    def _arrivals(self, tier: str, chunks: int) -> Arriving | None:
        """Chunks of a path that are on their way, the first of them from this tier."""
        silence = next((each.chooser.silence for each in self._tiers if each.name == tier), 0.0)
        return Arriving(chunks, tier, silence) if chunks else None

    def _room(self, slots: int, kept: Iterable[ChunkKey], lease: Lease) -> int:
        """How many of ``slots`` slots become free while a request waits that keeps its lease and these chunks.

        All pins end but those of lasting leases; and none does if everybody waits for slots.
        """
        pinned = self._arenas[0].pinned if self._is_deadlocked(lease) else self._leases.lasting
        return self._arenas[0].could_free(slots, [set(kept), lease.beyond], pinned)

    def _is_deadlocked(self, lease: Lease) -> bool:
        """Does this request keep slots from others that wait, and the others slots from it?"""
        stalled = self._promotions.stalled and not self._arenas[0].reserved
        return stalled and any(lease.pinned()) and self._leases.all_stay(lease)

    def _too_small(self, chunks: int, slots: int, kept: Sequence[ChunkKey], lease: Lease) -> TooSmall | None:
        """The last ``chunks`` chunks of a path, if these slots do not become free for them, as in `_room`."""
        if self._room(slots, kept, lease) >= slots:
            return None
        beside = "prompts that must stay there" if self._leases.lasting else ""
        if self._is_deadlocked(lease):
            beside = "those of requests that also wait for slots"
        return TooSmall(self._arenas[0].name, chunks, beside)

    def _asked(self, terms: Terms) -> list[StoreTier]:
        """The store tiers that a lookup may use."""
        return [tier for tier in self._tiers if tier.name not in terms.without]

    def _miss_reason(self, key: ChunkKey, terms: Terms = ANY) -> str:
        """Why a chunk is not found."""
        if key in self._promotions.rejected:
            return self._no_room
        if excluded := next((tier.name for tier in self._tiers if tier.name in terms.without and tier.has(key)), ""):
            return f"it asked not to load from {excluded}, which has it"
        reasons = (tier.miss_reason(key) for tier in self._tiers)
        return next(filter(None, reasons), _NOT_STORED)

    @property
    def _no_room(self) -> str:
        """Why a chunk stays where it is."""
        return f"no room in {self._arenas[0].name} to promote it"
