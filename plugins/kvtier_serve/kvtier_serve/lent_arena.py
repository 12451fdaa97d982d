"""An arena whose slots are lent to it, from memory that other stacks use as well."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import ChunkKey, Slot
from kvtier_serve.extents import Share
from kvtier_serve.tenants import ANONYMOUS, UNBOUNDED, Tenants

#: Seconds within which a worker fills a slot, many times over.
_FILLED_WITHIN = 2.0
#: Number of tenants beyond their soft quotas that make room for one call, and of chunks in use skipped for each.
_TENANTS, _PASSED = 16, 64


class LentArena(Arena):
    """It has no slots at first, borrows some when it lacks them, and gives back those that are recalled."""

    def __init__(self, name: str, number: int, memory: Share, index: CacheIndex, tenants: Tenants | None = None):
        super().__init__(name, number, memory, index)
        self._tenants = tenants or Tenants()
        self._key_at: dict[int, ChunkKey] = {}  # by slot
        self._named_by: dict[ChunkKey, str] = {}  # the tenant of each chunk that has a slot
        self._named: dict[str, dict[ChunkKey, None]] = {}  # and the chunks of each tenant
        self._tenant_of: dict[ChunkKey, str] = {}  # and the one whose quotas bound it: the same, or ANONYMOUS
        self._chunks_of: dict[str, OrderedDict[ChunkKey, None]] = {}  # by the latter, the longest unused first
        self._since: dict[ChunkKey, float] = {}  # when each slot that is being filled was reserved
        self.share = memory  #: its memory
        self._free = []
        self._slots = 0  # that it has
        self._recalled: set[int] = set()  # and that are still in use
        self._condemned: set[int] = set()  # to be overwritten before they are free
        self._uncovered: list[int] = []  # the same, but no longer in use
        self._overwritten: set[int] = set()  # slots that are being overwritten

    @property
    def capacity(self) -> int:
        """Number of slots that the arena has, or would get if it asked."""
        return self._slots + self.share.unused

    @property
    def lent(self) -> int:
        """Number of slots that the arena has."""
        return self._slots

    def could_free(self, slots: int, spared: Sequence[Container[ChunkKey]] = (), pinned: Container[int] = ()) -> int:
        """As `Arena.could_free`, with the slots that it would borrow."""
        lent = self.share.lendable(slots - self.free) if slots > self.free else 0
        return lent + super().could_free(slots - lent, spared, pinned)

    def make_room(self, slots: int, spared: Sequence[Container[ChunkKey]] = ()) -> list[ChunkKey]:
        """Borrow, then evict from tenants beyond their quotas, then from all."""
        self._borrow(slots - self.free)
        return self._evict_excess(slots, spared) + super().make_room(slots, spared)

    def admit(
        self,
        newcomers: Sequence[ChunkKey],
        spared: Sequence[Container[ChunkKey]] = (),
        salt: bytes = b"",
        *,
        promised: bool = False,
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Beyond its soft quota, a tenant's chunks replace only its own."""
        self._borrow(len(newcomers) - self.free)
        excess = self._evict_excess(len(newcomers), spared)
        if newcomers:
            tenant = self._tenants.bounding(self._tenants.name(salt))
            within = self._tenants.room(tenant, self.memory.slot_nbytes)
            if within is not None and within < len(newcomers):
                lacking = len(newcomers) - max(within, self.free)
                excess += self._evict_of(tenant, lacking, spared)
                within = self._tenants.room(tenant, self.memory.slot_nbytes) or 0
                newcomers = newcomers[: max(within, self.free)]
        admitted, evicted = super().admit(newcomers, spared, salt, promised=promised)
        return admitted, excess + evicted

    def _evict_excess(self, slots: int, spared: Sequence[Container[ChunkKey]]) -> list[ChunkKey]:
        """Evict chunks of tenants beyond their soft quota until ``slots`` slots are free, or none is left."""
        victims: list[ChunkKey] = []
        if slots <= self.free:
            return victims
        for tenant in self._tenants.in_turn(self._tenants.over_soft, _TENANTS, self._chunks_of):
            excess = self._tenants.excess(tenant, self._tenants.quota(tenant).soft)
            lacking = min(slots - self.free, -(-excess // self.memory.slot_nbytes))
            victims += self._evict_of(tenant, lacking, spared)
        return victims

    def _evict_of(self, tenant: str, slots: int, spared: Sequence[Container[ChunkKey]]) -> list[ChunkKey]:
        victims = self._victims_of(tenant, slots, spared)
        self._release(victims, evicted=True)
        return victims

    def beyond_quota(self, tenant: str, most: int) -> list[ChunkKey]:
        """Chunks that a tenant has beyond its hard quota, and that are not in use; at most ``most``.

        Some are left out if many others are in use: call it again.
        """
        excess = self._tenants.excess(tenant, self._tenants.quota(tenant).hard)
        return self._victims_of(tenant, min(most, -(-excess // self.memory.slot_nbytes)), ())

    def _victims_of(self, tenant: str, slots: int, spared: Sequence[Container[ChunkKey]]) -> list[ChunkKey]:
        """Chunks of a tenant that may leave, the longest unused first."""
        own = self._chunks_of.get(tenant, OrderedDict())
        looked_at = list(itertools.islice(own, slots + _PASSED)) if slots > 0 else []
        resident = self.index.resident
        among = [key for key in looked_at if key in resident]
        victims = dict.fromkeys(self.index.select_victims(slots, lambda key: 1, spared, self._pinned, among))
        if len(victims) < slots:  # the next search begins after those that were skipped
            for key in looked_at:
                if key not in victims:
                    own.move_to_end(key)
        return list(victims)

    def of_tenant(self, tenant: str | None) -> list[ChunkKey]:
        """The chunks of a tenant that have a slot; None: of all tenants."""
        return list(self._named_by if tenant is None else self._named.get(tenant, ()))

    def used_by(self, tenant: str) -> int:
        """Bytes of the slots that a tenant's quotas bound."""
        return len(self._chunks_of.get(tenant, ())) * self.memory.slot_nbytes

    def unused(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """The chunks that are READY and that no holder has pinned."""
        resident = self.index.resident
        return [key for key in keys if key in resident and resident.place(key) not in self._pinned]

    def reserve(self, keys: Sequence[ChunkKey], salts: Mapping[ChunkKey, bytes] | None = None) -> None:
        """Take free slots for keys that have none, and count them."""
        super().reserve(keys, salts)
        salts = salts or {}
        names = {salt: self._tenants.name(salt) for salt in {salts.get(key, b"") for key in keys}}
        bounding = {name: self._tenants.bounding(name) for name in names.values()}
        self._count({self._reserved[key]: (key, names[salts.get(key, b"")]) for key in keys}, bounding)
        self._keep_as_taken(keys)

    def comes_back(self, path: Sequence[ChunkKey], tenant: str) -> None:
        """A tenant in its own right names these chunks: those stored before it was one now count for it."""
        if tenant == ANONYMOUS or ANONYMOUS not in self._chunks_of:
            return
        pooled = [key for key in (*path, *self.index.other_parts(path)) if self._tenant_of.get(key) == ANONYMOUS]
        if pooled:
            own = self._chunks_of.setdefault(tenant, OrderedDict())
            for key in reversed(pooled):
                del self._chunks_of[ANONYMOUS][key]
                self._tenant_of[key], own[key] = tenant, None
            _leave_out_empty(self._chunks_of, [ANONYMOUS])
            self._tenants.changed((ANONYMOUS, tenant), self)

    def restore(self, held: Mapping[int, tuple[ChunkKey, str]]) -> None:
        """Take over slots that are claimed, with the key and tenant of each: they count as being filled."""
        borrowed = self.share.borrow_claimed()
        self._free += [slot for slot in borrowed if slot not in held]
        self._slots += len(borrowed)
        self._reserved.update((key, slot) for slot, (key, _) in held.items())
        self._count(held, {})

    def _count(self, slots: Mapping[int, tuple[ChunkKey, str]], bounding: Mapping[str, str]) -> None:
        """``bounding`` names the tenants whose quotas bound some of these in place of their own."""
        now = time.monotonic()
        for slot, (key, name) in reversed(list(slots.items())):  # a leaf leaves before its root
            self._key_at[slot] = key
            self._named_by[key] = name
            self._named.setdefault(name, {})[key] = None
            self._since[key] = now
            self._tenant_of[key] = tenant = bounding.get(name, name)
            self._chunks_of.setdefault(tenant, OrderedDict())[key] = None
        self._tenants.changed({self._tenant_of[key]: None for key, _ in slots.values()}, self)

    def _keep_as_taken(self, keys: Iterable[ChunkKey]) -> None:
        if keeper := self.share.keeper:
            keeper.taken({self._place(key): (key, self._named_by[key]) for key in keys})

    def commit(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], *, exact: bool = True
    ) -> list[ChunkKey]:
        """As `Arena.commit`."""
        for key in keys:
            self._since.pop(key, None)
        kept = super().commit(keys, parents, exact=exact)
        if keeper := self.share.keeper:
            above = dict(zip(keys, parents, strict=True))
            keeper.ready({self._place(key): above[key] for key in kept})
        return kept

    def pin(self, keys: Sequence[ChunkKey], holder: str) -> list[Slot]:
        """As `Arena.pin`. For tenants with quotas, these chunks will be the last to leave."""
        slots = super().pin(keys, holder)
        if keys and self._tenants.quota(self._tenant_of[keys[0]]) is not UNBOUNDED:
            own = self._chunks_of[self._tenant_of[keys[0]]]
            for key in filter(own.__contains__, reversed(keys)):
                own.move_to_end(key)
        return slots

    def arrives(self, key: ChunkKey) -> bool:
        """Is it worth waiting for this chunk? Not if the worker that fills its slot is too late: it may hang."""
        return self.is_reserved(key) and time.monotonic() - self._since[key] < _FILLED_WITHIN

    def _plan_admission(
        self, newcomers: Sequence[ChunkKey], spared: Sequence[Container[ChunkKey]], *, promised: bool = False
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        self._borrow(len(newcomers) - self.free)
        return super()._plan_admission(newcomers, spared, promised=promised)

    def _borrow(self, slots: int) -> None:
        if slots > 0:
            lent = self.share.borrow(slots)
            self._free += lent
            self._slots += len(lent)

    def recall(self, slots: range) -> list[ChunkKey]:
        """Give back the slots of this range that the arena has: those in use when their last user is done.

        Their chunks are no longer found. Returns those that were evicted immediately.
        """
        free = list(filter(slots.__contains__, self._free))
        self._free = list(itertools.filterfalse(slots.__contains__, self._free))
        resident = self.index.resident
        there = {slot: self._key_at[slot] for slot in slots if slot in self._key_at}
        held = [key for key in there.values() if key in resident]
        filled = [key for key in there.values() if key in self._reserved]
        taken = {*there, *self._uncovered, *self._overwritten}.intersection(slots) - self._recalled
        self._recalled |= taken
        self._slots -= len(free) + len(taken)
        self.share.give_back(free)
        chunks = [key for key in held if self.index.chunk_of(key) == key]
        return self.drop(list(dict.fromkeys([*held, *self.index.other_parts(chunks), *filled])))

    def _freed(self, places: Sequence[int]) -> None:
        keys = [self._key_at.pop(place) for place in places]
        tenants: dict[str, None] = {}
        names: dict[str, None] = {}
        for key in keys:
            tenants[tenant := self._tenant_of.pop(key)] = None
            names[name := self._named_by.pop(key)] = None
            del self._chunks_of[tenant][key], self._named[name][key]
            self._since.pop(key, None)
        _leave_out_empty(self._chunks_of, tenants)
        _leave_out_empty(self._named, names)
        self._tenants.changed(tenants, self)
        super()._freed(places)

    def _reuse(self, places: Sequence[int]) -> None:
        if condemned := self._condemned.intersection(places):
            self._condemned -= condemned
            self._uncovered += condemned
            places = [place for place in places if place not in condemned]
        if (keeper := self.share.keeper) and places:
            keeper.freed(places)
        if returned := self._recalled.intersection(places):
            self._recalled -= returned
            self.share.give_back(list(returned))
            places = [place for place in places if place not in returned]
        super()._reuse(places)

    def erase(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """As `drop`; and their slots are overwritten before they are used again, if need be by the next server."""
        keys = [key for key in keys if self.has_slot(key)]
        self._keep_as_taken(keys)
        self.condemn(keys)
        return self.drop(keys)

    def condemn(self, keys: Iterable[ChunkKey]) -> None:
        """Overwrite the slots of these keys when their last user is done."""
        self._condemned.update(map(self._place, keys))

    @property
    def erasing(self) -> int:
        """Number of slots that are still to be overwritten."""
        return len(self._condemned) + len(self._uncovered) + len(self._overwritten)

    def take_uncovered(self) -> list[int]:
        """The slots to overwrite now; call `overwritten` next."""
        slots, self._uncovered = self._uncovered, []
        self._overwritten.update(slots)
        return slots

    def overwritten(self, slots: Sequence[int]) -> None:
        """Free these slots, which are overwritten."""
        self._overwritten.difference_update(slots)
        self._reuse(slots)
        if keeper := self.share.keeper:
            keeper.forget_erased()

    def next_victims(self, count: int) -> list[int]:
        """Slots that are free, and those of the ``count`` chunks that would be evicted next."""
        victims = self.index.select_victims(count, lambda key: 1, (), self._pinned)
        return self._free + self.index.resident.places(victims)

    def drop(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Never find these chunks again. Returns those whose slots are free now; others are when no longer in use."""
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


def _leave_out_empty(chunks_of: dict[str, Any], tenants: Iterable[str]) -> None:
    for tenant in tenants:
        if not chunks_of[tenant]:
            del chunks_of[tenant]
