"""An arena: numbered slots in memory that the engine's device reaches, and the chunks in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import AllocatorBackend
from kvtier_core.residents import Residents
from kvtier_core.types import ChunkKey, Slot, Usage


class Arena:
    """A slot is free, reserved (being filled), or holds a READY chunk; a READY chunk may be pinned.

    A chunk can be doomed while somebody still fills or reads its slot: it is no longer found, and the
    slot is free once the last of them is done.
    """

    def __init__(self, name: str, number: int, memory: AllocatorBackend, residents: Residents):
        self.name = name
        self.number = number
        self.memory = memory
        self.residents = residents
        self._free = list(range(memory.slots - 1, -1, -1))
        self._reserved: dict[ChunkKey, int] = {}
        self._ready: dict[ChunkKey, int] = {}
        self._pins: dict[int, Counter[str]] = {}  # who holds a slot, and how often
        self._doomed: dict[int, ChunkKey] = {}

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def reserved(self) -> int:
        """Slots that are being filled."""
        return len(self._reserved)

    @property
    def pins(self) -> int:
        return self.holders().total()

    def holders(self) -> Counter[str]:
        """Who has pins, and how many."""
        return sum(self._pins.values(), Counter())

    def usage(self) -> Usage:
        capacity = self.memory.slots * self.memory.slot_nbytes
        return Usage(self.name, len(self.residents), self.residents.used, capacity, pins=self.pins)

    def has(self, key: ChunkKey) -> bool:
        """Is the chunk READY here?"""
        return key in self._ready and self._ready[key] not in self._doomed

    def expects(self, key: ChunkKey) -> bool:
        """Is the chunk being filled here?"""
        return key in self._reserved and self._reserved[key] not in self._doomed

    def taken(self, key: ChunkKey) -> bool:
        """Does any slot bear this key, findable or not?"""
        return key in self._ready or key in self._reserved

    def view(self, key: ChunkKey) -> memoryview:
        return self.memory.view(self.slot(key).index)

    def slot(self, key: ChunkKey) -> Slot:
        return Slot(self.number, self._ready[key] if key in self._ready else self._reserved[key])

    def make_room(self, slots: int, spare: Callable[[ChunkKey], bool] = lambda key: False) -> list[ChunkKey]:
        """Evict until ``slots`` are free, or nobody may leave; the evicted keys. Spares the pinned and ``spare``."""
        victims = self.residents.choose(
            slots - len(self._free), weigh=lambda key: 1, may_leave=lambda key: self._may_leave(key, spare)
        )
        for key in victims:
            self._release(key, evicted=True)
        return victims

    def trade(
        self, newcomers: Sequence[ChunkKey], spare: Callable[[ChunkKey], bool] = lambda key: False
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Make room for those of a path, root first, that are preferred to their victims; they, and the evicted."""
        welcome, victims = self.residents.trade(
            newcomers, 1, len(self._free), weigh=lambda key: 1, may_leave=lambda key: self._may_leave(key, spare)
        )
        for key in victims:
            self._release(key, evicted=True)
        return welcome, victims

    def _may_leave(self, key: ChunkKey, spare: Callable[[ChunkKey], bool]) -> bool:
        return self._ready[key] not in self._pins and not spare(key)

    def reserve(self, keys: Sequence[ChunkKey]) -> None:
        """Take free slots for keys that have none."""
        if len(keys) > len(self._free) or len(set(keys)) < len(keys) or any(self.taken(key) for key in keys):
            raise ContractError(f"{self.name}: reserve needs {len(keys)} free slots and keys that have none")
        for key in keys:
            self._reserved[key] = self._free.pop()

    def commit(self, key: ChunkKey, parent: ChunkKey | None) -> bool:
        """The slot is filled. False if the chunk is not kept, for it was doomed."""
        self._must_be_reserved(key)
        if not self.expects(key):
            self.abort(key)
            return False
        self.residents.admit(key, parent, self.memory.slot_nbytes)
        self._ready[key] = self._reserved.pop(key)
        return True

    def abort(self, key: ChunkKey) -> None:
        """The slot will not be filled."""
        self._must_be_reserved(key)
        slot = self._reserved.pop(key)
        self._doomed.pop(slot, None)
        self._free.append(slot)

    def pin(self, key: ChunkKey, owner: str) -> Slot:
        if not self.has(key):
            raise ContractError(f"{self.name}: pin of a chunk that is not READY")
        slot = self.slot(key)
        self._pins.setdefault(slot.index, Counter())[owner] += 1
        return slot

    def unpin(self, slot: Slot, owner: str) -> None:
        held = self._pins.get(slot.index, Counter())
        if not held[owner]:
            raise ContractError(f"{self.name}: unpin of slot {slot.index}, which {owner} has not pinned")
        held[owner] -= 1
        if not +held:
            del self._pins[slot.index]
            if slot.index in self._doomed:
                self._release(self._doomed[slot.index], evicted=False)

    def clear(self) -> None:
        """Never find any of these chunks again; a slot in use is free as soon as nobody uses it."""
        for key in [*self._ready, *self._reserved]:
            slot = self.slot(key).index
            if key in self._reserved or slot in self._pins:
                self._doomed[slot] = key
            else:
                self._release(key, evicted=False)

    def _release(self, key: ChunkKey, *, evicted: bool) -> None:
        slot = self._ready.pop(key)
        self._doomed.pop(slot, None)
        self._free.append(slot)
        self.residents.remove(key, evicted=evicted)

    def _must_be_reserved(self, key: ChunkKey) -> None:
        if key not in self._reserved:
            raise ContractError(f"{self.name}: this chunk was not reserved, or was committed or aborted before")
