"""Reads the chunks that lookups requested from store tiers into the hottest arena, as far as there is room."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import attrs

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.interface import Declined, LoadLimit
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import MakeRoom
from kvtier_core.types import ChunkKey

#: ``arrived(tier, keys, salts)``: these are READY now, and sealed. There is a salt for those whose requests have one.
Arrived = Callable[[StoreTier, Sequence[ChunkKey], Mapping[ChunkKey, bytes]], None]
#: Does a slot of an arena belong to this chunk?
Taken = Callable[[ChunkKey], bool]


@attrs.frozen
class Requested:
    """What became of a request: ``chunks`` are on their way, or their store is asked for them."""

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
    """Collects requests between two steps. A request without room is rejected until the step after next."""

    def __init__(
        self, hot: Arena, tiers: Sequence[StoreTier], frame_nbytes: int, *, make_room: MakeRoom, arrived: Arrived
    ):
        self.rejected: set[ChunkKey] = set()  #: requests of the last step that found no room
        #: Declined chunks that come up all the same, to see how fast their store is by now. Nobody waits for them.
        self.probes: set[ChunkKey] = set()
        self._hot = hot
        self._all = tiers
        self._frame_nbytes = frame_nbytes
        self._make_room = make_room
        self._arrived = arrived
        self._requests: dict[ChunkKey, _Request] = {}
        self._reading: dict[ChunkKey, _Request] = {}
        self._questions: dict[ChunkKey, _Request] = {}  # what stores are asked for

    @property
    def _tiers(self) -> list[StoreTier]:
        """Those that it reads: the workers read the others."""
        return [tier for tier in self._all if not tier.lands]

    @property
    def under_way(self) -> int:
        """Chunks that are requested or being read."""
        return len(self._requests) + len(self._reading)

    def source(self, key: ChunkKey) -> str:
        """The tier that a chunk is being read from; empty if it is not."""
        return self._reading[key].tier if key in self._reading else ""

    def request(
        self, path: Sequence[ChunkKey], at: int, taken: Taken, limit: LoadLimit | None = None, salt: bytes = b""
    ) -> Requested:
        """Request the chunks of a path from ``at`` on that one tier can deliver, or may be able to.

        Stops before the first that is ``taken`` by a slot, or was rejected just now.
        """

        def blocked(key: ChunkKey) -> bool:
            return key in self.rejected or taken(key)

        if blocked(path[at]):
            return Requested()
        for tier in self._tiers:
            if run := tier.readable(path, at):
                keys = leading_run(path[at : at + run], lambda key: not blocked(key))
                choice = tier.choose(len(keys), limit)
                self._requests.update(_named(path, at, choice.chunks, limit, salt))
                return Requested(choice.chunks, tier.name, choice.declined)
        return self._ask(path, at, limit, salt)

    def bring(
        self, keys: Sequence[ChunkKey], parents: Iterable[ChunkKey | None], limit: LoadLimit | None, salt: bytes
    ) -> None:
        """Request these chunks, or parts of chunks, which a tier can deliver. There may be more ``parents``."""
        self._requests.update((key, _Request(parent, salt, limit)) for key, parent in zip(keys, parents, strict=False))

    def probe(self, tier: StoreTier, keys: Sequence[ChunkKey], parents: Iterable[ChunkKey | None], salt: bytes) -> None:
        """Chunks that a tier has were declined: bring some up if its store is to be measured again."""
        probes = keys[: tier.probe(len(keys))]
        self.bring(probes, parents, None, salt)
        self.probes.update(probes)

    def start(self, taken: Taken) -> None:
        """Begin to read what was requested, as far as there is room for it and the tier's limit in flight allows."""
        self.rejected.clear()
        self._take_answers(taken)
        requests = {key: request for key, request in self._requests.items() if not taken(key)}
        self._requests.clear()
        for tier in self._tiers:
            here = [key for key in requests if tier.has(key)]
            now = here[: tier.may_read(self._frame_nbytes)]  # the others are requested again by the next lookup
            self._make_room(self._hot, len(now), ())
            fitting = now[: self._hot.free]
            self._hot.reserve(fitting)
            begun = tier.read(
                [(key, self._hot.view(key)) for key in fitting],
                lambda good, bad, tier=tier: self._read(tier, good, bad),
                {key: requests[key].salt for key in fitting if requests[key].salt},
            )
            self._reading.update((key, attrs.evolve(requests[key], tier=tier.name)) for key in begun)
            self._hot.abort(_without(fitting, set(begun)))
            self.rejected.update(now[len(fitting) :])
            for key in here:
                del requests[key]
        self.probes.intersection_update(self._reading)

    def forget_requests(self) -> None:
        """Drop the requests whose reads have not begun."""
        self._requests.clear()
        self._questions.clear()

    def _ask(self, path: Sequence[ChunkKey], at: int, limit: LoadLimit | None, salt: bytes) -> Requested:
        """Ask all shared stores at once for the chunks of a path that no tier knows."""
        runs = {tier: tier.request_lookup(path, at) for tier in self._tiers}
        self._questions.update(_named(path, at, max(runs.values(), default=0), limit, salt))
        awaited = [tier for tier in self._tiers if runs[tier] and tier.worth_asking(runs[tier], limit)]
        if not awaited:
            return Requested()
        return Requested(max(runs[tier] for tier in awaited), awaited[0].name)

    def _take_answers(self, taken: Taken) -> None:
        """Request what stores were asked for and have, as far as it is worth it: nobody need name the path again.

        Chunks behind one that is not there are left alone.
        """
        for tier in self._tiers:
            found: dict[ChunkKey, _Request] = {}
            for key in tier.take_found():
                question = self._questions.pop(key, None)
                if question and not taken(key) and self._continues(question.parent, found, taken):
                    found[key] = question
            if found:
                choice = tier.choose(len(found), next(iter(found.values())).limit)
                self._requests.update(list(found.items())[: choice.chunks])
        asked = (key for key in self._questions if any(tier.is_asked(key) for tier in self._tiers))
        self._questions = {key: self._questions[key] for key in asked}

    def _continues(self, parent: ChunkKey | None, found: Container[ChunkKey], taken: Taken) -> bool:
        """Is this chunk, and so all before it, in an arena or about to be?"""
        return parent is None or parent in found or parent in self._requests or taken(parent)

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


def _without(keys: Sequence[ChunkKey], others: Container[ChunkKey]) -> list[ChunkKey]:
    return [key for key in keys if key not in others]
