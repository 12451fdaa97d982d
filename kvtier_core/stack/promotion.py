"""Reads the chunks that lookups requested from store tiers into the hottest arena, as far as there is room."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import MakeRoom
from kvtier_core.types import ChunkKey

#: ``arrived(tier, keys, salts)``: these are READY now, and sealed. There is a salt for those whose requests have one.
Arrived = Callable[[StoreTier, Sequence[ChunkKey], Mapping[ChunkKey, bytes]], None]


class _Request(NamedTuple):
    parent: ChunkKey | None
    salt: bytes


class Promotions:
    """Collects requests between two steps. A request without room is rejected until the step after next."""

    def __init__(
        self, hot: Arena, tiers: Sequence[StoreTier], frame_nbytes: int, *, make_room: MakeRoom, arrived: Arrived
    ):
        self.rejected: set[ChunkKey] = set()  #: requests of the last step that found no room
        self._hot = hot
        self._tiers = tiers
        self._frame_nbytes = frame_nbytes
        self._make_room = make_room
        self._arrived = arrived
        self._requests: dict[ChunkKey, _Request] = {}
        self._reading: dict[ChunkKey, _Request] = {}

    def request(self, path: Sequence[ChunkKey], at: int, taken: Callable[[ChunkKey], bool], salt: bytes = b"") -> int:
        """Request the chunks of a path from ``at`` on that one tier can deliver; returns how many are on their way.

        Stops before the first that is ``taken`` by a slot, or was rejected just now.
        """

        def blocked(key: ChunkKey) -> bool:
            return key in self.rejected or taken(key)

        if blocked(path[at]):
            return 0
        for tier in self._tiers:
            if run := tier.readable(path, at):
                keys = leading_run(path[at : at + run], lambda key: not blocked(key))
                parents = [path[at - 1] if at else None, *keys]
                self._requests.update((key, _Request(parents[i], salt)) for i, key in enumerate(keys))
                return len(keys)
            if tier.request_lookup(path[at]):
                return 1
        return 0

    def start(self, taken: Callable[[ChunkKey], bool]) -> None:
        """Begin to read what was requested, as far as there is room for it and the tier's limit in flight allows."""
        self.rejected.clear()
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
            self._reading.update((key, requests[key]) for key in begun)
            self._hot.abort(_without(fitting, set(begun)))
            self.rejected.update(now[len(fitting) :])
            for key in here:
                del requests[key]

    def forget_requests(self) -> None:
        """Drop the requests whose reads have not begun."""
        self._requests.clear()

    def _read(self, tier: StoreTier, good: Sequence[ChunkKey], bad: Sequence[ChunkKey]) -> None:
        self._hot.abort(bad)
        for key in bad:
            del self._reading[key]
        read = {key: self._reading.pop(key) for key in good}
        if kept := self._hot.commit(good, [request.parent for request in read.values()], exact=tier.lossless):
            self._arrived(tier, kept, {key: read[key].salt for key in kept if read[key].salt})


def _without(keys: Sequence[ChunkKey], others: Container[ChunkKey]) -> list[ChunkKey]:
    return [key for key in keys if key not in others]
