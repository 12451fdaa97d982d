"""Lookups of chunks with one part: any leading run of a path can be loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.lookup.leases import Lease
from kvtier_core.stack.lookup.search import Search
from kvtier_core.stack.outcomes import Declined, Lookup, Missing, Terms, TooSmall
from kvtier_core.stack.promotion import Requested
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey


class ChainSearch(Search):
    """Finds the leading chunks of a path."""

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms) -> Lookup:
        lease = self._leases.of(path, holder, lasting=terms.lasting)
        at, below = len(lease.slots), Requested()
        awaited, coming = "", 0
        while at < len(path):
            if run := self._ready_run(path, at):
                if coming:
                    run = self._staying(path, at, run, coming, lease)
                self._leases.pin(path[at : at + run], lease, leading=at == len(lease.slots))
            elif tier := self._readable_by_workers(path[at], terms):
                below = self._hold(tier, path, at, terms, lease)
                run = below.chunks
            else:
                below = self._request(path, at, terms, coming, lease)
                run, awaited = below.chunks, awaited or below.tier
                coming += run
                self._leases.expect(path[at : at + run], below.tier, lease)
            if not run:
                break
            at += run
        tier = next((tier for tier in self._tiers if tier.name == below.tier), None)
        if tier is not None and below.declined and not tier.is_direct(terms.not_direct):
            declined = path[at : at + tier.readable(path, at)]
            self._promotions.probe(tier, declined, [path[at - 1] if at else None, *declined], terms.salt)
        self._leases.done(lease)
        rest: Declined | TooSmall | Missing | None = None
        if at < len(path):
            too_small = self._too_small(len(path) - at, coming + 1, path[:at], lease)
            rest = below.declined or too_small or Missing(self._miss_reason(path[at], terms))
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
                    run = self._request(path[:end], at, terms, 0, Lease()).chunks
            if not run:
                break
            at += run
        for tier in self._asked(terms):
            tier.remote.request(path, at)

    def _staying(self, path: Sequence[ChunkKey], at: int, run: int, coming: int, lease: Lease) -> int:
        """How many of ``run`` READY chunks need not leave so that ``coming`` chunks before them get slots."""
        while run > 0 and (lacking := coming - self._room(coming, path[: at + run], lease)):
            run -= lacking
        return max(0, run)

    def _ready_run(self, path: Sequence[ChunkKey], at: int) -> int:
        """Length of the run of chunks from ``at`` on that are READY in one arena."""
        return max(arena.ready_run(path, at) for arena in self._arenas)

    def _readable_by_workers(self, key: ChunkKey, terms: Terms) -> StoreTier | None:
        """The tier from which workers can read this chunk directly."""
        direct = (tier for tier in self._asked(terms) if tier.is_direct(terms.not_direct))
        return next((tier for tier in direct if tier.leasable([key])), None)

    def _hold(self, tier: StoreTier, path: Sequence[ChunkKey], at: int, terms: Terms, lease: Lease) -> Requested:
        """Hold the frames from ``at`` on that are worth loading, up to a chunk that is READY in an arena.

        If none is, some are occasionally loaded anyway, to measure the store again.
        """
        run = path[at : at + tier.leasable(path, at)]
        keys = leading_run(run, lambda key: not self._is_ready(key))
        choice = tier.choose(len(keys), terms.limit)
        chosen = keys[: choice.chunks or tier.probe(len(keys))]
        held = self._leases.hold(tier, chosen, lease, leading=at == len(lease.slots))
        return Requested(held, tier.name, None if held else choice.declined)

    def _request(self, path: Sequence[ChunkKey], at: int, terms: Terms, coming: int, lease: Lease) -> Requested:
        """Request the chunks from ``at`` on that find slots beside those ``coming``, or that are on their way."""
        if arena := self._arriving(path[at]):
            source = self._promotions.source(path[at])
            run = len(leading_run(path[at:], lambda key: self._comes_from(source, key)))
        else:
            unknown = len(path) - at  # chunks that a shared store may have
            tiers = self._asked(terms)
            found = (tier.readable(path, at) or unknown * tier.remote.may_have(path[at]) for tier in tiers)
            run = max(found, default=0)
        room = self._room(coming + run, path[:at], lease) - coming if run else 0
        if room <= 0:
            return Requested()
        if arena:
            return Requested(room, source or arena.name)
        return self._promotions.request(path[: at + room], at, terms)

    def _comes_from(self, source: str, key: ChunkKey) -> bool:
        """Is this chunk on its way from this tier, and not only to measure it?"""
        arrives = self._arriving(key) is not None and key not in self._promotions.probes
        return arrives and self._promotions.source(key) == source
