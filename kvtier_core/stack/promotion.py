"""Reads requested chunks from store tiers into the hottest arena, as room permits."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import attrs

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.lookup.leases import Leases
from kvtier_core.stack.outcomes import Declined, Terms
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import MakeRoom
from kvtier_core.types import ChunkKey

#: Maximum of reads of a tier that one step begins; the next one continues. More would take more than two ms.
_AT_ONCE = 256
#: ``arrived(tier, keys, salts)``: these chunks are READY and sealed. ``salts`` is for those whose requests have one.
Arrived = Callable[[StoreTier, Sequence[ChunkKey], Mapping[ChunkKey, bytes]], None]


@attrs.frozen
class Requested:
    """The outcome of a request: ``chunks`` are on their way, or a store is being asked for them."""

    chunks: int = 0
    tier: str = ""  #: their source
    declined: Declined | None = None


@attrs.frozen
class _Request:
    """A chunk that a path names."""

    parent: ChunkKey | None
    terms: Terms


class Promotions:
    """Requests wait here until their tier may read. A request without room is rejected until the next step."""

    def __init__(
        self,
        arenas: Sequence[Arena],
        tiers: Sequence[StoreTier],
        leases: Leases,
        *,
        make_room: MakeRoom,
        arrived: Arrived,
    ):
        self.rejected: set[ChunkKey] = set()  #: requests of the last step that found no room
        self.stalled = False  #: Did some of the last requests find no room?
        #: Declined chunks that are read anyway, to measure their store again. No request waits for them.
        self.probes: set[ChunkKey] = set()
        self._arenas = arenas
        self._hot = arenas[0]
        self._leases = leases
        self._make_room = make_room
        self._arrived = arrived
        self._tiers = tiers
        self._queues: defaultdict[StoreTier, OrderedDict[ChunkKey, _Request]] = defaultdict(OrderedDict)
        self._unawaited: set[ChunkKey] = set()
        self._reading: dict[ChunkKey, tuple[StoreTier, _Request]] = {}  # each with its source
        self._queries: dict[ChunkKey, _Request] = {}  # keys that stores are asked for

    @property
    def under_way(self) -> int:
        """Number of chunks that are requested or being read."""
        return sum(map(len, self._queues.values())) + len(self._reading)

    def source(self, key: ChunkKey) -> str:
        """The tier that a chunk is being read from; empty if none."""
        return self._reading[key][0].name if key in self._reading else ""

    def request(self, path: Sequence[ChunkKey], at: int, terms: Terms) -> Requested:
        """Request the run of chunks from ``at`` on that one tier can deliver, or may be able to.

        Stops before the first chunk that has a slot in an arena, or that was just rejected. Chunks that workers read
        directly are not requested, unless ``terms`` name their tier.
        """

        def blocked(key: ChunkKey) -> bool:
            return key in self.rejected or self._has_slot(key)

        if blocked(path[at]):
            return Requested()
        tiers = [tier for tier in self._tiers if tier.name not in terms.without]
        for tier in tiers:
            if not tier.is_direct(terms.not_direct) and (run := tier.readable(path, at)):
                keys = leading_run(path[at : at + run], lambda key: not blocked(key))
                choice = tier.choose(len(keys), terms.limit)
                self._add(tier, _named(path, at, choice.chunks, terms))
                return Requested(choice.chunks, tier.name, choice.declined)
        return self._ask(tiers, path, at, terms)

    def bring(
        self, tier: StoreTier, keys: Sequence[ChunkKey], parents: Iterable[ChunkKey | None], terms: Terms
    ) -> None:
        """Request chunks, or parts of chunks, from a tier that can deliver them. Extra ``parents`` are ignored."""
        self._add(tier, {key: _Request(parent, terms) for key, parent in zip(keys, parents, strict=False)})

    def probe(self, tier: StoreTier, keys: Sequence[ChunkKey], parents: Iterable[ChunkKey | None], salt: bytes) -> None:
        """A tier's chunks were declined: request some if its store is due to be measured again."""
        probes = keys[: tier.probe(len(keys))]
        self.bring(tier, probes, parents, Terms(salt=salt))
        self.probes.update(probes)

    def start(self) -> None:
        """Begin to read requested chunks, as room and each tier's limit in flight permit."""
        self.rejected.clear()
        self._take_answers()
        if any(self._queues.values()):
            self.stalled = False
        for tier in self._tiers:
            if queue := self._queues[tier]:
                self._start(tier, queue)
            for key in self._unawaited.union(self.probes.difference(self._reading)) if queue else ():
                queue.pop(key, None)
        self._unawaited.clear()
        self.probes.intersection_update(self._reading)

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """No request awaits these chunks any more: drop them unless the next step begins to read them."""
        self._unawaited.update(keys)

    def forget_requests(self) -> None:
        """Drop the requests whose reads have not begun."""
        for queue in self._queues.values():
            queue.clear()
        self._queries.clear()

    def _add(self, tier: StoreTier, requests: Mapping[ChunkKey, _Request]) -> None:
        self._queues[tier].update(requests)
        self._unawaited.difference_update(requests)

    def _start(self, tier: StoreTier, queue: OrderedDict[ChunkKey, _Request]) -> None:
        """Begin the reads that one tier permits now."""
        dropped: list[ChunkKey] = []
        if not tier.can_read:
            dropped += queue
            queue.clear()
        requests: dict[ChunkKey, _Request] = {}
        room = min(_AT_ONCE, tier.may_read(self._hot.memory.slot_nbytes))
        while queue and len(requests) < room:
            key, request = queue.popitem(last=False)
            if not tier.has(key):
                dropped.append(key)
            elif not self._has_slot(key):
                requests[key] = request
        self._make_room(self._hot, len(requests), ())
        fitting = list(requests)[: self._hot.free]
        salts = {key: requests[key].terms.salt for key in fitting if requests[key].terms.salt}
        self._hot.reserve(fitting, salts)
        views = [(key, self._hot.view(key)) for key in fitting]
        begun = set(tier.read(views, lambda good, bad: self._read(tier, good, bad), salts))
        self._reading.update((key, (tier, requests[key])) for key in begun)
        self._hot.abort([key for key in fitting if key not in begun])
        self.rejected.update(list(requests)[len(fitting) :])
        self.stalled |= len(fitting) < len(requests)
        self._leases.wake([*dropped, *(requests.keys() - begun)])

    def _ask(self, tiers: Sequence[StoreTier], path: Sequence[ChunkKey], at: int, terms: Terms) -> Requested:
        """Ask all shared stores at the same time for the chunks of a path that no index has."""
        runs = {tier: tier.remote.request(path, at) for tier in tiers}
        self._queries.update(_named(path, at, max(runs.values(), default=0), terms))
        awaited = [tier for tier in tiers if runs[tier] and tier.chooser.worth_asking(runs[tier], terms.limit)]
        if not awaited:
            return Requested()
        return Requested(max(runs[tier] for tier in awaited), awaited[0].name)

    def _take_answers(self) -> None:
        """Request the chunks that stores were asked for and have, if they are worth loading.

        No request need name the path again. Chunks after a missing one are left alone.
        """
        for tier in self._tiers:
            answered, found = tier.remote.take_answers()
            requested: dict[ChunkKey, _Request] = {}
            for key in found:
                query = self._queries.get(key)
                if query and not self._has_slot(key) and self._continues(query.parent, requested):
                    requested[key] = query
            if requested and not tier.is_direct():
                choice = tier.choose(len(requested), next(iter(requested.values())).terms.limit)
                self._add(tier, dict(list(requested.items())[: choice.chunks]))
            for key in answered:
                if not any(key in each.remote for each in self._tiers):
                    self._queries.pop(key, None)
            self._leases.wake([key for key in answered if key not in self._queues[tier]])

    def _continues(self, parent: ChunkKey | None, found: Container[ChunkKey]) -> bool:
        """Is this chunk, and so every chunk before it, in an arena or on its way there?"""
        return (
            parent is None
            or parent in found
            or any(parent in queue for queue in self._queues.values())
            or self._has_slot(parent)
        )

    def _has_slot(self, key: ChunkKey) -> bool:
        return any(arena.has_slot(key) for arena in self._arenas)

    def _read(self, tier: StoreTier, good: Sequence[ChunkKey], bad: Sequence[ChunkKey]) -> None:
        self._hot.abort(bad)
        self.probes.difference_update(good, bad)
        for key in bad:
            del self._reading[key]
        read = {key: self._reading.pop(key)[1] for key in good}
        if kept := self._hot.commit(good, [request.parent for request in read.values()], exact=tier.lossless):
            self._arrived(tier, kept, {key: read[key].terms.salt for key in kept if read[key].terms.salt})


def _named(path: Sequence[ChunkKey], at: int, chunks: int, terms: Terms) -> dict[ChunkKey, _Request]:
    """The requests for ``chunks`` chunks of a path from ``at`` on."""
    keys = path[at : at + chunks]
    parents = [path[at - 1] if at else None, *keys]
    return {key: _Request(parent, terms) for key, parent in zip(keys, parents, strict=False)}
