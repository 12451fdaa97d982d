"""What lookups pinned for their holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.stack.arena import Arena
from kvtier_core.types import ChunkKey, Slot


@attrs.define
class Lease:
    """READY chunks of one path that are pinned for one holder."""

    path: list[ChunkKey] = attrs.field(factory=list)  #: the leading chunks that are pinned
    slots: list[Slot] = attrs.field(factory=list)  #: of each of them
    sources: list[str] = attrs.field(factory=list)  #: for each of them the tier that supplied it
    beyond: dict[ChunkKey, tuple[Slot, str]] = attrs.field(factory=dict)  #: what else is pinned
    awaited: set[ChunkKey] = attrs.field(factory=set)  #: on their way: to be pinned when they arrive
    valid: bool = True  #: False once everything was invalidated: the slots stay pinned, and are never found again

    def __bool__(self) -> bool:
        return bool(self.slots or self.beyond or self.awaited)

    def extend(self, keys: Sequence[ChunkKey], slots: Sequence[Slot], sources: Sequence[str]) -> None:
        """Append chunks to the leading run."""
        self.path += keys
        self.slots += slots
        self.sources += sources

    def pinned(self) -> Iterator[Slot]:
        """All slots, once each."""
        yield from self.slots
        yield from (slot for slot, _ in self.beyond.values())


class Leases:
    """The leases of all holders."""

    def __init__(self, arenas: Sequence[Arena]):
        self._arenas = arenas
        self._by_holder: dict[str, Lease] = {}
        self.promoted_from: dict[ChunkKey, str] = {}  #: READY chunks that no request has used since their promotion

    def of(self, path: Sequence[ChunkKey], holder: str) -> Lease:
        """The lease of a holder, without what it awaited. If it holds for another path it is released."""
        lease = self._by_holder.get(holder)
        if lease is not None and not self._holds_for(lease, path):
            self.release(holder)
            lease = None
        if lease is None:
            lease = self._by_holder[holder] = Lease()
        lease.awaited.clear()
        return lease

    def _holds_for(self, lease: Lease, path: Sequence[ChunkKey]) -> bool:
        """Is all that is pinned of this path, and may it still be found?"""
        if not lease.valid or list(path[: len(lease.path)]) != lease.path:
            return False
        chunk_of = self._arenas[0].index.chunk_of
        return {chunk_of(key) for key in lease.beyond} <= set(path)

    def drop_if_empty(self, holder: str) -> None:
        """Forget a lease that holds and awaits nothing."""
        if not self._by_holder[holder]:
            del self._by_holder[holder]

    def release(self, holder: str) -> None:
        """Unpin all that is pinned for a holder."""
        if lease := self._by_holder.pop(holder, None):
            slots = list(lease.pinned())
            for arena in self._arenas:
                arena.unpin([slot for slot in slots if slot.arena == arena.number], holder)

    def pin(self, keys: Sequence[ChunkKey], lease: Lease, holder: str, *, leading: bool = False) -> None:
        """Pin READY chunks that the lease does not hold yet; ``leading`` ones are the next of its leading run."""
        fresh = [key for key in keys if key not in lease.beyond] if lease.beyond else keys
        for arena, here in self._by_arena(fresh).items():
            slots = arena.pin(here, holder)
            if self.promoted_from:
                sources = [self.promoted_from.pop(key, arena.name) for key in here]
            else:
                sources = [arena.name] * len(here)
            if leading and here is keys:
                return lease.extend(keys, slots, sources)
            lease.beyond.update(zip(here, zip(slots, sources, strict=True), strict=True))
        if leading:
            pinned = [lease.beyond.pop(key) for key in keys]
            lease.extend(keys, [slot for slot, _ in pinned], [source for _, source in pinned])

    def arrived(self, keys: Sequence[ChunkKey], tier: str) -> None:
        """Chunks were promoted from a tier: pin them for those who wait for them."""
        self.promoted_from.update(dict.fromkeys(keys, tier))
        for holder, lease in self._by_holder.items():
            if awaited := [key for key in keys if key in lease.awaited]:
                self.pin(awaited, lease, holder)
                lease.awaited.difference_update(awaited)

    def evicted(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks are no longer in the hottest arena."""
        for key in keys if self.promoted_from else ():
            self.promoted_from.pop(key, None)

    def invalidate_all(self) -> None:
        """Nothing that is pinned may be found again."""
        for lease in self._by_holder.values():
            lease.awaited.clear()
            lease.valid = False
        self.promoted_from.clear()

    def _by_arena(self, keys: Sequence[ChunkKey]) -> dict[Arena, Sequence[ChunkKey]]:
        """READY chunks, by the hottest arena that has each."""
        if self._arenas[0].ready_run(keys) == len(keys):
            return {self._arenas[0]: keys}
        homes: dict[Arena, list[ChunkKey]] = {}
        for key in keys:
            homes.setdefault(next(arena for arena in self._arenas if arena.has(key)), []).append(key)
        return homes
