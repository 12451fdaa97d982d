"""Lookups of chunks with one part: any leading run of a path can be loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.stack.batches import leading, leading_run
from kvtier_core.stack.lookup.leases import Lease
from kvtier_core.stack.lookup.search import Query, Search
from kvtier_core.stack.outcomes import Lookup
from kvtier_core.stack.promotion import Requested
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey


class ChainSearch(Search):
    """Finds the leading chunks of a path."""

    def lookup(self, query: Query) -> Lookup:
        whole, holder = query.path, query.holder
        lease = self._leases.of(whole, holder)
        query = query._replace(path=self._fitting(query))
        path = query.path
        at, below = len(lease.slots), Requested()
        awaited = ""
        while at < len(path):
            if run := self._ready_run(path, at):
                self._leases.pin(path[at : at + run], lease, holder, leading=at == len(lease.slots))
            elif tier := self._readable_by_workers(query, path[at]):
                below = self._hold(tier, query, at, lease)
                run = below.chunks
            elif self._breaks_deadlock(path[at], lease):
                break
            else:
                below = self._request(query, at)
                run, awaited = below.chunks, awaited or below.tier
                self._leases.expect(path[at : at + run], below.tier, lease, holder)
            if not run:
                break
            at += run
        tier = next((tier for tier in self._tiers if tier.name == below.tier), None)
        if below.declined and not tier.is_direct(query.not_direct):
            declined = path[at : at + tier.readable(path, at)]
            self._promotions.probe(tier, declined, [path[at - 1] if at else None, *declined], query.salt)
        self._leases.done(holder)
        reason = self._miss_reason(path[at], below) if at < len(path) else ""
        unfitting = 0 if reason else len(whole) - at
        pending = at - len(lease.slots)
        return Lookup(
            slots=tuple(lease.slots),
            sources=tuple(lease.sources),
            chunks=len(lease.slots),
            chain=len(lease.slots),
            exact=self._arenas[0].exact_run(lease.path),
            pending=pending,
            awaited=awaited if pending else "",
            silence=self._silence(awaited) if pending else 0.0,
            declined=below.declined,
            unfitting=unfitting,
            miss_reason=self._too_small(unfitting) if unfitting else reason,
        )

    def prefetch(self, query: Query) -> None:
        """Ask stores for the whole path; request its beginning."""
        path = query.path
        at = self._ready_run(path, 0) if path else 0
        end = min(len(path), at + self._room_ahead)
        while at < end:
            if not (run := self._ready_run(path, at)):
                if tier := self._readable_by_workers(query, path[at]):
                    run = tier.leasable(path, at)  # it stays there
                else:
                    run = self._request(query._replace(path=path[:end]), at).chunks
            if not run:
                break
            at += run
        for tier in self._tiers:
            tier.request_lookup(path, at)

    def _fitting(self, query: Query) -> Sequence[ChunkKey]:
        """The leading chunks of a path that can be loaded at once: the rest would wait for their slots."""
        path, slots = query.path, self._arenas[0].slots_for(len(query.path))
        if slots == len(path):
            return path

        def takes_slot(key: ChunkKey) -> bool:
            elsewhere = self._is_ready(key) or self._readable_by_workers(query, key)
            return self._arenas[0].has(key) or not elsewhere

        return leading(path, slots, takes_slot)

    def _ready_run(self, path: Sequence[ChunkKey], at: int) -> int:
        """Length of the run of chunks from ``at`` on that are READY in one arena."""
        return max(arena.ready_run(path, at) for arena in self._arenas)

    def _readable_by_workers(self, query: Query, key: ChunkKey) -> StoreTier | None:
        """The tier from which workers can read this chunk directly."""
        return next((tier for tier in self._tiers if tier.is_direct(query.not_direct) and tier.leasable([key])), None)

    def _hold(self, tier: StoreTier, query: Query, at: int, lease: Lease) -> Requested:
        """Hold the frames from ``at`` on that are worth loading, up to a chunk that is READY in an arena.

        If none is, some are loaded anyway now and then, to measure the store again.
        """
        run = query.path[at : at + tier.leasable(query.path, at)]
        keys = leading_run(run, lambda key: not any(arena.has(key) for arena in self._arenas))
        choice = tier.choose(len(keys), query.limit)
        chosen = keys[: choice.chunks or tier.probe(len(keys))]
        held = self._leases.hold(tier, chosen, lease, query.holder, leading=at == len(lease.slots))
        return Requested(held, tier.name, None if held else choice.declined)

    def _breaks_deadlock(self, key: ChunkKey, lease: Lease) -> bool:
        """Do all who have slots wait for more, this holder for this chunk? Then it goes on without."""
        if key not in self._promotions.deadlocked or not any(lease.pinned()):
            return False
        self._promotions.deadlocked.clear()
        self._promotions.rejected.add(key)
        return True

    def _request(self, query: Query, at: int) -> Requested:
        """Request the chunks from ``at`` on, which is not READY, unless that one is on its way."""
        key = query.path[at]
        if arena := self._arriving(key):
            if key in self._promotions.probes:
                return Requested()
            return Requested(1, self._promotions.source(key) or arena.name)
        return self._promotions.request(query.path, at, self.has_slot, query.limit, query.salt, query.not_direct)
