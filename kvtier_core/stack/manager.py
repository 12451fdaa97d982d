"""The ordered stack: arenas that the engine loads from, and tiers below that keep what left."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.batches import leading_run
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import WriteThrough
from kvtier_core.transfer.io_pool import Pool, run
from kvtier_core.types import (
    KEY_NBYTES,
    ChunkKey,
    ChunkLayout,
    Event,
    EventKind,
    Namespace,
    Nbytes,
    Presence,
    Slot,
    Usage,
)


class StorageManager:
    """Every method on the owner's thread; none of them blocks but `drain` and `close`.

    ``levels`` are hottest first and begin with an arena. Engines store into that one, and what lies in a
    tier comes up to it; from any other arena a chunk goes to the device as it lies.
    """

    def __init__(
        self,
        levels: Sequence[Arena | StoreTier],
        *,
        namespace: Namespace,
        layout: ChunkLayout,
        pool: Pool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._levels = tuple(levels)
        self._arenas = [level for level in levels if isinstance(level, Arena)]
        self._tiers = [level for level in levels if isinstance(level, StoreTier)]
        if not self._arenas or self._levels[0] is not self._arenas[0]:
            raise ContractError("a stack begins with an arena")
        self._hot = self._arenas[0]
        self._layout = layout
        self._pool = pool  # seals frames, and copies them from arena to arena
        self._clock = clock
        self._write_through = WriteThrough(
            self._hot,
            self._levels[1:],
            namespace=namespace,
            layout=layout,
            pool=pool,
            trade=self._trade,
            report=lambda event: self._events.append(event),
        )
        self._closed = False
        self._lent = ChunkKey(b"")  # the key of what was lent
        self._events: list[Event] = []
        self._parents: dict[ChunkKey, ChunkKey | None] = {}  # of what is reserved
        self._origin: dict[ChunkKey, str] = {}  # tiers from which READY chunks came, until they are first used
        self._promotion_requests: dict[ChunkKey, ChunkKey | None] = {}  # to its parent
        self._rejected: set[ChunkKey] = set()  # requests of the last step that found no room
        self._recent_lookups: set[ChunkKey] = set()  # looked up since the last step
        self._earlier_lookups: set[ChunkKey] = set()  # looked up between the two steps before

    # -- looking -----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """For a path, root first, what could be loaded. Behind a MISS everything is a MISS.

        Moves nothing: what lies below the arenas is noted as a wish, which `step` grants. READY holds
        until the next `reserve` or `step`.
        """
        found: list[Presence] = []
        while (at := len(found)) < len(keys):
            if run := max(arena.ready(keys, at) for arena in self._arenas):
                found += [Presence.READY] * run
            elif run := self._pending_run(keys, at):
                found += [Presence.PENDING] * run
            else:
                break
        self._recent_lookups.update(keys[: len(found)])
        return found + [Presence.MISS] * (len(keys) - len(found))

    def miss_reason(self, key: ChunkKey) -> str:
        """In words, for a key that was a MISS just now."""
        if key in self._rejected:
            return f"no room in {self._hot.name} to bring it up"
        resting = [tier.name for tier in self._tiers if key in tier.index]
        return f"{resting[0]} cannot be asked now" if resting else "not stored"

    def hit_sources(self, keys: Sequence[ChunkKey]) -> list[str]:
        """For READY keys the tier that saved their recompute: the one below if it came up for this."""
        return [self._origin.get(key) or self._arena_of(key).name for key in keys]

    def on_request(self, path: Sequence[ChunkKey], hints: Mapping[str, str] | None = None) -> None:
        """A request names this path: tell the policies, once a request. What a tier had to refuse is offered again."""
        for level in self._levels:
            level.index.request(path, self._clock(), hints or {})
        self._write_through.begin(path, checksums={})

    # -- the engine's stores and loads ---------------------------------------------------------------

    def reserve(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Slot]:
        """Slots for the leading absent keys of a path that are wanted and that there is room for. Evicts who may leave.

        What a level below wants passes through the hottest arena, whatever that one's policy thinks of it.
        """
        absent = self._without_slot(keys)
        parents = dict(zip(keys, (None, *keys), strict=False))
        passing = leading_run(absent, self._write_through.writable(absent).__contains__)
        self._make_room(self._hot, len(passing), keys)
        granted = passing[: self._hot.free]
        self._hot.reserve(granted)
        if len(granted) == len(passing):
            welcome = self._trade(self._hot, absent[len(passing) :], keys)
            self._hot.reserve(welcome)
            granted += welcome
        self._parents.update((key, parents[key]) for key in granted)
        return dict(zip(granted, self._hot.slots(granted), strict=True))

    def commit(self, keys: Sequence[ChunkKey], checksums: Mapping[ChunkKey, Sequence[int]] | None = None) -> None:
        """The slots of these keys are filled: READY at once, and on their way down.

        ``sums`` are the CRC-32 of each rank's shard, for the chunks that were summed on the way.
        """
        kept = self._commit(keys)
        if kept:
            self._report(EventKind.STORED, kept, nbytes=len(kept) * self._layout.payload_nbytes)
            self._write_through.begin(kept, checksums or {})

    def abort(self, keys: Sequence[ChunkKey]) -> None:
        """The slots of these keys will not be filled."""
        self._hot.abort(keys)
        for key in keys:
            self._parents.pop(key, None)

    def pin(self, keys: Sequence[ChunkKey], owner: str) -> list[Slot]:
        """Hold READY chunks in their slots until ``owner``, a request for instance, unpins them."""
        slots: dict[ChunkKey, Slot] = {}
        for arena, here in self._by_arena(keys).items():
            slots.update(zip(here, arena.pin(here, owner), strict=True))
        for key in keys if self._origin else ():
            self._origin.pop(key, None)
        return [slots[key] for key in keys]

    def unpin(self, slots: Sequence[Slot], owner: str) -> None:
        """Once for each slot that `pin` returned to this owner."""
        for arena in self._arenas:
            arena.unpin([slot for slot in slots if slot.arena == arena.number], owner)

    def pins_by_holder(self) -> Counter[str]:
        """Who has pins, and how many: requests, and tiers that read a slot. Empty at rest."""
        return sum((arena.pins_by_holder() for arena in self._arenas), Counter())

    def reserve_self_test_slots(self) -> list[Slot]:
        """An empty slot of each arena, until `release_self_test_slots`, for a trial of the copies."""
        self._lent = ChunkKey(secrets.token_bytes(KEY_NBYTES))
        for arena in self._arenas:
            arena.reserve([self._lent])
        return [slot for arena in self._arenas for slot in arena.slots([self._lent])]

    def release_self_test_slots(self) -> None:
        """Of all that was lent."""
        for arena in self._arenas:
            arena.abort([self._lent])

    # -- the turn of the wheel -----------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Take in what the threads finished, grant requests, and tell what happened since the last step."""
        for pool in self._pools():
            pool.step()
        self._start_promotions()
        for tier in self._tiers:
            tier.poll()
            self._events += tier.events
            tier.events.clear()
        self._earlier_lookups, self._recent_lookups = self._recent_lookups, set()
        events, self._events = self._events, []
        return events

    def drain(self, timeout: float) -> list[Event]:
        """Step until nothing is in flight, or ``timeout`` seconds have passed."""
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
        """Never find again what was stored so far. What is in use goes when it is not; new frames are sealed anew."""
        self._write_through.namespace = namespace
        for arena in self._arenas:
            arena.clear()
        for tier in self._tiers:
            tier.invalidate_all(namespace)
        self._origin.clear()
        self._promotion_requests.clear()

    def close(self, timeout: float = 5.0) -> list[Event]:
        """Give stores on their way down ``timeout`` seconds, then let go of everything. May be called twice.

        What hangs is left behind, after a second more for each tier.
        """
        if self._closed:
            return []
        self._closed = True
        deadline = time.monotonic() + timeout
        events = self.drain(timeout)

        def left() -> float:
            return max(1.0, deadline - time.monotonic())

        idle = self._pool.close(left())
        for tier in self._tiers:
            idle = tier.close(left()) and idle
        if idle:  # else a thread may still write to a slot: better leave the memory to the end of the process
            for arena in self._arenas:
                arena.memory.close()
        return events

    @property
    def jobs(self) -> int:
        """Pieces of work on the threads."""
        return sum(pool.jobs for pool in self._pools())

    @property
    def handles(self) -> list[str]:
        """With which a worker reaches the arenas, by their numbers."""
        return [arena.memory.handle for arena in self._arenas]

    def describe(self) -> list[str]:
        """For each level what it holds and how it really works, in plain words."""
        lines = []
        for level in self._levels:
            facts = (level.memory if isinstance(level, Arena) else level.backend).facts()
            usage = level.usage()
            words = [
                f"{Nbytes(usage.capacity)}",
                f"{usage.chunks} chunks held",
                *(f"{k}: {v}" for k, v in facts.items()),
            ]
            lines.append(f"{level.name}: {', '.join(words)}")
        return lines

    def why_cold(self) -> str:
        """If only other namespaces have frames below the arenas: in what the most similar one differs. Else empty.

        Asks the stores, on this thread: for once, when the stack was opened.
        """
        if any(len(tier.index) for tier in self._tiers):
            return ""
        mine = self._write_through.namespace
        others = [
            (len(mine.differences(other)), tier.name, mine.differences(other))
            for tier in self._tiers
            for other in run(lambda tier=tier: list(tier.backend.namespaces())).value or ()
        ]
        if not others:
            return ""
        count, tier, differences = min(others)
        name, here, there = differences[0]
        more = f", and {count - 1} more facts differ" if count > 1 else ""
        return f"{tier} holds another namespace: {name} was {there or 'not there'}, is {here or 'not there'}{more}"

    def usage(self) -> list[Usage]:
        """What each level holds now."""
        return [level.usage() for level in self._levels]

    # -- inside --------------------------------------------------------------------------------------

    def _pending_run(self, keys: Sequence[ChunkKey], at: int) -> int:
        """How many of a path, from one on that is not READY, are on their way to an arena, or may be from now on."""
        key = keys[at]
        if any(arena.expects(key) for arena in self._arenas):
            return 1
        if self._stays_below(key):
            return 0
        for tier in self._tiers:
            if run := tier.readable(keys, at):
                requests = leading_run(keys[at : at + run], lambda key: not self._stays_below(key))
                self._promotion_requests.update(zip(requests, [keys[at - 1] if at else None, *requests], strict=False))
                return len(requests)
            if tier.request_lookup(key):
                return 1
        return 0

    def _stays_below(self, key: ChunkKey) -> bool:
        """Was there no room for it just now, or does a slot bear its name that nobody may look into?"""
        return key in self._rejected or self._has_a_slot(key)

    def _start_promotions(self) -> None:
        """Begin to read what was wished for, as far as there is room that nobody else looks at."""
        self._rejected.clear()
        requests = {key: parent for key, parent in self._promotion_requests.items() if not self._has_a_slot(key)}
        self._promotion_requests.clear()
        for tier in self._tiers:
            here = [key for key in requests if tier.has(key)]
            now = here[: tier.may_read(self._layout.frame_nbytes)]  # the others are asked for again
            self._make_room(self._hot, len(now), ())
            granted = now[: self._hot.free]
            self._hot.reserve(granted)
            begun = tier.read(
                [(key, self._hot.view(key)) for key in granted],
                lambda good, bad, tier=tier: self._arrived(tier, good, bad),
            )
            self._parents.update((key, requests[key]) for key in begun)
            self.abort(_but(granted, begun))
            self._rejected.update(now[len(granted) :])
            for key in here:
                del requests[key]

    def _arrived(self, tier: StoreTier, good: Sequence[ChunkKey], bad: Sequence[ChunkKey]) -> None:
        self.abort(bad)
        kept = self._commit(good)
        if not kept:
            return
        self._report(EventKind.PROMOTED, kept, nbytes=len(kept) * self._layout.payload_nbytes, why=f"from {tier.name}")
        self._origin.update(dict.fromkeys(kept, tier.name))
        self._write_through.offer(kept, self._levels[1 : self._levels.index(tier)])

    def _commit(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        return self._hot.commit(keys, [self._parents.pop(key, None) for key in keys])

    def _make_room(self, arena: Arena, slots: int, path: Sequence[ChunkKey]) -> None:
        if slots > arena.free:
            self._evicted(arena, arena.make_room(slots, self._needed(path)))

    def _trade(self, arena: Arena, newcomers: Sequence[ChunkKey], path: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of the newcomers for whom there is room now."""
        welcome, evicted = arena.trade(newcomers, self._needed(path))
        self._evicted(arena, evicted)
        return welcome

    def _needed(self, path: Sequence[ChunkKey]) -> Sequence[Container[ChunkKey]]:
        """The path itself, and what somebody was just told is READY or on its way."""
        return set(path), self._recent_lookups, self._earlier_lookups

    def _evicted(self, arena: Arena, keys: Sequence[ChunkKey]) -> None:
        for key in keys if self._origin else ():
            self._origin.pop(key, None)
        if keys:
            self._events.append(Event(EventKind.EVICTED, arena.name, tuple(keys)))

    def _has_a_slot(self, key: ChunkKey) -> bool:
        return any(arena.taken(key) for arena in self._arenas)

    def _without_slot(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        for arena in self._arenas:
            keys = arena.without_slot(keys)
        return keys

    def _by_arena(self, keys: Sequence[ChunkKey]) -> dict[Arena, Sequence[ChunkKey]]:
        """ContractError if one is not READY."""
        if self._hot.ready(keys) == len(keys):
            return {self._hot: keys}
        homes: dict[Arena, list[ChunkKey]] = {}
        for key in keys:
            homes.setdefault(self._arena_of(key), []).append(key)
        return homes

    def _arena_of(self, key: ChunkKey) -> Arena:
        for arena in self._arenas:
            if arena.has(key):
                return arena
        raise ContractError("pin of a chunk that is not READY")

    def _pools(self) -> list[Pool]:
        return [self._pool, *(tier.pool for tier in self._tiers)]

    def _report(self, kind: EventKind, keys: Sequence[ChunkKey], *, nbytes: int = 0, why: str = "") -> None:
        self._events.append(Event(kind, self._hot.name, tuple(keys), nbytes, why))


def _but(keys: Sequence[ChunkKey], others: Collection[ChunkKey]) -> list[ChunkKey]:
    others = set(others)
    return [key for key in keys if key not in others]
