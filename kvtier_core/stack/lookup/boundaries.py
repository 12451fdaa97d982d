"""Lookups of chunks with several parts: a request can continue only after a chunk whose boundary is restorable.

A boundary is restorable if all parts that the groups need there are held. The search runs from the end of the path to
its start; the result is loaded as a whole or not at all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs

from kvtier_core.layouts import ChunkLayout, part_key
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.lookup.leases import Lease
from kvtier_core.stack.lookup.search import Search
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Missing, Terms
from kvtier_core.stack.promotion import Requested
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey

_Holds = Callable[[ChunkKey], bool]


@attrs.frozen
class _Path:
    """The chunks of a request's prompt that its engine lacks."""

    layout: ChunkLayout
    chunks: Sequence[ChunkKey]
    skipped: int  #: chunks before them, which the engine has
    tiers: Sequence[StoreTier]  #: which may supply them
    may_come: _Holds  #: `BoundarySearch._may_come`, from these tiers

    def needed(self, chunks: int) -> dict[ChunkKey, tuple[int, int]]:
        """The parts that are needed to continue after this many chunks of the path.

        Each maps to the index of its chunk in the path and its number in the chunk. Parts that few chunks have come
        first.
        """
        return {
            part_key(self.chunks[number - self.skipped], part.number): (number - self.skipped, part.number)
            for part in reversed(self.layout.parts)
            for number in self._behind_skipped(self.layout.needed(part, self.skipped + chunks))
        }

    def slots(self, chunks: int) -> int:
        """Number of these parts."""
        end = self.skipped + chunks
        return sum(len(self._behind_skipped(self.layout.needed(part, end))) for part in self.layout.parts)

    def _behind_skipped(self, needed: range) -> range:
        return range(max(self.skipped, needed.start), needed.stop)

    def run(self) -> int:
        """Number of leading chunks that may come, whether or not their boundaries are restorable."""
        return len(leading_run(self.chunks, self.may_come))

    def restorable(self, most: int, holds: _Holds) -> int:
        """The last restorable boundary, as the number of chunks before it: at most ``most``, or 0."""
        return next((i for i in range(most, 0, -1) if all(map(holds, self.needed(i)))), 0)

    def parents(self, keys: Sequence[ChunkKey]) -> Iterator[ChunkKey | None]:
        """The parent of each of these parts in the prefix tree."""
        parents = dict(zip(self.chunks[1:], self.chunks, strict=False))
        return (parents.get(key) for key in keys)


