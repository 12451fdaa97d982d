"""An arena whose slots are lent to it, from memory that other stacks use as well."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import attrs

from kvtier_core.server.extents import Share
from kvtier_core.server.tenants import Tenants
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import ChunkKey

#: Seconds within which a worker fills a slot, many times over.
_FILLED_WITHIN = 2.0


class LentArena(Arena):
    """It has no slots at first, borrows some when it lacks them, and gives back those that are recalled."""

    def __init__(self, name: str, number: int, memory: Share, index: CacheIndex, tenants: Tenants | None = None):
        super().__init__(name, number, memory, index)
        self._tenants = tenants or Tenants()
        self._key_at: dict[int, ChunkKey] = {}  # by slot
        self._tenant_of: dict[ChunkKey, str] = {}  # of each chunk that has a slot
        self._since: dict[ChunkKey, float] = {}  # when each slot that is being filled was reserved
        self._share = memory
        self._free = []
        self._slots = 0  # that it has
        self._recalled: set[int] = set()  # and that are still in use

    @property
    def capacity(self) -> int:
        """Number of slots that the arena has, or would get if it asked."""
        return self._slots + self._share.unused

    def slots_for(self, chunks: int) -> int:
        """Borrows the slots that it lacks: only then is it known how many of the unused ones it can get."""
        self._borrow(chunks - self._slots)
        return min(chunks, self._slots)

    def make_room(self, slots: int, spared: Sequence[Container[ChunkKey]] = ()) -> list[ChunkKey]:
        """Borrow, then evict from those beyond their quotas, then from all."""
        self._borrow(slots - self.free)
        return self._evict_excess(slots, spared) + super().make_room(slots, spared)

    def admit(
        self, newcomers: Sequence[ChunkKey], spared: Sequence[Container[ChunkKey]] = ()
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Beyond its soft quota a tenant's chunks replace none but its own."""
        self._borrow(len(newcomers) - self.free)
        excess = self._evict_excess(len(newcomers), spared)
        if newcomers:
            tenant = self._tenants.of(newcomers[0])
            within = self._tenants.room(tenant, self.memory.slot_nbytes)
            if within is not None and within < len(newcomers):
                lacking = len(newcomers) - max(within, self.free)
                excess += self._evict_of({tenant}, lacking, spared)
                within = self._tenants.room(tenant, self.memory.slot_nbytes) or 0
                newcomers = newcomers[: max(within, self.free)]
        admitted, evicted = super().admit(newcomers, spared)
        return admitted, excess + evicted

    def _evict_excess(self, slots: int, spared: Sequence[Container[ChunkKey]]) -> list[ChunkKey]:
        """Evict chunks of tenants beyond their soft quota until so many slots are free, or there are none."""
        if slots <= self.free or not self._tenants.over_soft:
            return []
        return self._evict_of(self._tenants.over_soft, slots - self.free, spared)

    def _evict_of(self, tenants: Collection[str], slots: int, spared: Sequence[Container[ChunkKey]]) -> list[ChunkKey]:
        others = _Others(self._tenant_of, tenants)
        victims = self.index.select_victims(slots, lambda key: 1, [*spared, others], self._pinned)
        self._release(victims, evicted=True)
        return victims

    def beyond_quota(self) -> list[ChunkKey]:
        """The chunks to evict so that no tenant is beyond its hard quota, as far as nobody has pinned them."""
        victims: list[ChunkKey] = []
        for tenant in self._tenants.over_hard:
            slots = -(-self._tenants.excess(tenant) // self.memory.slot_nbytes)
            others = _Others(self._tenant_of, {tenant})
            victims += self.index.select_victims(slots, lambda key: 1, [others], self._pinned)
        return victims

    def of_tenant(self, tenant: str | None) -> list[ChunkKey]:
        """The chunks of a tenant that have a slot; None: those of all."""
        return [key for key, each in self._tenant_of.items() if tenant in (None, each)]

    def unused_chunks(self) -> list[ChunkKey]:
        """The chunks that are READY and that nobody has pinned."""
        resident = self.index.resident
        return [key for key in resident if resident.place(key) not in self._pinned]

    def reserve(self, keys: Sequence[ChunkKey]) -> None:
        """Take free slots for keys that have none, and count them."""
        super().reserve(keys)
        self._count({self._reserved[key]: (key, self._tenants.of(key)) for key in keys})
        self._keep_as_taken(keys)

    def restore(self, held: Mapping[int, tuple[ChunkKey, str]]) -> None:
        """Take over slots that are claimed, with the key and tenant of each: they count as being filled."""
        borrowed = self._share.borrow_claimed()
        self._free += [slot for slot in borrowed if slot not in held]
        self._slots += len(borrowed)
        self._reserved.update((key, slot) for slot, (key, _) in held.items())
        self._count(held)

    def _count(self, slots: Mapping[int, tuple[ChunkKey, str]]) -> None:
        now = time.monotonic()
        for slot, (key, tenant) in slots.items():
            self._key_at[slot] = key
            self._tenant_of[key] = tenant
            self._since[key] = now
        self._tenants.add([tenant for _, tenant in slots.values()], self.memory.slot_nbytes)

    def _keep_as_taken(self, keys: Iterable[ChunkKey]) -> None:
        if keeper := self._share.keeper:
            keeper.taken({self._place(key): (key, self._tenant_of[key]) for key in keys})

    def commit(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], *, exact: bool = True
    ) -> list[ChunkKey]:
        """As `Arena.commit`."""
        for key in keys:
            self._since.pop(key, None)
        kept = super().commit(keys, parents, exact=exact)
        if keeper := self._share.keeper:
            above = dict(zip(keys, parents, strict=True))
            keeper.ready({self._place(key): above[key] for key in kept})
        return kept

    def arrives(self, key: ChunkKey) -> bool:
        """Is it worth waiting for this chunk? Not if whoever fills its slot has taken too long: it may hang."""
        return self.is_reserved(key) and time.monotonic() - self._since[key] < _FILLED_WITHIN

    def _plan_admission(
        self, newcomers: Sequence[ChunkKey], spared: Sequence[Container[ChunkKey]]
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        self._borrow(len(newcomers) - self.free)
        return super()._plan_admission(newcomers, spared)

    def _borrow(self, slots: int) -> None:
        if slots > 0:
            lent = self._share.borrow(slots)
            self._free += lent
            self._slots += len(lent)

    def recall(self, slots: range) -> list[ChunkKey]:
        """Give back the slots of this range that the arena has: those in use when their last user is done.

        Their chunks are not found any more. Returns those that were evicted at once.
        """
        free = [slot for slot in self._free if slot in slots]
        self._free = [slot for slot in self._free if slot not in slots]
        resident = self.index.resident
        there = {slot: self._key_at[slot] for slot in slots if slot in self._key_at}
        held = [key for key in there.values() if key in resident]
        filled = [key for key in there.values() if key in self._reserved]
        taken = there.keys() - self._recalled
        self._recalled |= taken
        self._slots -= len(free) + len(taken)
        self._share.give_back(free)
        chunks = [key for key in held if self.index.chunk_of(key) == key]
        return self.drop(list(dict.fromkeys([*held, *self.index.other_parts(chunks), *filled])))

    def _freed(self, places: Sequence[int]) -> None:
        if (keeper := self._share.keeper) and places:
            keeper.freed(places)
        keys = [self._key_at.pop(place) for place in places]
        self._tenants.add([self._tenant_of.pop(key) for key in keys], -self.memory.slot_nbytes)
        for key in keys:
            self._since.pop(key, None)
        if returned := self._recalled.intersection(places):
            self._recalled -= returned
            self._share.give_back(list(returned))
            places = [place for place in places if place not in returned]
        super()._freed(places)

    def next_victims(self, count: int) -> list[int]:
        """Slots that are free, and those of so many chunks that would be evicted next."""
        victims = self.index.select_victims(count, lambda key: 1, (), self._pinned)
        return self._free + self.index.resident.places(victims)

    def drop(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Never find these chunks again. Returns those whose slots are free now; others are when nobody uses them."""
        resident = self.index.resident
        filled = [key for key in keys if key in self._reserved]
        held = [key for key in keys if key in resident]
        in_use = {key for key in held if resident.place(key) in self._pinned}
        self._invalidated.update((self._place(key), key) for key in (*in_use, *filled))
        self._keep_as_taken((*in_use, *filled))
        self.hide(in_use)
        dropped = [key for key in held if key not in in_use]
        self._release(dropped, evicted=True)
        return dropped


@attrs.frozen
class _Others(Container[ChunkKey]):
    """The chunks of all tenants but some."""

    tenant_of: Mapping[ChunkKey, str]
    tenants: Collection[str]

    def __contains__(self, key: object) -> bool:
        return self.tenant_of.get(key) not in self.tenants  # type: ignore[call-overload]
