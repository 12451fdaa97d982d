"""The ordered stack: arenas that the engine loads from, and the store tiers below them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import Medium, SupportsNamespaces
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import printable
from kvtier_core.stack.admission import AdmissionPlan, Level, Reservation
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.interface import Hints, Later, Stack
from kvtier_core.stack.lookup.boundaries import BoundarySearch
from kvtier_core.stack.lookup.chain import ChainSearch
from kvtier_core.stack.lookup.leases import Leases
from kvtier_core.stack.outcomes import ANY, Lookup, Terms, Whereabouts
from kvtier_core.stack.promotion import Promotions
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import WriteThrough
from kvtier_core.types import (
    KEY_NBYTES,
    ChunkKey,
    Event,
    EventKind,
    FrameRead,
    Namespace,
    ReadStatus,
    Slot,
    StoredFrame,
    Usage,
    size,
)
from kvtier_core.work.io_pool import Pool, run


class Holds(NamedTuple):
    """Flags for what one holder has in a stack; all False if it has nothing."""

    looked_up: bool
    reserved: bool
    self_test_slots: bool


def in_words(facts: Mapping[str, str]) -> Iterator[str]:
    """The facts of a tier for people: ``huge pages off`` for ``huge_pages: auto -> off``."""
    for name, fact in facts.items():
        asked, _, effective = fact.partition(" -> ")
        yield f"{name.replace('_', ' ')} {effective if asked in ('auto', effective) else fact}"


class StorageManager(Stack):
    """The stack in this process. Only `drain` and `close` wait.

    ``levels`` are hottest first and begin with an arena. Engines store into that one, and chunks of store tiers are
    promoted to it; chunks in other arenas are loaded from where they are.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        namespace: Namespace,
        layout: ChunkLayout,
        pool: Pool,
        media: Mapping[str, Medium] | None = None,
        chosen: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ):
        """``media`` and ``chosen``, words for the log, are by tier name, for tiers that open ``later`` too; ``clock``
        returns seconds.
        """
        self._levels = list(levels)
        self.arenas: Sequence[Arena] = [level for level in levels if isinstance(level, Arena)]
        self.tiers = [level for level in levels if isinstance(level, StoreTier)]
        if not self.arenas or self._levels[0] is not self.arenas[0]:
            raise ContractError("a stack must begin with an arena")
        self._hot = self.arenas[0]
        self._layout = layout
        self._pool = pool  # seals frames, and copies them from arena to arena
        self.media = dict(media or {level.name: Medium.UNSPECIFIED for level in levels})
        self._chosen = chosen or {}
        self.shared = [tier.name for tier in self.tiers if tier.backend.shared]
        self._clock = clock
        self.later = later
        self._events: list[Event] = []
        self._write_through = WriteThrough(
            self._hot,
            self._levels,
            namespace=namespace,
            layout=layout,
            pool=pool,
            make_room=self._make_room,
            report=lambda event: self._events.append(event),
        )
        self._leases = Leases(self.arenas, self.tiers, unawaited=lambda keys: self._promotions.forget(keys))
        self._promotions = Promotions(
            self.arenas, self.tiers, self._leases, make_room=self._make_room, arrived=self._promoted
        )
        self._reservations: dict[str, Reservation] = {}  # by holder
        search = BoundarySearch if len(layout.parts) > 1 else ChainSearch
        self._search = search(self.arenas, self.tiers, self._promotions, self._leases, layout)
        self._self_test_keys: dict[str, list[ChunkKey]] = {}  # by holder
        self._closed = False

    # -- requests ----------------------------------------------------------------------------------

    def on_request(
        self, path: Sequence[ChunkKey], hints: Hints = None, salt: bytes = b"", memory_only: bool = False
    ) -> None:
        self._layout.check_path(path)
        now, hints = self._clock(), hints or {}
        for arena in self.arenas:
            arena.index.request(path, now, hints)
        for tier in self.tiers:
            tier.request(leading_run(path, tier.holds) if memory_only else path, now, hints)
        if not memory_only:
            self._write_through.offer_again(path, salt)

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms = ANY) -> Lookup:
        self._layout.check_path(path)
        return self._search.lookup(path, holder, terms)

    def prefetch(self, path: Sequence[ChunkKey], terms: Terms = ANY) -> None:
        self._layout.check_path(path)
        self._search.prefetch(path, terms)

    def still_pending(self, holder: str) -> bool:
        return self._leases.still_pending(holder)

    def ask_again(self, path: Sequence[ChunkKey]) -> str:
        asked = [tier.name for tier in self.tiers if tier.remote.ask_again(path)]
        return asked[0] if asked else ""

    def load_begins(self, frames: Sequence[StoredFrame], holder: str) -> None:
        held = self._leases.frames(holder)
        if len({frame.key for frame in frames}) < len(frames) or any(held.get(each.key) != each for each in frames):
            raise ContractError("a frame is named twice, or was not found for this holder")
        if any(tier.direct_reads.reading(holder) for tier in self.tiers):
            raise ContractError(f"a load of {holder} is in progress")
        for tier in self.tiers:
            tier.direct_reads.begin([frame.key for frame in frames if frame.tier == tier.name], holder)

    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        reading = {tier: tier.direct_reads.reading(holder) for tier in self.tiers}
        if not unread.keys() <= set(chain.from_iterable(reading.values())):
            raise ContractError(f"a frame was not being read for {holder}")
        if any(read.status is ReadStatus.VERIFIED for read in unread.values()):
            raise ContractError("a verified frame cannot be unread")
        for tier, keys in reading.items():
            tier.direct_reads.end(holder, {key: unread[key] for key in keys if key in unread}, ok=ok)

    def stop_direct_reads(self, tier: str, why: str) -> None:
        self.store_tier(tier).not_direct = why
        self.release_frames(tier)

    def store_tier(self, name: str) -> StoreTier:
        """A store tier by its name. Raises ContractError if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise ContractError(f"no store tier {name}")

    def release_frames(self, tier: str, holders: Collection[str] | None = None) -> None:
        """Release the holders, by default all, that hold frames of a tier: their workers cannot read it directly."""
        self._leases.release_frames(tier, holders)

    def release(self, holder: str) -> None:
        self._leases.release(holder)
        self.abort(holder)
        if keys := self._self_test_keys.pop(holder, None):
            for arena in self.arenas:
                arena.abort(keys)

    def holds(self, holder: str) -> Holds:
        """Flags for what the holder has, until it is released."""
        return Holds(holder in self._leases, holder in self._reservations, holder in self._self_test_keys)

    # -- stores ------------------------------------------------------------------------------------

    def reserve(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        salt: bytes = b"",
        parts: Sequence[ChunkKey] = (),
        promised_to: str = "",
        memory_only: bool = False,
    ) -> dict[ChunkKey, Slot]:
        """Chunks that a tier below admits get a slot in the hottest arena whether or not its own policy agrees."""
        self._layout.check_path(path, parts)
        absent, parts = self.without_slot(path), self.without_slot(parts)
        plan = self._write_through.plan([*absent, *parts], salt, memory_only=memory_only)
        passing = leading_run(absent, plan.keys.__contains__)
        self._make_room(self._hot, len(passing), path)
        reserved = passing[: self._hot.free]
        self._hot.reserve(reserved, plan.salts)
        if len(reserved) == len(passing):
            newcomers = absent[len(passing) :]
            admitted, evicted = self._hot.admit(newcomers, [set(path)], salt, promised=bool(promised_to))
            self.evicted(self._hot, evicted)
            self._hot.reserve(admitted, plan.salts)
            reserved += admitted
        parents = dict(zip(path, (None, *path), strict=False))
        if parts:
            reserved += self._reserve_parts(parts, path, plan.salts)
        if promised_to:
            self._leases.promise(reserved, promised_to)
        if reserved:
            reservation = self._reservations.setdefault(holder, Reservation(self._clock()))
            reservation.add({key: parents.get(key) for key in reserved}, plan)
        return dict(zip(reserved, self._hot.slots(reserved), strict=True))

    def _reserve_parts(
        self, parts: Sequence[ChunkKey], path: Sequence[ChunkKey], salts: Mapping[ChunkKey, bytes]
    ) -> list[ChunkKey]:
        """Reserve slots for parts whose chunks have one: for all of them or none."""
        parts = [part for part in parts if self._hot.has_slot(self._hot.index.chunk_of(part))]
        self._make_room(self._hot, len(parts), path)
        if len(parts) > self._hot.free:
            return []
        self._hot.reserve(parts, salts)
        return parts

    def without_slot(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of the keys that have no slot in any arena."""
        absent = list(keys)
        for arena in self.arenas:
            absent = arena.without_slot(absent)
        return absent

    def commit(
        self, holder: str, checksums: Mapping[ChunkKey, Sequence[int]] | None = None, empty: Collection[ChunkKey] = ()
    ) -> None:
        if holder not in self._reservations:
            raise ContractError(f"{holder} has reserved nothing")
        reservation, checksums = self._reservations[holder], checksums or {}
        reservation.check_own(empty)
        reservation.check_own(checksums)
        self._check_checksums(checksums.values())
        del self._reservations[holder]
        self._hot.abort(empty)
        if empty:
            why = "it, or one before it, exceeds its slot when packed" if self.packed else "its slot was not filled"
            self._report(EventKind.REJECTED, self._hot, list(empty), why=why)
        filled = dict(reservation.parents)
        for key in empty:
            del filled[key]
        kept = self._hot.commit(list(filled), list(filled.values()))
        self._leases.keep_promises(kept)
        if kept:
            self._report(EventKind.STORED, self._hot, kept, seconds=self._clock() - reservation.since)
            self._write_through.begin(kept, checksums, reservation.plan)

    def _check_checksums(self, checksums: Iterable[Sequence[int]]) -> None:
        if any(len(each) != self._layout.shards for each in checksums):
            raise ContractError(f"expected {self._layout.shards} checksums per chunk, one for each shard")
        if not all(0 <= checksum < 1 << 32 for checksum in chain.from_iterable(checksums)):
            raise ContractError("expected 32-bit checksums")

    def abort(self, holder: str) -> None:
        """Free what the holder has reserved. What it looked up stays pinned."""
        if reservation := self._reservations.pop(holder, None):
            self._hot.abort(list(reservation.parents))

    def copied(self) -> list[ChunkKey]:
        copied = self._hot.copied
        return [copied.popleft() for _ in range(len(copied))]

    # -- self-test ---------------------------------------------------------------------------------

    def reserve_self_test_slots(self, holder: str, count: int = 1) -> list[Slot]:
        if not 0 < count <= self._layout.self_test_slots or len(self._self_test_keys.get(holder, "")) not in (0, count):
            raise ContractError(f"{count} are not the slots of a self-test of these chunks")
        if holder not in self._self_test_keys:
            for arena in self.arenas:
                self._make_room(arena, count, ())
            if any(arena.free < count for arena in self.arenas):
                return []
            self._self_test_keys[holder] = [ChunkKey(secrets.token_bytes(KEY_NBYTES)) for _ in range(count)]
            for arena in self.arenas:
                arena.reserve(self._self_test_keys[holder])
        return [slot for arena in self.arenas for slot in arena.slots(self._self_test_keys[holder])]

    # -- time passes -------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        for pool in self._pools():
            pool.step()
        self._promotions.start()
        if self.later and (opened := self.later.step()):
            self._add(opened)
        for arena in self.arenas:
            self._leases.wake(arena.take_settled())
        for tier in self.tiers:
            tier.poll()
            self._events += tier.events
            tier.events.clear()
        events, self._events = self._events, []
        return events

    def drain(self, timeout: float) -> list[Event]:
        deadline = time.monotonic() + timeout
        events = self.step()
        while busy := [pool for pool in self._pools() if pool.jobs]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            busy[0].wait(min(left, 0.1))
            events += self.step()
        return events

    def invalidate_all(self, namespace: Namespace) -> None:
        self._write_through.namespace = namespace
        if self.later:
            self.later.namespace = namespace
        for arena in self.arenas:
            arena.invalidate_all()
        for tier in self.tiers:
            tier.invalidate_all(namespace)
        self._leases.invalidate_all()
        self._promotions.forget_requests()

    def close(self, timeout: float = 5.0) -> list[Event]:
        """Waits for a hanging store no longer than ``timeout``, plus one second per tier."""
        if self._closed:
            return []
        self._closed = True
        deadline = time.monotonic() + timeout
        try:
            return self.drain(timeout)
        finally:
            if self.close_tiers(deadline):
                self.close_arenas()

    def close_tiers(self, deadline: float) -> bool:
        """End the threads and close the store tiers, by ``deadline`` or one second each. Any thread may call it.

        False if a thread still runs: it may write to a slot, so the memory is kept until the process ends.
        """

        def left() -> float:
            return max(1.0, deadline - time.monotonic())

        if self.later:
            self.later.close(left())
        idle = self._pool.close(left())
        for tier in self.tiers:
            idle = tier.close(left()) and idle
        return idle

    def close_arenas(self) -> None:
        """Give up the memory, which no thread of the stack uses any more."""
        for arena in self.arenas:
            if arena.sealed:
                arena.sealed.clear()  # peers that copy from it check this afterwards
            arena.memory.close()

    def overwrite(self, views: Sequence[memoryview], then: Callable[[], None]) -> None:
        """Fill unused slots with zeros, on a thread; ``then`` is called in a later step."""

        def zero() -> None:
            for view in views:
                view[:] = bytes(len(view))

        self._pool.submit_store(zero, lambda outcome: then())

    # -- information -------------------------------------------------------------------------------

    @property
    def jobs(self) -> int:
        return sum(pool.jobs for pool in self._pools())

    @property
    def promoting(self) -> int:
        """Number of chunks on their way into the hottest arena from a store."""
        return self._promotions.under_way

    @property
    def attachment(self) -> int:
        return 0

    @property
    def packed(self) -> bool:
        return self._layout.packed

    @property
    def handles(self) -> dict[str, str]:
        return {arena.name: arena.memory.handle for arena in self.arenas}

    @property
    def reader_handles(self) -> dict[str, str]:
        return {tier.name: tier.reader_handle for tier in self.tiers if tier.is_direct()}

    def describe(self, not_direct: Mapping[str, str] | None = None) -> list[str]:
        """``not_direct``: the tiers that an engine's workers cannot read directly, and why."""
        lines = []
        for level in self._levels:
            facts = (level.memory if isinstance(level, Arena) else level.backend).facts()
            usage = level.usage()
            if level.name in self.shared:
                words = ["shared with other engines"]  # whose frames this engine does not count
            elif isinstance(level, Arena) and len(self._layout.parts) == 1:
                words = [f"{size(usage.capacity)}, room for {level.capacity} chunks, {usage.chunks} held"]
            else:
                words = [f"{size(usage.capacity)}, {usage.chunks} chunks held"]
            words += filter(None, [self._chosen.get(level.name)])
            if isinstance(level, StoreTier) and not level.lossless:
                words.append("lossy: answers may differ")
            if isinstance(level, StoreTier) and level.reader_handle:
                why = level.not_direct or (not_direct or {}).get(level.name)
                words.append(f"workers read it: {f'no, {why}' if why else 'if they can'}")
            if isinstance(level, Arena) and self.packed:
                words.append("packing on")
            lines.append(f"{level.name}: {'; '.join([*words, *in_words(facts)])}")
        return lines

    def usage(self) -> list[Usage]:
        return [level.usage() for level in self._levels]

    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        return [self._search.whereabouts(key) for key in path]

    def pins_by_holder(self) -> Counter[str]:
        return sum((arena.pins_by_holder() for arena in self.arenas), Counter())

    def why_cold(self) -> str:
        if any(len(tier.index) for tier in self.tiers):
            return ""
        others = [
            (len(differences), tier.name, differences)
            for tier in self.tiers
            if isinstance(tier.backend, SupportsNamespaces)
            for other in run(partial(_namespaces, tier.backend)).value or ()
            if (differences := tier.namespace.differences(other))
        ]
        if not others:
            return ""
        count, tier, differences = min(others)
        name, here, there = map(printable, differences[0])
        more = f", and {count - 1} more facts differ" if count > 1 else ""
        return f"{tier} holds another namespace: {name} was {there or 'not there'}, is {here or 'not there'}{more}"

    # -- inside ------------------------------------------------------------------------------------

    def _add(self, tier: StoreTier) -> None:
        """A tier was opened later: it takes its place in the stack."""
        order = list(self.media).index
        self._levels.append(tier)
        self._levels.sort(key=lambda level: order(level.name))
        self.tiers[:] = [level for level in self._levels if isinstance(level, StoreTier)]
        self.shared = [tier.name for tier in self.tiers if tier.backend.shared]

    def _promoted(self, tier: StoreTier, keys: Sequence[ChunkKey], salts: Mapping[ChunkKey, bytes]) -> None:
        """Chunks were promoted from a tier: pin them for waiting holders and write them to the tiers in between."""
        self._report(EventKind.PROMOTED, self._hot, keys, why=f"from {tier.name}")
        self._hot.show(keys, self._layout)
        self._leases.arrived(keys, tier.name)
        passed = self._levels[1 : self._levels.index(tier)]
        self._write_through.write(keys, AdmissionPlan(passed, keys, salts))

    def _make_room(self, arena: Arena, slots: int, path: Sequence[ChunkKey]) -> None:
        if slots > arena.free:
            self.evicted(arena, arena.make_room(slots, [set(path)]))

    def evicted(self, arena: Arena, keys: Sequence[ChunkKey], why: str = "for room") -> None:
        """Chunks have left an arena."""
        self._leases.evicted(keys)
        if keys:
            self._report(EventKind.EVICTED, arena, keys, why=why)

    def _pools(self) -> list[Pool]:
        return [self._pool, *(tier.pool for tier in self.tiers)]

    def _report(
        self, kind: EventKind, arena: Arena, keys: Sequence[ChunkKey], why: str = "", seconds: float = 0.0
    ) -> None:
        nbytes = self._layout.payloads_nbytes(keys)
        self._events.append(Event(kind, arena.name, tuple(keys), nbytes, why, seconds))


def _namespaces(backend: SupportsNamespaces) -> list[Namespace]:
    return list(backend.namespaces())
