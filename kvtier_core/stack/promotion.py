"""Reads the chunks that lookups requested from store tiers into the hottest arena, as far as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import attrs

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.outcomes import Declined, LoadLimit
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import MakeRoom
from kvtier_core.types import ChunkKey

#: ``arrived(tier, keys, salts)``: these are READY now, and sealed. There is a salt for those whose requests have one.
Arrived = Callable[[StoreTier, Sequence[ChunkKey], Mapping[ChunkKey, bytes]], None]
#: Does a slot of an arena belong to this chunk?
Taken = Callable[[ChunkKey], bool]


@attrs.frozen
class Requested:
    """The outcome of a request: ``chunks`` are on their way, or their store is asked for them."""

    chunks: int = 0
    tier: str = ""  #: where they come from
    declined: Declined | None = None


@attrs.frozen
class _Request:
    """A chunk that a path names."""

    parent: ChunkKey | None
    salt: bytes
    limit: LoadLimit | None
    tier: str = ""  #: that it is read from


class Promotions:
    """Requests wait here until their tier may read them. One that finds no room is rejected until the next step."""

    def __init__(
        self,
        hot: Arena,
        tiers: Sequence[StoreTier],
        *,
        make_room: MakeRoom,
        arrived: Arrived,
        dropped: Callable[[Sequence[ChunkKey]], None],
    ):
        """``dropped`` is called with chunks that will not come although they were requested, or asked for."""
        self.rejected: set[ChunkKey] = set()  #: requests of the last step that found no room
        #: Declined chunks that come up all the same, to see how fast their store is by now. Nobody waits for them.
        self.probes: set[ChunkKey] = set()
        self._hot = hot
        self._make_room = make_room
        self._arrived = arrived
        self._dropped = dropped
        self._queues: dict[StoreTier, OrderedDict[ChunkKey, _Request]] = {tier: OrderedDict() for tier in tiers}
        self._unawaited: set[ChunkKey] = set()
        self._reading: dict[ChunkKey, _Request] = {}
        self._questions: dict[ChunkKey, _Request] = {}  # what stores are asked for

    @property
    def under_way(self) -> int:
        """Chunks that are requested or being read."""
        return sum(map(len, self._queues.values())) + len(self._reading)

    def source(self, key: ChunkKey) -> str:
        """The tier that a chunk is being read from; empty if it is not."""
        return self._reading[key].tier if key in self._reading else ""

    def request(
        self,
        path: Sequence[ChunkKey],
        at: int,
        taken: Taken,
        limit: LoadLimit | None = None,
        salt: bytes = b"",
        not_direct: Collection[str] = (),
    ) -> Requested:
        """Request the chunks of a path from ``at`` on that one tier can deliver, or may be able to.

        Stops before the first that is ``taken`` by a slot, or was rejected just now. What the workers read themselves
        is not requested, unless it is in one of the tiers ``not_direct``.
        """

        def blocked(key: ChunkKey) -> bool:
            return key in self.rejected or taken(key)

        if blocked(path[at]):
            return Requested()
        for tier in self._queues:
            if not tier.is_direct(not_direct) and (run := tier.readable(path, at)):
                keys = leading_run(path[at : at + run], lambda key: not blocked(key))
                choice = tier.choose(len(keys), limit)
                self._add(tier, _named(path, at, choice.chunks, limit, salt))
                return Requested(choice.chunks, tier.name, choice.declined)
        return self._ask(path, at, limit, salt)

    def bring(
        self,
        tier: StoreTier,
        keys: Sequence[ChunkKey],
        parents: Iterable[ChunkKey | None],
        limit: LoadLimit | None,
        salt: bytes,
    ) -> None:
        """Request these chunks, or parts of chunks, which a tier can deliver. There may be more ``parents``."""
        self._add(tier, {key: _Request(parent, salt, limit) for key, parent in zip(keys, parents, strict=False)})

    def probe(self, tier: StoreTier, keys: Sequence[ChunkKey], parents: Iterable[ChunkKey | None], salt: bytes) -> None:
        """Chunks that a tier has were declined: bring some up if its store is to be measured again."""
        probes = keys[: tier.probe(len(keys))]
        self.bring(tier, probes, parents, None, salt)
        self.probes.update(probes)

    def start(self, taken: Taken) -> None:
        """Begin to read what was requested, as far as there is room for it and the tier's limit in flight allows."""
        self.rejected.clear()
        self._take_answers(taken)
        for tier, queue in self._queues.items():
            if queue:
                self._start(tier, queue, taken)
            for key in self._unawaited.union(self.probes.difference(self._reading)) if queue else ():
                queue.pop(key, None)
        self._unawaited.clear()
        self.probes.intersection_update(self._reading)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Nobody awaits these chunks any more: drop their requests unless the next step begins them."""
        self._unawaited.update(keys)

    def forget_requests(self) -> None:
        """Drop the requests whose reads have not begun."""
        for queue in self._queues.values():
            queue.clear()
        self._questions.clear()

    def _add(self, tier: StoreTier, requests: Mapping[ChunkKey, _Request]) -> None:
        self._queues[tier].update(requests)
        self._unawaited.difference_update(requests)

    def _start(self, tier: StoreTier, queue: OrderedDict[ChunkKey, _Request], taken: Taken) -> None:
        """Begin what one tier may read now."""
        dropped: list[ChunkKey] = []
        if not tier.can_read:
            dropped += queue
            queue.clear()
        requests: dict[ChunkKey, _Request] = {}
        room = tier.may_read(self._hot.memory.slot_nbytes)
        while queue and len(requests) < room:
            key, request = queue.popitem(last=False)
            if not tier.has(key):
                dropped.append(key)
            elif not taken(key):
                requests[key] = request
        self._make_room(self._hot, len(requests), ())
        fitting = list(requests)[: self._hot.free]
        self._hot.reserve(fitting)
        begun = tier.read(
            [(key, self._hot.view(key)) for key in fitting],
            lambda good, bad: self._read(tier, good, bad),
            {key: requests[key].salt for key in fitting if requests[key].salt},
        )
        self._reading.update((key, attrs.evolve(requests[key], tier=tier.name)) for key in begun)
        self._hot.abort(_without(fitting, set(begun)))
        self.rejected.update(list(requests)[len(fitting) :])
        self._dropped([*dropped, *_without(requests, set(begun))])

    def _ask(self, path: Sequence[ChunkKey], at: int, limit: LoadLimit | None, salt: bytes) -> Requested:
        """Ask all shared stores at once for the chunks of a path that no tier knows."""
        runs = {tier: tier.request_lookup(path, at) for tier in self._queues}
        self._questions.update(_named(path, at, max(runs.values(), default=0), limit, salt))
        awaited = [tier for tier in self._queues if runs[tier] and tier.worth_asking(runs[tier], limit)]
        if not awaited:
            return Requested()
        return Requested(max(runs[tier] for tier in awaited), awaited[0].name)

    def _take_answers(self, taken: Taken) -> None:
        """Request what stores were asked for and have, as far as it is worth it: nobody need name the path again.

        Chunks behind one that is not there are left alone.
        """
        for tier in self._queues:
            answered, found = tier.take_answers()
            requested: dict[ChunkKey, _Request] = {}
            for key in found:
                question = self._questions.get(key)
                if question and not taken(key) and self._continues(question.parent, requested, taken):
                    requested[key] = question
            if requested and not tier.is_direct():
                choice = tier.choose(len(requested), next(iter(requested.values())).limit)
                self._add(tier, dict(list(requested.items())[: choice.chunks]))
            for key in answered:
                if not any(each.is_asked(key) for each in self._queues):
                    self._questions.pop(key, None)
            self._dropped([key for key in answered if key not in self._queues[tier]])

    def _continues(self, parent: ChunkKey | None, found: Container[ChunkKey], taken: Taken) -> bool:
        """Is this chunk, and so all before it, in an arena or about to be?"""
        return (
            parent is None
            or parent in found
            or any(parent in queue for queue in self._queues.values())
            or taken(parent)
        )

    def _read(self, tier: StoreTier, good: Sequence[ChunkKey], bad: Sequence[ChunkKey]) -> None:
        self._hot.abort(bad)
        self.probes.difference_update(good, bad)
        for key in bad:
            del self._reading[key]
        read = {key: self._reading.pop(key) for key in good}
        if kept := self._hot.commit(good, [request.parent for request in read.values()], exact=tier.lossless):
            self._arrived(tier, kept, {key: read[key].salt for key in kept if read[key].salt})


def _named(
    path: Sequence[ChunkKey], at: int, chunks: int, limit: LoadLimit | None, salt: bytes
) -> dict[ChunkKey, _Request]:
    """So many chunks of a path, from ``at`` on."""
    keys = path[at : at + chunks]
    parents = [path[at - 1] if at else None, *keys]
    return {key: _Request(parent, salt, limit) for key, parent in zip(keys, parents, strict=False)}


def _without(keys: Iterable[ChunkKey], others: Container[ChunkKey]) -> list[ChunkKey]:
    return [key for key in keys if key not in others]
