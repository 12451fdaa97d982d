"""The slots and frames that lookups pin for their holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import attrs

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey, Slot, StoredFrame

#: The place that a chunk is loaded from.
_Place = Slot | StoredFrame


@attrs.define
class Lease:
    """The READY chunks of one path that are pinned for one holder, and the frames held for it in stores."""

    holder: str = ""  #: empty: it is nobody's, and has nothing
    path: list[ChunkKey] = attrs.field(factory=list)  #: the leading chunks that are pinned
    slots: list[_Place] = attrs.field(factory=list)  #: the place of each of them
    sources: list[str] = attrs.field(factory=list)  #: for each of them, the tier that supplied it
    beyond: dict[ChunkKey, tuple[_Place, str]] = attrs.field(factory=dict)  #: other pinned chunks, with their sources
    awaited: dict[str, set[ChunkKey]] = attrs.field(factory=dict)  #: by tier: to be pinned when they arrive
    promised: set[ChunkKey] = attrs.field(factory=set)  #: being stored, to be pinned when they are READY
    outdated: set[ChunkKey] = attrs.field(factory=set)  #: awaited before the lookup under way
    lasting: bool = False  #: as `Terms.lasting`
    pending: bool = False  #: True until an awaited chunk arrives or is given up
    valid: bool = True  #: False after an invalidation: the slots stay pinned and are never found again

    def __bool__(self) -> bool:
        return bool(self.slots or self.beyond or self.awaited or self.promised)

    def await_nothing(self) -> set[ChunkKey]:
        """Forget and return the awaited chunks."""
        awaited, self.awaited, self.pending = self.awaited, {}, False
        return set().union(*awaited.values())

    def arrived(self, keys: Sequence[ChunkKey]) -> None:
        """These have arrived. Once all chunks of one tier have, the holder looks again: it then waits for another."""
        for tier, awaited in list(self.awaited.items()):
            awaited.difference_update(keys)
            if not awaited:
                del self.awaited[tier]
                self.pending = False

    def extend(self, keys: Sequence[ChunkKey], slots: Sequence[_Place], sources: Sequence[str]) -> None:
        """Append chunks to the leading run."""
        self.path += keys
        self.slots += slots
        self.sources += sources

    def places(self) -> Iterator[_Place]:
        """The place of each chunk."""
        return chain(self.slots, (place for place, _ in self.beyond.values()))

    def pinned(self) -> Iterator[Slot]:
        """The slots among these places."""
        return (place for place in self.places() if isinstance(place, Slot))


class Leases:
    """The leases of all holders."""

    def __init__(
        self, arenas: Sequence[Arena], tiers: Sequence[StoreTier], *, unawaited: Callable[[Collection[ChunkKey]], None]
    ):
        """``unawaited`` is called with chunks that no holder awaits any more."""
        self._arenas = arenas
        self._unawaited = unawaited
        self._tiers = tiers
        self._by_holder: dict[str, Lease] = {}
        self._waiting: dict[ChunkKey, dict[str, None]] = {}  # the holders that await each chunk, in order
        self._promised: dict[ChunkKey, str] = {}  # the holder to which each chunk that is being stored is promised
        self.promoted_from: dict[ChunkKey, str] = {}  #: READY chunks that no request has used since their promotion
        self.lasting: Counter[int] = Counter()  #: the pins of lasting leases of each slot of the hottest arena

    def of(self, path: Sequence[ChunkKey], holder: str, *, lasting: bool = False) -> Lease:
        """The holder's lease, for a lookup that ends with `done`. A lease of another path is released first."""
        lease = self._by_holder.get(holder)
        if lease is not None and not self._holds_for(lease, path):
            self.release(holder)
            lease = None
        if lease is None:
            lease = self._by_holder[holder] = Lease(holder, lasting=lasting)
        lease.outdated = lease.await_nothing()
        return lease

    def _holds_for(self, lease: Lease, path: Sequence[ChunkKey]) -> bool:
        """Does everything pinned belong to this path, and is the lease valid?"""
        if not lease.valid or list(path[: len(lease.path)]) != lease.path:
            return False
        chunk_of = self._arenas[0].index.chunk_of
        return {chunk_of(key) for key in lease.beyond} <= set(path)

    def done(self, lease: Lease) -> None:
        """The lookup has ended. An empty lease is forgotten."""
        outdated, lease.outdated = lease.outdated, set()
        self._await_no_more(outdated.difference(*lease.awaited.values()), lease.holder)
        lease.pending = bool(lease.awaited)
        if not lease:
            del self._by_holder[lease.holder]

    def __contains__(self, holder: str) -> bool:
        return holder in self._by_holder

    def frames(self, holder: str) -> dict[ChunkKey, StoredFrame]:
        """The frames that are held for a holder in stores."""
        places = self._by_holder[holder].places() if holder in self._by_holder else ()
        return {place.key: place for place in places if isinstance(place, StoredFrame)}

    def still_pending(self, holder: str) -> bool:
        """Is everything that the holder awaited at its last lookup still on its way?"""
        lease = self._by_holder.get(holder)
        return lease is not None and lease.pending

    def all_stay(self, but: Lease) -> bool:
        """Does every other holder of pins in the hottest arena keep them for long, or until a chunk arrives?"""
        leases = map(self._by_holder.get, self._arenas[0].holders)
        return all(lease and (lease is but or lease.lasting or lease.awaited) for lease in leases)

    def release(self, holder: str) -> None:
        """Unpin the holder's slots and release its frames."""
        if lease := self._by_holder.pop(holder, None):
            self._await_no_more(lease.await_nothing(), holder)
            for key in lease.promised:
                if self._promised.get(key) == holder:
                    del self._promised[key]
            slots = list(lease.pinned())
            if lease.lasting:
                self.lasting -= Counter(slot.index for slot in slots if slot.arena == self._arenas[0].number)
            for arena in self._arenas:
                arena.unpin([slot for slot in slots if slot.arena == arena.number], holder)
            for tier in self._tiers:
                tier.direct_reads.release(holder)

    def release_frames(self, tier: str, holders: Collection[str] | None = None) -> None:
        """Release the holders, by default all, that hold frames of a tier."""
        for holder, lease in list(self._by_holder.items()):
            if (holders is None or holder in holders) and any(
                isinstance(place, StoredFrame) and place.tier == tier for place in lease.places()
            ):
                self.release(holder)

    def pin(self, keys: Sequence[ChunkKey], lease: Lease, *, leading: bool = False) -> None:
        """Pin READY chunks that the lease does not hold yet; ``leading`` ones continue its leading run."""
        fresh = [key for key in keys if key not in lease.beyond] if lease.beyond else keys
        for arena, here in self._by_arena(fresh).items():
            slots = arena.pin(here, lease.holder)
            if lease.lasting and arena is self._arenas[0]:
                self.lasting.update(slot.index for slot in slots)
            if self.promoted_from:
                sources = [self.promoted_from.pop(key, arena.name) for key in here]
            else:
                sources = [arena.name] * len(here)
            if leading and here is keys:
                return lease.extend(keys, slots, sources)
            lease.beyond.update(zip(here, zip(slots, sources, strict=True), strict=True))
        if leading:
            _lead(lease, keys)

    def hold(self, tier: StoreTier, keys: Sequence[ChunkKey], lease: Lease, *, leading: bool) -> int:
        """Lease frames that workers can read, for as many leading keys as possible. Returns their number."""
        fresh = [key for key in keys if key not in lease.beyond]
        frames = tier.lease(fresh, lease.holder)
        lease.beyond.update((frame.key, (frame, tier.name)) for frame in frames)
        held = leading_run(keys, lease.beyond.__contains__)
        if leading:
            _lead(lease, held)
        return len(held)

    def promise(self, keys: Iterable[ChunkKey], holder: str) -> None:
        """These chunks have just been reserved: pin them for the holder as soon as they are READY."""
        lease = self._by_holder.setdefault(holder, Lease(holder, lasting=True))
        lease.promised.update(keys)
        self._promised.update(dict.fromkeys(lease.promised, holder))

    def keep_promises(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks have been stored and are READY."""
        for key in keys if self._promised else ():
            if holder := self._promised.pop(key, None):
                lease = self._by_holder[holder]
                lease.promised.discard(key)
                self.pin([key], lease)

    def expect(self, keys: Iterable[ChunkKey], tier: str, lease: Lease) -> None:
        """These chunks are on their way from a tier: pin them when they arrive."""
        for key in keys:
            lease.awaited.setdefault(tier, set()).add(key)
            self._waiting.setdefault(key, {})[lease.holder] = None

    def arrived(self, keys: Sequence[ChunkKey], tier: str) -> None:
        """Chunks were promoted from a tier: pin them for the holders that await them."""
        self.promoted_from.update(dict.fromkeys(keys, tier))
        awaited: dict[str, list[ChunkKey]] = {}
        for key in keys:
            for holder in self._waiting.pop(key, ()):
                awaited.setdefault(holder, []).append(key)
        for holder, here in awaited.items():
            lease = self._by_holder[holder]
            lease.arrived(here)
            self.pin(here, lease)

    def wake(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are no longer on their way: holders that await one of them must look again."""
        for key in keys if self._waiting else ():
            for holder in self._waiting.get(key, ()):
                self._by_holder[holder].pending = False

    def evicted(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks have left the hottest arena."""
        for key in keys if self.promoted_from else ():
            self.promoted_from.pop(key, None)

    def invalidate_all(self) -> None:
        """No pinned chunk may be found again."""
        for lease in self._by_holder.values():
            lease.await_nothing()
            lease.promised.clear()
            lease.valid = False
        self._waiting.clear()
        self._promised.clear()
        self.promoted_from.clear()

    def _await_no_more(self, keys: Iterable[ChunkKey], holder: str) -> None:
        unawaited = []
        for key in keys:
            holders = self._waiting[key]
            del holders[holder]
            if not holders:
                del self._waiting[key]
                unawaited.append(key)
        self._unawaited(unawaited)

    def _by_arena(self, keys: Sequence[ChunkKey]) -> Mapping[Arena, Sequence[ChunkKey]]:
        """READY chunks, by the hottest arena that has each."""
        if self._arenas[0].ready_run(keys) == len(keys):
            return {self._arenas[0]: keys}
        homes: dict[Arena, list[ChunkKey]] = {}
        for key in keys:
            homes.setdefault(next(arena for arena in self._arenas if arena.has(key)), []).append(key)
        return homes


def _lead(lease: Lease, keys: Sequence[ChunkKey]) -> None:
    """These chunks, which the lease has, continue its leading run."""
    pinned = [lease.beyond.pop(key) for key in keys]
    lease.extend(keys, [place for place, _ in pinned], [source for _, source in pinned])
