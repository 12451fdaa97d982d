"""An arena: numbered slots in memory that the engine's device can reach, and the chunks in them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import AllocatorBackend
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import ChunkKey, Slot, Usage


class Arena:
    """A slot is free, reserved (being filled), or holds a READY chunk. A READY chunk may be pinned by several holders.

    A chunk can be invalidated while its slot is being filled or read: it is no longer found, and the slot becomes free
    when its last user is done.
    """

    def __init__(self, name: str, number: int, memory: AllocatorBackend, index: CacheIndex):
        self.name = name
        self.number = number
        self.memory = memory
        self.index = index
        self._free = list(range(memory.slots - 1, -1, -1))
        self._reserved: dict[ChunkKey, int] = {}
        self._pinned: Counter[int] = Counter()  # number of pins of each slot
        self._pins: dict[str, Counter[int]] = {}  # the same, for each holder
        self._invalidated: dict[int, ChunkKey] = {}
        self._settled: list[ChunkKey] = []  # no longer reserved
        self._inexact: set[ChunkKey] = set()  # READY, but not bit for bit as an engine computed them
        #: Sealed frames of READY chunks, for any thread to read (`OpenContext.sealed`). None: only some are.
        self.sealed: dict[ChunkKey, memoryview] | None = None
        self.copied: deque[ChunkKey] = deque()  #: the same as `OpenContext.copied`

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.memory.slots

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def reserved(self) -> int:
        """Number of slots that are being filled."""
        return len(self._reserved)

    @property
    def pinned(self) -> Container[int]:
        """The slots that are pinned."""
        return self._pinned

    @property
    def pins(self) -> int:
        """Number of pins of all holders."""
        return self._pinned.total()

    @property
    def holders(self) -> Collection[str]:
        """All holders of pins."""
        return self._pins.keys()

    def pins_by_holder(self) -> Counter[str]:
        """Number of pins of each holder."""
        return Counter({holder: slots.total() for holder, slots in self._pins.items()})

    def usage(self) -> Usage:
        """The arena's current usage."""
        capacity = self.capacity * self.memory.slot_nbytes
        return Usage(self.name, len(self.index), self.index.resident.used, capacity, pins=self.pins)

    # -- what is here ------------------------------------------------------------------------------

    def has(self, key: ChunkKey) -> bool:
        """Is the chunk READY here?"""
        return key in self.index and not (self._invalidated and self.index.resident.place(key) in self._invalidated)

    def exact(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys that are READY here, bit for bit as an engine computed them. Only these may be written elsewhere."""
        if self._invalidated or self._inexact:
            return [key for key in keys if self.has(key) and key not in self._inexact]
        resident = self.index.resident
        return [key for key in keys if key in resident]

    def exact_run(self, keys: Sequence[ChunkKey]) -> int:
        """Number of leading chunks that are bit for bit as an engine computed them."""
        if not self._inexact:
            return len(keys)
        return next((i for i, key in enumerate(keys) if key in self._inexact), len(keys))

    def ready_run(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Length of the run of READY chunks of a path from ``start`` on."""
        run = self.index.resident.run(keys, start)
        if not self._invalidated:
            return run
        places = self.index.resident.places(keys[start : start + run])
        return next((i for i, place in enumerate(places) if place in self._invalidated), run)

    def is_reserved(self, key: ChunkKey) -> bool:
        """Is the chunk being filled here, and will it be READY once committed?"""
        return key in self._reserved and self._reserved[key] not in self._invalidated

    def arrives(self, key: ChunkKey) -> bool:
        """Is it worth waiting for this chunk, which is being filled here?"""
        return self.is_reserved(key)

    def has_slot(self, key: ChunkKey) -> bool:
        """Does this key have a slot, even an invalidated one that is still in use?"""
        return key in self._reserved or key in self.index

    def without_slot(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys that have no slot."""
        return [key for key in self.index.resident.missing(keys) if key not in self._reserved]

    def view(self, key: ChunkKey) -> memoryview:
        """The slot of a reserved or resident key."""
        return self.memory.view(self._place(key))

    def slots(self, keys: Sequence[ChunkKey]) -> list[Slot]:
        """The slots of reserved or resident keys."""
        return [Slot(self.number, self._place(key)) for key in keys]

    def _place(self, key: ChunkKey) -> int:
        return self._reserved[key] if key in self._reserved else self.index.resident.place(key)

    # -- room --------------------------------------------------------------------------------------

    def could_free(self, slots: int, spared: Sequence[Container[ChunkKey]] = (), pinned: Container[int] = ()) -> int:
        """How many of ``slots`` slots could be free once all are filled and no others than these are ``pinned``.

        Chunks in any of the ``spared`` stay. Evicts nothing.
        """
        if (lacking := slots - self.free - self.reserved) <= 0:
            return slots
        return slots - max(0, lacking - len(self.index.select_victims(lacking, lambda key: 1, spared, pinned)))

    def make_room(self, slots: int, spared: Sequence[Container[ChunkKey]] = ()) -> list[ChunkKey]:
        """Evict unpinned chunks until ``slots`` are free or no victim is left; returns the evicted keys."""
        victims = self.index.select_victims(slots - len(self._free), lambda key: 1, spared, self._pinned)
        self._release(victims, evicted=True)
        return victims

    def admit(
        self,
        newcomers: Sequence[ChunkKey],
        spared: Sequence[Container[ChunkKey]] = (),
        salt: bytes = b"",
        *,
        promised: bool = False,
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Make room for the leading newcomers of a path that the policy admits; returns them and the evicted keys.

        The newcomers have no slots yet. ``salt`` is that of their request. The policy admits them all if they are
        ``promised``.
        """
        admitted, victims = self._plan_admission(newcomers, spared, promised=promised)
        self._release(victims, evicted=True)
        return admitted, victims

    def would_admit(self, path: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The chunks of a path, root first, that have no slot and are preferred to the victims they would need.

        The other parts of these chunks, and of chunks that are already here, follow.
        """
        return self.index.with_their_parts(
            self.without_slot(path), lambda chunks: self._plan_admission(chunks, [set(path)])[0]
        )

    def _plan_admission(
        self, newcomers: Sequence[ChunkKey], spared: Sequence[Container[ChunkKey]], *, promised: bool = False
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        frequent = newcomers if promised else self.index.meets_frequency(newcomers)
        room = len(self._free)
        return self.index.plan_admission(frequent, 1, room, lambda key: 1, spared, self._pinned, promised=promised)

    # -- slots -------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[ChunkKey], salts: Mapping[ChunkKey, bytes] | None = None) -> None:
        """Take free slots for keys that have none. ``salts`` are those of keys whose requests have one."""
        if len(keys) > len(self._free) or len(set(keys)) < len(keys) or len(self.without_slot(keys)) < len(keys):
            raise ContractError(f"{self.name}: reserve needs {len(keys)} free slots and keys that have none")
        self._reserved.update((key, self._free.pop()) for key in keys)

    def commit(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], *, exact: bool = True
    ) -> list[ChunkKey]:
        """The slots of a path, root first, are filled. Returns the chunks that are now READY: all but invalidated ones.

        ``exact`` is False if the chunks passed through a lossy codec.
        """
        self._must_be_reserved(keys)
        if self._invalidated:
            self.abort([key for key in keys if not self.is_reserved(key)])
            pairs = [(key, parent) for key, parent in zip(keys, parents, strict=True) if key in self._reserved]
            keys, parents = [key for key, _ in pairs], [parent for _, parent in pairs]
        places = [self._reserved.pop(key) for key in keys]
        self.index.admit(keys, parents, self.memory.slot_nbytes, places)
        self._settled += keys
        if not exact:
            self._inexact.update(keys)
        return list(keys)

    def abort(self, keys: Collection[ChunkKey]) -> None:
        """Free the reserved slots of these keys."""
        self._must_be_reserved(keys)
        self._freed([self._reserved.pop(key) for key in keys])
        self._settled += keys

    def take_settled(self) -> list[ChunkKey]:
        """The chunks whose slots were committed or aborted since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def pin(self, keys: Sequence[ChunkKey], holder: str) -> list[Slot]:
        """Pin chunks to their slots. Raises ContractError, and pins none, if any is not READY."""
        if self.ready_run(keys) < len(keys):
            raise ContractError(f"{self.name}: pin of a chunk that is not READY")
        places = self.index.resident.places(keys)
        if places:  # a holder without pins is never released
            self._pinned.update(places)
            self._pins.setdefault(holder, Counter()).update(places)
        return [Slot(self.number, place) for place in places]

    def unpin(self, slots: Sequence[Slot], holder: str) -> None:
        """Remove one pin from each slot. Raises ContractError for a slot that this holder has not pinned."""
        own, places = self._pins.get(holder, Counter()), [place for _, place in slots]
        if any(own[place] < count for place, count in Counter(places).items()):
            raise ContractError(f"{self.name}: unpin of a slot that {holder} has not pinned")
        _count_down(own, places)
        _count_down(self._pinned, places)
        left = dict.fromkeys(places) if self._invalidated else ()
        if unused := [place for place in left if place in self._invalidated and place not in self._pinned]:
            self._release([self._invalidated[place] for place in unused], evicted=False)
        if not own:
            self._pins.pop(holder, None)

    def show(self, keys: Sequence[ChunkKey], layout: ChunkLayout) -> None:
        """The slots of these keys hold sealed frames: add the READY ones to `sealed`."""
        if self.sealed is not None:
            for key in self.exact(keys):
                self.sealed[key] = self.view(key)[: layout.part_of(key).frame_nbytes]

    def hide(self, keys: Iterable[ChunkKey]) -> None:
        """Remove the frames of these keys from `sealed`, before their slots are used again."""
        if self.sealed:
            for key in keys:
                self.sealed.pop(key, None)

    def invalidate_all(self) -> None:
        """Never find any of these chunks again. A slot in use becomes free when its last user is done."""
        self.hide(self.index.resident)
        self._invalidated.update((slot, key) for key, slot in self._reserved.items())
        resident = self.index.resident
        in_use = {key: resident.place(key) for key in resident if resident.place(key) in self._pinned}
        self._invalidated.update((place, key) for key, place in in_use.items())
        self._release([key for key in resident if key not in in_use], evicted=False)

    def _release(self, keys: Sequence[ChunkKey], *, evicted: bool) -> None:
        self.hide(keys)
        places = self.index.remove(keys, evicted=evicted)
        self._inexact.difference_update(keys)
        self._freed(places)

    def _freed(self, places: Sequence[int]) -> None:
        for place in places if self._invalidated else ():
            self._invalidated.pop(place, None)
        self._reuse(places)

    def _reuse(self, places: Sequence[int]) -> None:
        self._free += places

    def _must_be_reserved(self, keys: Collection[ChunkKey]) -> None:
        if len(set(keys)) < len(keys) or not self._reserved.keys() >= set(keys):
            raise ContractError(f"{self.name}: this chunk was not reserved, or was committed or aborted before")


def _count_down(counts: Counter[int], places: Sequence[int]) -> None:
    for place in places:
        if counts[place] > 1:
            counts[place] -= 1
        else:
            dict.__delitem__(counts, place)  # Counter's own is Python, and takes a third of the time of an unpin
