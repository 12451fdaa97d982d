"""The stack of a server, as the scheduler side of an engine sees it.

No call waits for long: chunks without an answer in time are pending, or a miss, and a server that owes answers is not
waited for at all. While it is gone, everything is a miss. When it is back, workers attach its arenas again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.interfaces import Medium
from kvtier_core.stack.interface import Hints, Stack
from kvtier_core.stack.outcomes import ANY, Arriving, Lookup, Missing, Terms, Whereabouts
from kvtier_core.telemetry.log_limit import LogLimit
from kvtier_core.types import ChunkKey, Event, EventKind, FrameRead, Namespace, Slot, StoredFrame, Usage
from kvtier_remote.connection import connect
from kvtier_remote.engine_session import EngineSession
from kvtier_remote.memory import handle_of
from kvtier_remote.protocol import (
    MOST_CHUNKS,
    MOST_RESERVED,
    Opened,
    Opening,
    ProtocolError,
    ServedLookup,
)

logger = logging.getLogger("kvtier")

#: Seconds between two attempts to connect.
_RETRY = 1.0
#: Chunks in a piece of a question that can be asked in pieces.
_PIECE = 256
_UNANSWERED = "the server did not answer in time"
_TOO_LONG = f"the server caches the first {MOST_CHUNKS} chunks of a prompt"


@attrs.frozen
class Waits:
    """Seconds for which an engine waits for an answer before it goes on without one."""

    lookup: float = 2e-3  #: ten times what a lookup takes
    others: float = 50e-3  #: of calls whose answer is needed now; they are rarer, and may have to evict
    start: float = 30.0  #: of the first call, when the engine starts: the server opens tiers, and may scan a disk
    silence: float = 1.0  #: for which the server may owe an answer before it is asked nothing more


class RemoteStack(Stack):
    """The stack that a server has for this engine's namespace."""

    def __init__(
        self,
        path: Path,
        opening: Opening,
        waits: Waits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Waits for the server for a few seconds, if one listens at ``path``."""
        self._path = path
        self._opening = opening
        self._waits = waits or Waits()
        self._clock = clock
        self._session: EngineSession | None = None
        self._opened: Opened | None = None  # by which the workers reach the arenas
        self._known: Opened | None = None  # the last of these: names of tiers outlive the session
        self._offered: Opened | None = None  # the one to use from the next step on, in the namespace of `_opening`
        self._renewing = False  # is only a former namespace open yet?
        self._attached: tuple[int, int, int] | None = None  # boot, session, epoch
        self._attachment = 0
        self._unattached: int | None = None  # number of steps answered when a worker got no answer
        self._why = ""  # why there is no session
        self._next_try = 0.0
        self._stepping = False  # is a step still unanswered?
        self._steps = 0  # that were answered
        self._events: list[Event] = []
        self.gaps = 0
        self._usage: Sequence[Usage] = ()
        self._jobs = 0
        self._pending: set[str] = set()  # holders
        self._asked_for: dict[str, Sequence[ChunkKey]] = {}  # by holder: its last path, until it is released
        self._late: dict[str, Lookup] = {}  # answers for that path which came too late, by holder
        self._named: set[str] = set()  # holders for which the server may have something besides reserved slots
        self._reserved: dict[str, list[ChunkKey]] = {}  # by holder: the chunks whose slots the workers fill now
        self._reading: set[str] = set()  # holders whose frames the workers read now
        self._log = LogLimit(time.monotonic)
        self._connect(self._waits.start)
        self._adopt()
        if self._session is not None and self._opened is None:
            logger.warning("kvtier: %s; until then, everything is computed", self._absence)

    # -- the session -------------------------------------------------------------------------------

    def _connect(self, patience: float = 0.0) -> None:
        self._next_try = self._clock() + _RETRY
        try:
            self._session = EngineSession(connect(self._path), self._clock)
            number = self._session.tell("open", self._opening, then=functools.partial(self._offer, self._opening))
            if patience:
                self._session.answered(number, patience)
            self._note_refusals()
        except ProtocolError as error:
            self._lose(str(error))

    def _offer(self, opening: Opening, opened: Opened) -> None:
        """An answer for a former namespace is not used."""
        if opening is self._opening:
            self._offered = opened

    def _adopt(self) -> None:
        """Use what the server has opened. If that is elsewhere, the workers attach its arenas again."""
        if self._session is None or self._offered is None:
            return
        self._opened = self._known = self._offered
        self._offered, self._renewing, self._why = None, False, ""
        now = self._session.boot, self._opened.session, self._session.epoch
        if now != self._attached:
            self._attached = now
            self._attachment += 1
            self._unattached = None
            logger.info("kvtier: session %d of the server at %s", self._opened.session, self._path)

    def attach_again(self) -> None:
        self._unattached = self._steps
        self._next_try = self._clock() + _RETRY

    def _let_attach_again(self) -> None:
        """Only if the server answers meanwhile: a worker that waits for it holds up its engine's step."""
        answers = self._unattached is not None and self._steps > self._unattached
        if answers and self._opened is not None and self._clock() >= self._next_try:
            self._unattached = None
            self._attachment += 1

    def _lose(self, why: str) -> None:
        """End the session, or note that there is none yet."""
        self._log.log(logging.WARNING, "no server", str(self._path), why)
        self._leave(why)

    def _leave(self, why: str) -> None:
        if self._session:
            self._session.connection.close()
        self._session = self._opened = self._offered = None
        self._renewing = False
        self.gaps += 1
        self._why = f"no session of the server at {self._path}: {why}"
        self._stepping, self._jobs = False, 0
        self._named.clear()
        self._reserved.clear()
        self._reading.clear()
        self._forget()

    def _forget(self) -> None:
        """Forget all lookups."""
        self._pending.clear()
        self._asked_for.clear()
        self._late.clear()

    def _note_refusals(self) -> None:
        if self._session and self._session.refusals:
            refusals, self._session.refusals = self._session.refusals, []
            for name, why in refusals:
                if name in ("open", "invalidate_all"):
                    raise ProtocolError(why)
                self._log.log(logging.WARNING, "the server refused a call", name, why)

    def _asking(self) -> EngineSession | None:
        """The session, if the server can be asked now; else None."""
        answers = self._poll()
        if self._opened is None or self._renewing:
            return None
        if answers and self._is_behind:  # it answers again, perhaps after a stall
            self._catch_up()
        return None if self._is_behind else self._session

    @property
    def _is_behind(self) -> bool:
        """Has the server owed an answer for too long, or does it not take what it is sent?"""
        session = self._session
        return session is None or session.silence >= self._waits.silence or not session.takes_questions

    def _poll(self) -> bool:
        """Send what waits, and process the answers that are here. False if there are none."""
        if self._session is not None:
            try:
                answers = self._session.poll()
                self._note_refusals()
                return answers
            except ProtocolError as error:
                self._lose(str(error))
        return False

    def _catch_up(self) -> None:
        if self._session is not None:
            try:
                self._session.catch_up(self._waits.lookup)
                self._note_refusals()
            except ProtocolError as error:
                self._lose(str(error))

    def _tell(self, name: str, *arguments: Any, then: Callable[[Any], None] | None = None) -> None:
        """Make a call whose answer nothing waits for."""
        if self._opened is not None:
            self._send(name, *arguments, then=then)

    def _send(self, name: str, *arguments: Any, then: Callable[[Any], None] | None = None) -> None:
        if self._session is not None:
            try:
                self._session.tell(name, *arguments, then=then)
            except ProtocolError as error:
                self._lose(str(error))

    def _ask(
        self, session: EngineSession, name: str, *arguments: Any, seconds: float, then: Callable[[Any], None]
    ) -> None:
        """Make a call and wait for its answer, unless the server has already owed another for as long."""
        patience = seconds if session.silence < seconds else 0.0
        try:
            session.answered(session.tell(name, *arguments, then=then), patience)
        except ProtocolError as error:
            self._lose(str(error))

    def _result(self, name: str, *arguments: Any) -> Any:
        """The result of a call; None if it has not come, or there is none."""
        results: list[Any] = []
        if session := self._asking():
            self._ask(session, name, *arguments, seconds=self._waits.others, then=results.append)
        return results[0] if results else None

    # -- requests ----------------------------------------------------------------------------------

    def on_request(
        self, path: Sequence[ChunkKey], hints: Hints = None, salt: bytes = b"", memory_only: bool = False
    ) -> None:
        if self._asking():
            self._tell("on_request", path[:MOST_CHUNKS], hints, salt, memory_only)

    def prefetch(self, path: Sequence[ChunkKey], terms: Terms = ANY) -> None:
        if self._asking():
            self._tell("prefetch", path[:MOST_CHUNKS], terms)

    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms = ANY) -> Lookup:
        if len(path) > MOST_CHUNKS:
            found = self.lookup(path[:MOST_CHUNKS], holder, terms)
            return attrs.evolve(found, rest=found.rest or Missing(_TOO_LONG))
        session = self._asking()
        late = self._late.pop(holder, None)
        if late is not None and self._asked_for[holder] == path:
            return self._found(holder, late)
        if session is None or not path:
            return Lookup(rest=Missing(self._absence) if path else None)
        path = list(path)
        self._named.add(holder)
        self._asked_for[holder] = path
        self._pending.add(holder)

        def answered(told: ServedLookup) -> None:
            # What was found for another path, or released since, is no longer pinned.
            if self._asked_for.get(holder) is path:
                self._late[holder] = told.found
                self._pending.discard(holder)

        self._ask(session, "lookup", path, holder, terms, seconds=self._waits.lookup, then=answered)
        if (late := self._late.pop(holder, None)) is not None:
            return self._found(holder, late)
        if self._session is None:
            return Lookup(rest=Missing(self._absence))
        return Lookup(arriving=Arriving(len(path), next(iter(self.media), ""), session.silence))

    def _found(self, holder: str, found: Lookup) -> Lookup:
        if found.pending:
            self._pending.add(holder)
        if self._session is not None:
            self._session.stored(self._asked_for[holder][: found.chunks])
        return found

    def still_pending(self, holder: str) -> bool:
        return holder in self._pending

    def ask_again(self, path: Sequence[ChunkKey]) -> str:
        """The server looks in its arenas at every lookup. A second later, it asks a store again for what it lacked."""
        return next(iter(self.media), "") if self._session else ""

    def load_begins(self, frames: Sequence[StoredFrame], holder: str) -> None:
        if frames:
            self._reading.add(holder)
            self._tell("load_begins", list(frames), holder)

    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        if holder in self._reading:
            self._reading.discard(holder)
            self._tell("load_ended", holder, unread, ok)

    def stop_direct_reads(self, tier: str, why: str) -> None:
        """For this engine alone; others may read the tier. What was found so far is looked up again."""
        self._tell("stop_direct_reads", tier, why)
        self._forget()

    def release(self, holder: str) -> None:
        self._pending.discard(holder)
        self._asked_for.pop(holder, None)
        self._late.pop(holder, None)
        if holder in self._named or holder in self._reserved:
            self._named.discard(holder)
            self._reserved.pop(holder, None)
            self._tell("release", holder)

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
        slots: dict[ChunkKey, Slot] = {}
        path, session = path[:MOST_CHUNKS], self._asking()
        parts = parts if len(parts) <= MOST_RESERVED else ()  # all of them, or none
        while session is not None and session.silence < self._waits.others:
            self._named.update(filter(None, [promised_to]))
            self._reserved.setdefault(holder, [])
            more = self._result("reserve", path, holder, salt, parts, promised_to, memory_only)
            if more is None:
                break
            slots |= more
            self._reserved[holder] += more
            if len(more) < MOST_RESERVED:
                return slots
        self.release(holder)  # calls are processed in order, so that nothing is left reserved
        if self._session is not None and self._opened is not None and (lost := self._session.not_stored(path)):
            self._events.append(Event(EventKind.REJECTED, next(iter(self.media)), lost, why=_UNANSWERED))
        return {}

    def commit(
        self, holder: str, checksums: Mapping[ChunkKey, Sequence[int]] | None = None, empty: Collection[ChunkKey] = ()
    ) -> None:
        """Does nothing if what the holder has reserved has ended with its session."""
        keys = self._reserved.pop(holder, None)
        if keys is not None and self._session is not None:
            self._session.stored(key for key in keys if key not in empty)
            self._tell("commit", holder, checksums, list(empty))

    def reserve_self_test_slots(self, holder: str, count: int = 1) -> list[Slot]:
        self._named.add(holder)
        slots = self._result("reserve_self_test_slots", holder, count)
        if slots is None:
            self.release(holder)
        return slots or []

    # -- time passes -------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        self._log.flush()
        if self._session is None and self._clock() >= self._next_try:
            self._connect()
        self._poll()
        self._adopt()
        self._let_attach_again()
        if not self._stepping and self._opened is not None:
            self._stepping = True
            self._tell("step", then=self._stepped)
        events, self._events = self._events, []
        return events

    def _stepped(self, stepped: Any) -> None:
        self._stepping = False
        self._steps += 1
        self._events += stepped.events
        for event in stepped.events:
            if event.kind is EventKind.EVICTED and self._session is not None:
                self._session.evicted(event.keys)
        self.gaps += stepped.lost
        self._jobs = stepped.jobs
        self._pending.difference_update(stepped.settled)
        for holder in stepped.settled:
            self._late.pop(holder, None)  # there is more by now
        if stepped.usage is not None:
            self._usage = stepped.usage

    def drain(self, timeout: float) -> list[Event]:
        deadline = time.monotonic() + timeout
        told = self._steps + 1 + self._stepping  # an answer that covers every call so far
        events = self.step()
        while self._session is not None and (self._steps < told or self._jobs):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                self._session.connection.wait(min(left, 0.01))
            except ProtocolError as error:
                self._lose(str(error))
            events += self.step()
        return events

    def invalidate_all(self, namespace: Namespace) -> None:
        """Until the server has answered, everything is a miss."""
        self._opening = attrs.evolve(self._opening, namespace=namespace)
        self._offered, self._renewing = None, True
        self._send("invalidate_all", namespace, then=functools.partial(self._offer, self._opening))
        self._forget()

    def close(self, timeout: float = 5.0) -> list[Event]:
        """Wait until the server has answered all calls; it continues their work."""
        events = self._events
        if self._session is not None:
            deadline = time.monotonic() + timeout
            with contextlib.suppress(ProtocolError):
                while self._session.owes and (left := deadline - time.monotonic()) > 0:
                    self._session.connection.wait(left)
                    self._session.poll()
            self._leave("this engine has closed it")
        return events

    # -- information -------------------------------------------------------------------------------

    @property
    def jobs(self) -> int:
        """Number of lookups that wait. The server does everything else by itself, whether the engine steps or not."""
        return len(self._pending)

    @property
    def packed(self) -> bool:
        return self._known is not None and self._known.packed

    @property
    def attachment(self) -> int:
        return self._attachment

    @property
    def handles(self) -> dict[str, str]:
        if self._known is None:
            return {}
        session, arenas = self._known.session, self._known.arenas
        return {arena.name: handle_of(self._path, session, number, arena) for number, arena in enumerate(arenas)}

    @property
    def reader_handles(self) -> dict[str, str]:
        return self._known.reader_handles if self._known else {}

    @property
    def media(self) -> Mapping[str, Medium]:  # type: ignore[override]
        return self._known.media if self._known else {}

    @property
    def shared(self) -> Collection[str]:  # type: ignore[override]
        return self._known.shared if self._known else ()

    def describe(self) -> list[str]:
        if self._opened is None:
            return [f"server {self._path}: {self._absence}"]
        return [f"server {self._path}: session {self._opened.session}", *self._opened.about]

    @property
    def _absence(self) -> str:
        """Why nothing can be found now."""
        if self._session is not None and (self._opened is None or self._renewing):
            return f"the server at {self._path} has not opened its tiers yet"
        return self._why or f"the server at {self._path} does not answer"

    def usage(self) -> list[Usage]:
        return list(self._usage) if self._opened else []

    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        found: list[Whereabouts] = []
        for begin in range(0, len(path), _PIECE):
            keys = path[begin : begin + _PIECE]
            found += self._result("whereabouts", keys) or [Whereabouts((), self._absence)] * len(keys)
        return found

    def ask_whereabouts(self, path: Sequence[ChunkKey], then: Callable[[Sequence[Whereabouts]], object]) -> None:
        found: list[Whereabouts] = []

        def ask() -> None:  # a piece after the other: others are served in between
            self._tell("whereabouts", path[len(found) : len(found) + _PIECE], then=add)

        def add(piece: Sequence[Whereabouts]) -> None:
            found.extend(piece)
            then(found) if len(found) == len(path) else ask()

        if self._opened is not None and self._session is not None and self._session.takes_questions:
            ask()
        else:
            then([Whereabouts((), self._absence)] * len(path))

    def pins_by_holder(self) -> Counter[str]:
        return Counter(self._result("pins_by_holder") or {})

    def why_cold(self) -> str:
        return self._opened.cold if self._opened else ""
