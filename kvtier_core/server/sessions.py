"""The engines that a server serves: what each holds, and which processes may still touch it.

No clock frees anything. What a session holds is free when its engine releases it; or when the engine's scheduler side
has hung up *and* every worker that attached its arenas has detached them, or its process has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import attrs

from kvtier_core.config.compose import FAILS_REQUESTS
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.server.kept.journal import Keeper
from kvtier_core.server.lent_arena import LentArena
from kvtier_core.server.memory import reader_handle_of
from kvtier_core.server.protocol import Opened, Opening, ServedArena, ServedFrame, ServedLookup, Stepped
from kvtier_core.server.tenants import Tenants
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Whereabouts
from kvtier_core.types import ChunkKey, Event, FrameRead, Namespace, Slot, Usage

logger = logging.getLogger("kvtier")

#: Events that wait for an engine; of one that does not ask for them the oldest are lost.
_MOST_EVENTS = 4096


@attrs.define(eq=False)
class Space:
    """The stack of one namespace, and the engines that use it."""

    model: str  #: as its first engine calls it, for people
    namespace: Namespace
    layout: ChunkLayout
    stack: StorageManager
    media: Mapping[str, Medium] = attrs.field(factory=dict)  #: of tiers, as the server's file has them
    tenants: Tenants = attrs.field(factory=Tenants)
    cold: str = ""
    stores: Sequence[StoreTierConfig] = ()  #: that workers may be able to read by themselves
    number: int = 0  #: of those that this server has opened
    keepers: Sequence[Keeper] = ()  #: of its parts of kept memories
    sessions: set[Session] = attrs.field(factory=set)
    asked: int = 0  #: chunks for which requests looked, in all
    found: int = 0  #: and those of them that were there when the request was done with them

    def step(self) -> list[Event]:
        """Let time pass in the stack, and tell every session what happened."""
        for arena in self.stack.arenas:
            if isinstance(arena, LentArena) and (victims := arena.beyond_quota()):
                self.stack.evicted(arena, arena.drop(victims), "its tenant is beyond the quota")
        events = self.stack.step()
        if events:
            for session in self.sessions:
                session.tell(events)
        return events


class Session:
    """One engine. Its number precedes the names of its holders, so that engines may use the same names."""

    def __init__(self, number: int, opening: Opening, space: Space):
        self.number = number
        self.name = f"{opening.model}, engine {opening.engine}"
        self.epoch = 1  #: counts the spaces that it was in
        self.opening = opening
        self.space = space
        self.workers: set[object] = set()  #: that attached its arenas, and whose processes may touch them
        self.hung_up = False  #: has the scheduler side closed its connection?
        self._former: list[Space] = []  # in which it still holds something
        self._holders: dict[Space, set[str]] = {space: set()}
        self._pending: set[str] = set()
        self._looked: dict[str, tuple[int, int]] = {}  # by holder: chunks that its last lookup asked for, and found
        self._events: list[Event] = []
        self._usage: Sequence[Usage] = ()
        self._stopped: dict[str, str] = {}  # by tier: why its workers do not read it by themselves, though others may
        space.sessions.add(self)

    def opened(self) -> Opened:
        """The answer to its first call."""
        stack = self.space.stack
        media = {name: self.space.media.get(name, medium) for name, medium in stack.media.items()}
        handles = {name: handle for name, handle in stack.reader_handles.items() if name not in self._not_direct}
        readers = {
            tier.name: reader_handle_of(tier, handles[tier.name]) for tier in self.space.stores if tier.name in handles
        }
        about = tuple(stack.describe(self._not_direct))
        arenas = tuple(ServedArena(arena.name, arena.memory.slot_nbytes) for arena in stack.arenas)
        return Opened(self.number, arenas, media, readers, about, self.space.cold, stack.packed)

    # -- calls ---------------------------------------------------------------------------------------

    def on_request(self, path: Sequence[ChunkKey], hints: Mapping[str, str] | None, salt: bytes) -> None:
        self.space.tenants.note(path, salt)
        self.space.stack.on_request(path, hints, salt)

    def lookup(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        limit: LoadLimit | None,
        salt: bytes,
        skipped: int,
        not_direct: Collection[str],
    ) -> Lookup:
        own = self._prefix + holder
        self.space.tenants.note(path, salt)
        found = self.space.stack.lookup(path, own, limit, salt, skipped, {*not_direct, *self._not_direct})
        self._looked[own] = len(path), found.chunks
        if found.slots or found.pending:
            self._holders[self.space].add(own)
        if found.pending:
            self._pending.add(own)
        return ServedLookup.of(found)

    def load_begins(self, frames: Sequence[ServedFrame], holder: str) -> None:
        for space in self._holding(holder):
            space.stack.load_begins([frame.stored for frame in frames], self._prefix + holder)

    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], ok: bool) -> None:
        for space in self._holding(holder):
            space.stack.load_ended(self._prefix + holder, unread, ok=ok)

    def stop_direct_reads(self, tier: str, why: str) -> None:
        """For this engine alone."""
        logger.info("kvtier: session %d: frames of %s pass through an arena: %s", self.number, tier, why)
        self._stopped[tier] = why
        self.space.stack.release_frames(tier, self._holders[self.space])

    def prefetch(self, path: Sequence[ChunkKey], limit: LoadLimit | None, salt: bytes) -> None:
        self.space.tenants.note(path, salt)
        self.space.stack.prefetch(path, limit, salt, self._not_direct)

    def reserve(
        self, path: Sequence[ChunkKey], holder: str, salt: bytes, parts: Sequence[ChunkKey]
    ) -> dict[ChunkKey, Slot]:
        own = self._prefix + holder
        self.space.tenants.note((*path, *parts), salt)
        slots = self.space.stack.reserve(path, own, salt, parts)
        if slots:
            self._holders[self.space].add(own)
        return slots

    def commit(
        self, holder: str, checksums: Mapping[ChunkKey, Sequence[int]] | None, empty: Collection[ChunkKey]
    ) -> None:
        own = self._prefix + holder
        if own in self._holders[self.space]:
            self._holders[self.space].discard(own)
            self.space.stack.commit(own, checksums, empty)
        else:
            self.release(holder)  # reserved in another space: its KV was computed with the weights of before

    def release(self, holder: str) -> None:
        own = self._prefix + holder
        self._pending.discard(own)
        asked, found = self._looked.pop(own, (0, 0))
        self.space.asked += asked
        self.space.found += found
        for space in self._holding(holder):
            space.stack.release(own)
            self._holders[space].discard(own)
        self._leave_empty()

    def reserve_self_test_slots(self, holder: str, count: int) -> list[Slot]:
        own = self._prefix + holder
        slots = self.space.stack.reserve_self_test_slots(own, count)
        if slots:
            self._holders[self.space].add(own)
        return slots

    def step(self) -> Stepped:
        stack = self.space.stack
        settled = [holder for holder in self._pending if not stack.still_pending(holder)]
        self._pending.difference_update(settled)
        events, self._events = self._events, []
        usage = stack.usage()
        told, self._usage = None if usage == self._usage else tuple(usage), usage
        own = tuple(holder.partition("/")[2] for holder in settled)
        return Stepped(tuple(events), own, stack.jobs, told)

    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        return self.space.stack.whereabouts(path)

    def pins_by_holder(self) -> Mapping[str, int]:
        prefix = self._prefix
        pins = self.space.stack.pins_by_holder()
        return {holder.removeprefix(prefix): count for holder, count in pins.items() if holder.startswith(prefix)}

    # -- its life ----------------------------------------------------------------------------------------

    def tell(self, events: Sequence[Event]) -> None:
        """Keep these events for its next step."""
        self._events += events
        del self._events[:-_MOST_EVENTS]

    def move(self, space: Space) -> None:
        """Use another space from now on. What it holds in the former one stays until it releases that."""
        if space is self.space:
            raise BackendError("it is in this namespace already")
        self._former.append(self.space)
        self.space = space
        self.epoch += 1
        self._pending.clear()
        self._holders.setdefault(space, set())
        space.sessions.add(self)
        self._leave_empty()

    def hang_up(self) -> None:
        """The scheduler side has closed its connection: nobody will tell how the loads under way end."""
        self.hung_up = True
        for space, holders in self._holders.items():
            for holder in holders:
                space.stack.load_ended(holder, {}, ok=False)

    @property
    def is_over(self) -> bool:
        """Is it certain that nobody touches what it holds?"""
        return self.hung_up and not self.workers

    def end(self) -> None:
        """Release everything that it holds."""
        for space, holders in self._holders.items():
            for holder in holders:
                space.stack.release(holder)
            space.sessions.discard(self)
        self._holders.clear()

    @property
    def held(self) -> int:
        """The number of its holders."""
        return sum(map(len, self._holders.values()))

    @property
    def _prefix(self) -> str:
        return f"{self.number}/"

    @property
    def _not_direct(self) -> Mapping[str, str]:
        """The tiers whose frames its workers do not read by themselves, and why."""
        return self._stopped if self.opening.recomputes else dict.fromkeys(self.space.stack.media, FAILS_REQUESTS)

    def _holding(self, holder: str) -> list[Space]:
        """The spaces in which this holder has something; a former one may be among them."""
        return [space for space in (self.space, *self._former) if self._prefix + holder in self._holders[space]]

    def _leave_empty(self) -> None:
        for space in [each for each in self._former if each is self.space or not self._holders[each]]:
            self._former.remove(space)
            if space is not self.space:  # it may have come back
                del self._holders[space]
                space.sessions.discard(self)
