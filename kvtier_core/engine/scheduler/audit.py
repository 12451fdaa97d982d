"""Audits: the engine computes the last chunk of some hits, and the workers compare it with the stored one.

A frame whose bytes are verified may still hold the wrong KV, if something that changes KV is missing from the
identity. Only computing it again shows that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from kvtier_core.engine.messages import Transfer
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.engine.step import Step
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import Printable
from kvtier_core.stack.interface import Lookups
from kvtier_core.stack.outcomes import Lookup, Terms
from kvtier_core.types import ChunkKey, Event, EventKind, Slot


@attrs.define
class _Audit:
    """One chunk that is computed although it is stored."""

    key: ChunkKey
    chunk: int  #: its number in the path of the request
    preemptions: int  #: of the request when this began
    slot: Slot  #: with the stored chunk, pinned
    tier: str
    holder: str  #: of the pin
    request: Printable
    findings: Counter[str | None] = attrs.field(factory=Counter)  #: of the workers so far, as `WorkerProgress.audits`


class Audits:
    """Chooses the hits to audit, and follows each audit to its end."""

    def __init__(self, stack: Lookups, layout: ChunkLayout, every: int | Literal["off"], lookahead: int):
        """One of ``every`` hits is audited, unless there are windows, states, or a ``lookahead`` to later tokens."""
        plain = layout.keeps_every_token and len(layout.parts) == 1 and not lookahead
        self._every = every if plain and every != "off" else 0
        self._stack = stack
        self._layout = layout
        self._hits = 0
        self._numbers = itertools.count(1)
        self._begun: dict[str, _Audit] = {}  # until the engine has computed the chunk, by the request's holder
        self._planned: dict[int, _Audit] = {}  # until all workers have compared it, by number

    def __contains__(self, state: RequestState) -> bool:
        return state.holder in self._begun

    def begin(self, state: RequestState, path: Sequence[ChunkKey], found: Lookup) -> bool:
        """Leave the last chunk of this hit to the engine? If so, it stays pinned until it is compared."""
        if not self._every or found.exact < len(found.slots):
            return False
        if state.audits is None:
            self._hits += 1
            state.audits = self._hits >= self._every
        if not state.audits:
            return False
        skipped, holder = state.match.computed // self._layout.tokens, f"audit of {state.holder}"
        terms = Terms(salt=state.identity.salt, skipped=skipped)
        again = self._stack.lookup(path[: found.chunks], holder, terms)
        if again.chunks < found.chunks or not isinstance(slot := again.slots[-1], Slot):
            self._stack.release(holder)
            return False
        self._hits = 0
        chunk, tier, preemptions = skipped + found.chunks - 1, again.sources[-1], state.view.preemptions
        self._begun[state.holder] = _Audit(state.path[chunk], chunk, preemptions, slot, tier, holder, state.name)
        return True

    def plan(self, state: RequestState, step: Step) -> tuple[tuple[int, Transfer], ...]:
        """If this step completes the chunk that a request was left to compute, the comparison of it."""
        audit = self._begun.get(state.holder)
        if audit is None or (state.trust.tokens or 0) < (audit.chunk + 1) * self._layout.tokens:
            return ()
        if state.bypass or state.view.preemptions != audit.preemptions:  # a preempted request may have loaded it
            self.drop(state)
            return ()
        tables = enumerate(step.block_tables(state.view.request_id))
        stored = self._layout.stored_blocks
        pages = tuple(tuple(table[block] for block in stored(group, audit.chunk)) for group, table in tables)
        number = next(self._numbers)
        self._planned[number] = self._begun.pop(state.holder)
        return ((number, Transfer((audit.slot,), (pages,))),)

    def record(self, found: Mapping[tuple[int, str | None], int]) -> list[Event]:
        """Process what workers have found. Returns an event for each chunk that all of them have compared."""
        events = []
        for (number, finding), workers in found.items():
            if (audit := self._planned.get(number)) is None:
                continue
            audit.findings[finding] += workers
            if audit.findings.total() < self._layout.ranks:
                continue
            del self._planned[number]
            self._stack.release(audit.holder)
            why = next(filter(None, audit.findings), "")
            if why or None not in audit.findings:  # otherwise a worker could not compare it
                kind = EventKind.CORRUPT if why else EventKind.AUDITED
                events.append(Event(kind, audit.tier, (audit.key,), why=why, request=audit.request))
        return events

    def drop(self, state: RequestState) -> None:
        """Compare nothing for a request."""
        if audit := self._begun.pop(state.holder, None):
            self._stack.release(audit.holder)

    def drop_all(self) -> None:
        """Compare nothing that is stored or computed now."""
        for audit in (*self._begun.values(), *self._planned.values()):
            self._stack.release(audit.holder)
        self._begun.clear()
        self._planned.clear()