class BoundarySearch(Search):
    """Finds the last restorable boundary of a path."""

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms) -> Lookup:
        sought = self._sought(path, terms)
        lease = self._leases.of(path, holder, lasting=terms.lasting)
        chain = sought.run()
        ready, wanted = sought.restorable(chain, self._is_ready), sought.restorable(chain, sought.may_come)
        fitting = self._fitting(sought, ready, wanted, lease)
        below = self._bring(sought, ready, fitting, terms)
        later = ready + below.chunks
        too_small = None
        if fitting <= later < wanted:
            too_small = self._too_small(wanted - later, *self._slots(sought, ready, wanted), lease)
        needed = [*sought.needed(ready), *sought.needed(later)]
        self._leases.pin([key for key in dict.fromkeys(needed) if self._is_ready(key)], lease)
        self._leases.expect((key for key in needed if not self._is_ready(key)), below.tier, lease)
        self._leases.done(lease)
        places = sorted(sought.needed(ready).items(), key=lambda item: item[1])
        keys = [key for key, _ in places]
        return Lookup(
            slots=tuple(lease.beyond[key][0] for key in keys),
            sources=tuple(lease.beyond[key][1] for key in keys),
            parts=tuple(place for _, place in places),
            chunks=ready,
            chain=chain,
            exact=self._arenas[0].exact_run(keys),
            arriving=self._arrivals(below.tier, below.chunks),
            rest=below.declined or too_small or self._missing(sought, later, terms),
        )

    def prefetch(self, path: Sequence[ChunkKey], terms: Terms) -> None:
        """Ask stores for the whole path; request the parts of its last boundary if there is room for all of them."""
        sought = self._sought(path, terms)
        chain = sought.run()
        ready, later = sought.restorable(chain, self._is_ready), sought.restorable(chain, sought.may_come)
        if self._slots(sought, ready, later)[0] <= self._room_ahead:
            self._bring(sought, ready, later, terms)

    # -- where a part is ---------------------------------------------------------------------------

    def _may_come(self, tiers: Sequence[StoreTier], key: ChunkKey) -> bool:
        """Is it READY, on its way, in a readable store, or asked for in a store that has not answered yet?"""
        if self._is_ready(key):
            return True
        if key in self._promotions.rejected or key in self._promotions.probes:
            return False
        return bool(self._arriving(key)) or any(tier.has(key) or key in tier.remote for tier in tiers)

    def _sought(self, path: Sequence[ChunkKey], terms: Terms) -> _Path:
        """Ask shared stores for all parts of a path together, up to a chunk that they lack: boundaries are unknown."""
        tiers = self._asked(terms)
        sought = _Path(self._layout, path, terms.skipped, tiers, functools.partial(self._may_come, tiers))
        shared = [tier for tier in tiers if tier.backend.shared]
        for chunk in path if shared else ():
            for part, tier in itertools.product(self._layout.parts, shared):
                tier.remote.request([part_key(chunk, part.number)])
            if not sought.may_come(chunk):
                break
        return sought

    # -- bringing it up ----------------------------------------------------------------------------

    def _fitting(self, sought: _Path, ready: int, later: int, lease: Lease) -> int:
        """The last boundary, from ``ready`` to ``later``, whose parts find slots beside those of the first."""
        while later > ready:
            slots, kept = self._slots(sought, ready, later)
            if not (lacking := slots - self._room(slots, kept, lease)):
                break
            fewer = sought.slots(later) - lacking
            later = next((i for i in range(later, ready, -1) if sought.slots(i) <= fewer), ready)
            later = max(ready, sought.restorable(later, sought.may_come))
        return later

    def _slots(self, sought: _Path, ready: int, later: int) -> tuple[int, Sequence[ChunkKey]]:
        """How many slots a later boundary needs beside one that is READY, and the parts that both need."""
        needed = sought.needed(later)
        return sum(not self._is_ready(key) for key in needed), [*sought.needed(ready), *needed]

    def _bring(self, sought: _Path, ready: int, later: int, terms: Terms) -> Requested:
        """Request the missing parts of a later boundary if all of them are worth loading."""
        missing = sorted((place, key) for key, place in sought.needed(later).items() if not self._is_ready(key))
        if later <= ready or not missing:
            return Requested()
        gained, limit = later - ready, terms.limit
        part_limit = limit and LoadLimit(limit.computing(gained) / len(missing), limit.wait)
        awaited = next(filter(None, (self._promotions.source(key) for _, key in missing)), "")
        keys = [key for _, key in missing if not self._arriving(key)]
        for tier in sought.tiers:
            here = [key for key in keys if tier.has(key)]
            keys = [key for key in keys if key not in here]
            choice = tier.choose(len(here), part_limit)
            if choice.chunks < len(here):
                self._promotions.probe(tier, here, sought.parents(here), terms.salt)
                return Requested(declined=choice.declined and attrs.evolve(choice.declined, chunks=gained))
            self._promotions.bring(tier, here, sought.parents(here), terms)
            awaited = awaited or (tier.name if here else "")
        asked = [tier for tier in sought.tiers if any(key in tier.remote for key in keys)]
        if asked and not asked[0].chooser.worth_asking(gained, limit):
            return Requested()
        return Requested(gained, awaited or (asked[0].name if asked else self._arenas[0].name))

    def _missing(self, sought: _Path, chunks: int, terms: Terms) -> Missing | None:
        """Why no request can continue after a later chunk than the last of these; None if there is no later one."""
        if chunks == len(sought.chunks):
            return None
        if not sought.may_come(sought.chunks[chunks]):
            return Missing(self._miss_reason(sought.chunks[chunks], terms))
        if sought.restorable(sought.run(), sought.may_come) > chunks:
            return Missing(self._no_room)
        others = [self._layout.groups[group].name for part in self._layout.parts[1:] for group in part.groups]
        return Missing(f"what follows is stored without what a request needs of {', '.join(others)} to continue there")
