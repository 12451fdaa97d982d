"""Writes chunks from the hottest arena to the tiers below: a frame is sealed once, then written to each tier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvtier_core.frames.format import seal_part
from kvtier_core.frames.identity import codec_of_slots, namespace_of_slots
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.admission import AdmissionPlan, Level
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.store_tier.writes import FrameWrite
from kvtier_core.types import ChunkKey, Event, EventKind, Namespace, Slot
from kvtier_core.work.io_pool import Outcome, Pool

#: Bytes of the slots that one job seals.
_SEAL_NBYTES = 16 << 20
#: The holder of a slot while its header is written.
_SEALER = "sealing"

#: ``make_room(arena, slots, path)`` frees up to this many slots for chunks of a path.
MakeRoom = Callable[[Arena, int, Sequence[ChunkKey]], None]


@attrs.define(eq=False)
class WriteThrough:
    """Call every method on the owner's thread; only `_seal` runs on another."""

    _hot: Arena
    _levels: Sequence[Level]  # the first one is the hottest arena; others may still come
    namespace: Namespace  #: of the frames that are sealed from now on
    _layout: ChunkLayout
    _pool: Pool
    _make_room: MakeRoom
    _report: Callable[[Event], None]
    _sealing: set[ChunkKey] = attrs.field(factory=set, init=False)

    def plan(self, path: Sequence[ChunkKey], salt: bytes, *, memory_only: bool = False) -> AdmissionPlan:
        """The chunks of a path that each tier below would take now, or that peers may see. ``salt``: the request's."""
        salts = dict.fromkeys(path, salt) if salt else {}
        if memory_only:
            return AdmissionPlan(salts=salts)
        sealed = self._hot.sealed
        shown = [key for key in path if key not in sealed] if sealed is not None else ()
        return AdmissionPlan(self._levels[1:], path, salts, shown)

    def offer_again(self, path: Sequence[ChunkKey], salt: bytes) -> None:
        """Write the READY chunks of a path that a tier below lacks and would take now."""
        if len(self._levels) > 1:
            held = self._hot.exact([*path, *self._hot.index.other_parts(path)])
            held = [key for key in held if key not in self._sealing]
            self.begin(held, {}, self.plan(held, salt))

    def begin(
        self,
        keys: Sequence[ChunkKey],
        checksums: Mapping[ChunkKey, Sequence[int]],
        plan: AdmissionPlan,
    ) -> None:
        """Seal READY chunks that are not being sealed, then write them to the tiers that ``plan`` names for each.

        ``checksums`` are those of `Stack.commit`.
        """
        sealed = [key for key in keys if key in plan.sealed]
        per_group = max(1, _SEAL_NBYTES // self._hot.memory.slot_nbytes)
        for start in range(0, len(sealed), per_group):
            group = sealed[start : start + per_group]
            slots = self._hot.pin(group, _SEALER)
            work = [(key, self._hot.view(key), checksums.get(key, ())) for key in group]
            self._sealing.update(group)
            self._pool.submit_store(
                functools.partial(self._seal, work, self.namespace),
                functools.partial(self._sealed, group, slots, plan),
            )

    def write(self, keys: Sequence[ChunkKey], plan: AdmissionPlan) -> None:
        """Write sealed chunks to the tiers that ``plan`` names for each. Every write has its own pin.

        Chunks that passed through a lossy codec are not written anywhere: readers would mistake them for exact ones.
        """
        for level in self._levels[1:]:
            admitted = plan.keys_for(level, self._hot.exact(keys))
            if not admitted:
                continue
            if isinstance(level, Arena):
                self._copy(admitted, level, plan.salts)
            else:
                self._write(admitted, level, plan.salts)

    def _seal(self, work: Sequence[tuple[ChunkKey, memoryview, Sequence[int]]], namespace: Namespace) -> None:
        """Write headers and checksums, on a thread of the pool."""
        namespace = namespace_of_slots(namespace, self._layout)
        for key, view, checksums in work:
            part = self._layout.part_of(key)
            seal_part(view, namespace, key, part, checksums, codec=codec_of_slots(self._layout))

    def _sealed(self, keys: Sequence[ChunkKey], slots: Sequence[Slot], plan: AdmissionPlan, outcome: Outcome) -> None:
        self._sealing.difference_update(keys)
        if outcome.error is None:
            self._hot.show(keys, self._layout)
            self.write(keys, plan)
        else:
            self._report(Event(EventKind.IO_ERROR, self._hot.name, tuple(keys), 0, str(outcome.error)))
        self._hot.unpin(slots, _SEALER)

    def _write(self, keys: Sequence[ChunkKey], tier: StoreTier, salts: Mapping[ChunkKey, bytes]) -> None:
        pins = dict(zip(keys, self._hot.pin(keys, tier.name), strict=True))
        tier.write(
            [FrameWrite(key, self._parent(key), self._hot.view(key), salts.get(key, b"")) for key in keys],
            lambda released: self._hot.unpin([pins[key] for key in released], tier.name),
        )

    def _parent(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk without which this chunk, or this part of a chunk, is useless."""
        chunk = self._hot.index.chunk_of(key)
        return self._hot.index.resident.parent(key) if chunk == key else chunk

    def _copy(self, keys: Sequence[ChunkKey], arena: Arena, salts: Mapping[ChunkKey, bytes]) -> None:
        """Copy chunks from the hottest arena to another one."""
        keys = arena.without_slot(keys)
        self._make_room(arena, len(keys), keys)
        keys = keys[: arena.free]
        if not keys:
            return
        arena.reserve(keys, salts)
        slots = self._hot.pin(keys, arena.name)
        copies = [(arena.view(key), self._hot.view(key)) for key in keys]
        parents = [self._hot.index.resident.parent(key) for key in keys]

        def copy() -> None:
            for into, source in copies:
                into[:] = source

        def copied(outcome: Outcome) -> None:
            self._hot.unpin(slots, arena.name)
            if outcome.error is not None:
                arena.abort(keys)
                self._report(Event(EventKind.IO_ERROR, arena.name, tuple(keys), 0, str(outcome.error)))
            elif kept := arena.commit(keys, parents):
                nbytes = self._layout.payloads_nbytes(kept)
                self._report(Event(EventKind.WRITTEN, arena.name, tuple(kept), nbytes))

        self._pool.submit_store(copy, copied)
