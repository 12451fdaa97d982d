"""Lookups of chunks with one part: any leading run of a path can be loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.stack.batches import leading, leading_run
from kvtier_core.stack.lookup.leases import Lease
from kvtier_core.stack.lookup.search import Search
from kvtier_core.stack.outcomes import Declined, Lookup, Missing, Terms, TooSmall
from kvtier_core.stack.promotion import Requested
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey


class ChainSearch(Search):
    """Finds the leading chunks of a path."""

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms) -> Lookup:
        whole, lease = path, self._leases.of(path, holder)
        path = self._fitting(path, terms)
        at, below = len(lease.slots), Requested()
        awaited = ""
        while at < len(path):
            if run := self._ready_run(path, at):
                self._leases.pin(path[at : at + run], lease, holder, leading=at == len(lease.slots))
            elif tier := self._readable_by_workers(path[at], terms):
                below = self._hold(tier, path, at, lease, holder, terms)
                run = below.chunks
            elif self._breaks_deadlock(path[at], lease):
                break
            else:
                below = self._request(path, at, terms)
                run, awaited = below.chunks, awaited or below.tier
                self._leases.expect(path[at : at + run], below.tier, lease, holder)
            if not run:
                break
            at += run
        tier = next((tier for tier in self._tiers if tier.name == below.tier), None)
        if tier is not None and below.declined and not tier.is_direct(terms.not_direct):
            declined = path[at : at + tier.readable(path, at)]
            self._promotions.probe(tier, declined, [path[at - 1] if at else None, *declined], terms.salt)
        self._leases.done(holder)
        rest: Declined | TooSmall | Missing | None
        if at < len(path):
            rest = below.declined or Missing(self._miss_reason(path[at]))
        else:
            rest = self._too_small(len(whole) - at)
        return Lookup(
            slots=tuple(lease.slots),
            sources=tuple(lease.sources),
            chunks=len(lease.slots),
            chain=len(lease.slots),
            exact=self._arenas[0].exact_run(lease.path),
            arriving=self._arrivals(awaited, at - len(lease.slots)),
            rest=rest,
        )

    def prefetch(self, path: Sequence[ChunkKey], terms: Terms) -> None:
        """Ask stores for the whole path; request its beginning."""
        at = self._ready_run(path, 0) if path else 0
        end = min(len(path), at + self._room_ahead)
        while at < end:
            if not (run := self._ready_run(path, at)):
                if tier := self._readable_by_workers(path[at], terms):
                    run = tier.leasable(path, at)  # it stays there
                else:
                    run = self._request(path[:end], at, terms).chunks
            if not run:
                break
            at += run
        for tier in self._tiers:
            tier.remote.request(path, at)

    def _fitting(self, path: Sequence[ChunkKey], terms: Terms) -> Sequence[ChunkKey]:
        """The leading chunks of a path that can be loaded together: the rest would wait for their slots."""
        slots = self._arenas[0].slots_for(len(path))
        if slots == len(path):
            return path

        def takes_slot(key: ChunkKey) -> bool:
            elsewhere = self._is_ready(key) or self._readable_by_workers(key, terms)
            return self._arenas[0].has(key) or not elsewhere

        return leading(path, slots, takes_slot)

    def _ready_run(self, path: Sequence[ChunkKey], at: int) -> int:
        """Length of the run of chunks from ``at`` on that are READY in one arena."""
        return max(arena.ready_run(path, at) for arena in self._arenas)

    def _readable_by_workers(self, key: ChunkKey, terms: Terms) -> StoreTier | None:
        """The tier from which workers can read this chunk directly."""
        return next((tier for tier in self._tiers if tier.is_direct(terms.not_direct) and tier.leasable([key])), None)

    def _hold(
        self, tier: StoreTier, path: Sequence[ChunkKey], at: int, lease: Lease, holder: str, terms: Terms
    ) -> Requested:
        """Hold the frames from ``at`` on that are worth loading, up to a chunk that is READY in an arena.

        If none is, some are occasionally loaded anyway, to measure the store again.
        """
        run = path[at : at + tier.leasable(path, at)]
        keys = leading_run(run, lambda key: not any(arena.has(key) for arena in self._arenas))
        choice = tier.choose(len(keys), terms.limit)
        chosen = keys[: choice.chunks or tier.probe(len(keys))]
        held = self._leases.hold(tier, chosen, lease, holder, leading=at == len(lease.slots))
        return Requested(held, tier.name, None if held else choice.declined)

    def _breaks_deadlock(self, key: ChunkKey, lease: Lease) -> bool:
        """Do all holders of slots wait for more, and this one for this chunk? Then it continues without the chunk."""
        if key not in self._promotions.deadlocked or not any(lease.pinned()):
            return False
        self._promotions.deadlocked.clear()
        self._promotions.rejected.add(key)
        return True

    def _request(self, path: Sequence[ChunkKey], at: int, terms: Terms) -> Requested:
        """Request the chunks from ``at`` on, the first of which is not READY, unless that one is on its way."""
        key = path[at]
        if arena := self._arriving(key):
            if key in self._promotions.probes:
                return Requested()
            return Requested(1, self._promotions.source(key) or arena.name)
        return self._promotions.request(path, at, self.has_slot, terms)
