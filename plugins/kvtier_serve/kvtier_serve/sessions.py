"""The engines that a server serves: what each holds, and which processes may still touch it.

No clock frees anything. What a session holds is free when its engine releases it; or when the engine's scheduler side
has hung up *and* every worker that attached its arenas has detached them, or its process has ended.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence

import attrs

from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.open import FAILS_REQUESTS
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import printable
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import Terms, Whereabouts
from kvtier_core.types import ChunkKey, Event, FrameRead, Namespace, Slot, Usage
from kvtier_doctor.steering import Pins
from kvtier_remote.memory import reader_handle_of
from kvtier_remote.protocol import (
    MOST_CHUNKS,
    MOST_RESERVED,
    Opened,
    Opening,
    ServedArena,
    ServedFrame,
    ServedLookup,
    Stepped,
)
from kvtier_serve.kept.journal import Keeper
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.tenants import Tenants

logger = logging.getLogger("kvtier")

#: The most events that wait for an engine; if it does not ask for them, the oldest are lost.
_MOST_EVENTS = 4096
#: The most lookups whose requests an engine has not ended. If it ends none, the oldest count as done.
_MOST_LOOKUPS = 1 << 16


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
    asked: int = 0  #: number of chunks that requests looked for, in all
    found: int = 0  #: and those of them that were there when the request was done with them
    pins: Pins = attrs.field(init=False, default=attrs.Factory(lambda space: Pins(space.stack), takes_self=True))

    def came(self, path: Sequence[ChunkKey], salt: bytes) -> None:
        """Note that a request with this salt names these chunks."""
        if tenant := self.tenants.came(salt):
            for arena in self.arenas:
                arena.comes_back(path, tenant)

    def looked(self, asked: int, found: int, tenant: str) -> None:
        """Note that a request is done with the chunks that it asked for."""
        self.asked += asked
        self.found += found
        self.tenants.looked(self.model, tenant, asked, found)

    @property
    def arenas(self) -> list[LentArena]:
        """The arenas of its stack."""
        return [arena for arena in self.stack.arenas if isinstance(arena, LentArena)]

    def step(self) -> list[Event]:
        """Let time pass in the stack, and tell every session what happened."""
        for arena in self.arenas:
            if slots := arena.take_uncovered():
                views = [arena.memory.view(slot) for slot in slots]
                self.stack.overwrite(views, functools.partial(arena.overwritten, slots))
        events = self.stack.step()
        self.pins.step()
        if events:
            for session in self.sessions:
                if session.space is self:
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
        #: By holder: chunks that its last lookup asked for, and found, and the tenant.
        self._looked: dict[str, tuple[int, int, str]] = {}
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._lost = False  # some of them
        self._usage: Sequence[Usage] = ()
        self._testing = ""  # the last holder of the slots of a self-test
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
        return Opened(self.number, arenas, media, readers, about, self.space.cold, stack.packed, tuple(stack.shared))

    # -- calls ---------------------------------------------------------------------------------------

    def on_request(
        self, path: Sequence[ChunkKey], hints: Mapping[str, str] | None, salt: bytes, memory_only: bool = False
    ) -> None:
        self.space.stack.on_request(path, hints, salt, memory_only=memory_only)
        self.space.came(path, salt)

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms) -> ServedLookup:
        own = self._prefix + holder
        found = self.space.stack.lookup(path, own, self._own(terms))
        for space in self._holding(own):
            if space is not self.space:
                space.stack.lookup((), own)  # a holder has one path at a time, in whatever space
        tenants = self.space.tenants
        self._looked[own] = len(path), found.chunks, tenants.bounding(tenants.name(terms.salt))
        if len(self._looked) > _MOST_LOOKUPS:
            self._is_done_with(next(iter(self._looked)))
        if found.pending:
            self._pending.add(own)
        self._note(own)
        return ServedLookup.of(found)

    def load_begins(self, frames: Sequence[ServedFrame], holder: str) -> None:
        own = self._prefix + holder
        self._looked_up_in(own).load_begins([frame.stored for frame in frames], own)

    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], ok: bool) -> None:
        own = self._prefix + holder
        self._looked_up_in(own).load_ended(own, unread, ok=ok)

    def stop_direct_reads(self, tier: str, why: str) -> None:
        """For this engine alone."""
        self.space.stack.store_tier(tier)
        why = self._stopped[tier] = printable(why)
        logger.info("kvtier: session %d: frames of %s pass through an arena: %s", self.number, tier, why)
        holders = list(self._holders[self.space])
        self.space.stack.release_frames(tier, holders)
        for own in holders:
            self._note(own)

    def prefetch(self, path: Sequence[ChunkKey], terms: Terms) -> None:
        self.space.stack.prefetch(path, self._own(terms))

    def reserve(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        salt: bytes,
        parts: Sequence[ChunkKey],
        promised_to: str,
        memory_only: bool = False,
    ) -> dict[ChunkKey, Slot]:
        """As `Stack.reserve`, at most `MOST_RESERVED` chunks at a time: the client calls again for more."""
        own, promised = self._prefix + holder, promised_to and self._prefix + promised_to
        self.space.layout.check_path(path, parts)
        absent = self.space.stack.without_slot(path)
        if len(absent) > MOST_RESERVED:
            path = path[: path.index(absent[MOST_RESERVED])]
        slots = self.space.stack.reserve(path, own, salt, parts, promised, memory_only=memory_only)
        self._note(own)
        if promised:
            self._note(promised)
        return slots

    def commit(
        self, holder: str, checksums: Mapping[ChunkKey, Sequence[int]] | None, empty: Collection[ChunkKey]
    ) -> None:
        own = self._prefix + holder
        spaces = [space for space in self._holding(own) if space.stack.holds(own).reserved]
        if self.space in spaces or not spaces:
            self.space.stack.commit(own, checksums, empty)
        for space in spaces:
            if space is not self.space:
                space.stack.abort(own)  # its KV was computed with the former weights
        self._note(own)

    def release(self, holder: str) -> None:
        own = self._prefix + holder
        self._pending.discard(own)
        self._is_done_with(own)
        for space in self._holding(own):
            space.stack.release(own)
        self._note(own)

    def _is_done_with(self, own: str) -> None:
        if looked := self._looked.pop(own, None):
            self.space.looked(*looked)

    def reserve_self_test_slots(self, holder: str, count: int) -> list[Slot]:
        own = self._prefix + holder
        if own != self._testing and self.space.stack.holds(self._testing).self_test_slots:
            raise ContractError("an engine can have the slots of only one self-test at a time")
        slots = self.space.stack.reserve_self_test_slots(own, count)
        self._testing = own
        self._note(own)
        return slots

    def step(self) -> Stepped:
        stack = self.space.stack
        settled = [holder for holder in self._pending if not stack.still_pending(holder)]
        self._pending.difference_update(settled)
        events, keys = [], 0
        while self._events and keys < MOST_CHUNKS:
            events.append(self._events.popleft())
            keys += 1 + len(events[-1].keys)
        usage = stack.usage()
        told, self._usage = None if usage == self._usage else tuple(usage), usage
        own = tuple(holder.partition("/")[2] for holder in settled)
        lost, self._lost = self._lost, False
        return Stepped(tuple(events), own, stack.jobs, told, lost)

    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        return self.space.stack.whereabouts(path)

    def pins_by_holder(self) -> Mapping[str, int]:
        prefix = self._prefix
        pins = self.space.stack.pins_by_holder()
        return {holder.removeprefix(prefix): count for holder, count in pins.items() if holder.startswith(prefix)}

    # -- its life ----------------------------------------------------------------------------------------

    def tell(self, events: Sequence[Event]) -> None:
        """Keep these events for its next step."""
        self._lost |= len(self._events) + len(events) > _MOST_EVENTS
        self._events += events

    def move(self, space: Space) -> None:
        """Use another space from now on. What it holds in the former one stays until it releases that."""
        if space is self.space:
            raise BackendError("it is already in this namespace")
        self._former.append(self.space)
        self.space = space
        self.epoch += 1
        self._pending.clear()
        self._events.clear()
        self._holders.setdefault(space, set())
        space.sessions.add(self)
        self._leave_empty()

    def hang_up(self) -> None:
        """The scheduler side has closed its connection: no call will report how the loads under way end."""
        self.hung_up = True
        for space, holders in self._holders.items():
            for holder in holders:
                space.stack.load_ended(holder, {}, ok=False)

    @property
    def is_over(self) -> bool:
        """Is it certain that no process touches what it holds?"""
        return self.hung_up and not self.workers

    def end(self) -> Generator[None, None, None]:
        """Release everything that it holds, a holder at a time."""
        for space, holders in self._holders.items():
            for holder in holders:
                space.stack.release(holder)
                yield
            space.sessions.discard(self)
        self._holders.clear()

    @property
    def held(self) -> int:
        """The number of its holders."""
        return sum(map(len, self._holders.values()))

    @property
    def _prefix(self) -> str:
        return f"{self.number}/"

    def _own(self, terms: Terms) -> Terms:
        """The terms of a call, where this session's workers cannot read every tier directly."""
        return attrs.evolve(terms, not_direct=[*terms.not_direct, *self._not_direct])

    @property
    def _not_direct(self) -> Mapping[str, str]:
        """The tiers whose frames its workers do not read by themselves, and why."""
        return self._stopped if self.opening.recomputes else dict.fromkeys(self.space.stack.media, FAILS_REQUESTS)

    def _note(self, own: str) -> None:
        """Note in which spaces the stack has something for a holder, after each call that may change it."""
        for space, holders in self._holders.items():
            if any(space.stack.holds(own)):
                holders.add(own)
            else:
                holders.discard(own)
        self._leave_empty()

    def _holding(self, own: str) -> list[Space]:
        """The spaces in which this holder has something; a former one may be among them."""
        return [space for space in (self.space, *self._former) if own in self._holders[space]]

    def _looked_up_in(self, own: str) -> StorageManager:
        """The stack that has pinned what the holder looked up; that of its space if none has."""
        return next((each.stack for each in self._holding(own) if each.stack.holds(own).looked_up), self.space.stack)

    def _leave_empty(self) -> None:
        for space in [each for each in self._former if each is self.space or not self._holders[each]]:
            self._former.remove(space)
            if space is not self.space:  # it may have come back
                del self._holders[space]
                space.sessions.discard(self)
