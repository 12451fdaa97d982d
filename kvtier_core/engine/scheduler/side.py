"""The scheduler side: it knows keys and requests and owns the stack, but sees no bytes and no engine's own classes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import open_token_database
from kvtier_core.engine.messages import StepPlan, Transfer
from kvtier_core.engine.request_view import Bypass, KVIdentity, RequestView
from kvtier_core.engine.scheduler.audit import Audits
from kvtier_core.engine.scheduler.handovers import Handovers
from kvtier_core.engine.scheduler.loads import Loads
from kvtier_core.engine.scheduler.provenance import Trust
from kvtier_core.engine.scheduler.requests import Match, Requests, RequestState
from kvtier_core.engine.scheduler.self_test_gate import SelfTestGate
from kvtier_core.engine.scheduler.steering import PINNED, steering
from kvtier_core.engine.scheduler.storing import Storing
from kvtier_core.engine.scheduler.waiting import Waiting
from kvtier_core.engine.starvation import Starvation
from kvtier_core.engine.step import BlockTables, Step, StepResult
from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import TokenDatabase
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import Printable
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import Arriving, Declined, LoadLimit, Lookup, TooSmall
from kvtier_core.telemetry.event_log import EventLog
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.telemetry.status_page import StatusPage, sources
from kvtier_core.types import ChunkKey, Event, EventKind, Namespace
from kvtier_core.work.io_pool import run

logger = logging.getLogger("kvtier")

#: Seconds without an event after which the engine need not keep stepping for transfers: a tier may hang.
_STALL_TIMEOUT = 5.0

#: Seconds between two queries for KV that another engine has just computed and does not show yet; or this share of the
#: time that the request has waited, if that is longer: some stores charge for queries.
_ASK_AGAIN, _ASK_AGAIN_SHARE = 0.025, 0.25

_WITHHELD, _MEMORY_ONLY = "it asked to store nothing", "it asked to be stored in memory only"

#: Seconds that a step which computes nothing waits for the I/O threads. Without the wait the engine would immediately
#: step again and take the GIL from them.
_IDLE_WAIT = 1e-3


class SchedulerSide(ProcessBound, closing={"close": lambda: None, "abandon": lambda: None}):
    """Call every method on the scheduler's thread, which owns the stack.

    The engine calls `arrived` for each request, `match` and `admitted` when it is about to start it, `finished` when it
    has ended; `plan` before each step, `progress` and `step_ended` after it. Whatever is uncertain is a miss.

    With draft layers the KV of a position also depends on ``lookahead`` tokens after it. So does the key of a chunk.
    """

    def __init__(
        self,
        config: StackConfig,
        manager: Stack,
        namespace: Namespace,
        layout: ChunkLayout,
        *,
        lookahead: int = 0,
        loads: bool = True,
        stores: bool = True,
        observers: Observers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``loads`` and ``stores``: may this engine load, and store? ``clock`` returns seconds."""
        self.manager = manager
        self.events = EventLog(observers or Observers(), clock)
        #: Called with a request's id, keys of its path, and the number of their first chunk: before these chunks are
        #: loaded for it, and when a step completes them, before they are stored.
        self.path_listeners: list[Callable[[str, Sequence[ChunkKey], int], None]] = []
        self.namespace = self._first_namespace = namespace
        self._config, self._layout = config, layout
        self.chunk_tokens = layout.tokens  #: of a chunk
        self._lookahead = lookahead
        self._may_load, self._may_store = loads, stores
        self._clock = clock
        self._self_test = SelfTestGate(manager, layout)
        self._requests = Requests(manager, self._open_database(), layout, lookahead, clock)
        self._loads = Loads(manager, layout)
        self._audits = Audits(manager, layout, config.audit_every, lookahead)
        self._handovers = Handovers(manager, layout, clock, self.events.tell, lent=config.server is not None)
        self._waiting = Waiting(config, layout.tokens, clock)
        parts = self._requests, self._handovers, self._waiting, self._tell_of_path
        self._stores = Storing(manager, layout, *parts, lookahead=lookahead, save_decode=config.save_decode)
        self._steering = steering()(manager, layout.tokens, self._name, clock)
        questions = self._steering.why_not, self._steering.answer
        self.status = StatusPage(self.events.readings, manager.usage, *questions, clock)
        self._starvation = Starvation("scheduler", clock)
        self._stepped = False  # has the stack been stepped since the last plan?
        self._logged_stall: float | None = None
        self.epoch = 0  #: number of times that the weights may have changed

    def describe(self) -> Iterator[str]:
        """The stored tokens of each group of layers, and where requests can continue; empty if everywhere."""
        return self._stores.boundaries.describe() if self._stores.boundaries else iter(())

    # -- a request arrives -----------------------------------------------------------------------------

    def track(self, view: RequestView) -> RequestState:
        """Note a request, so that it can be bypassed before its first `match`. May be repeated."""
        is_new = self._requests.get(view.request_id) is None
        state = self._requests.track(view)
        if is_new:
            why = _MEMORY_ONLY if view.memory_only else ""
            self._tell_of(EventKind.ARRIVED, state, keys=tuple(state.path), why=why, traceparent=view.traceparent)
        return state

    def arrived(self, view: RequestView) -> None:
        """A request joins the engine's queue: its chunks in lower tiers are promoted while it waits there."""
        state = self.track(view)
        if not self._why_no_lookup(state):
            keys = self._requests.keys(state, self._loadable(view))
            self.manager.prefetch(keys, self._loads.terms(state, self._waiting.limit(state)))

    def bypass(self, request_id: str, bypass: Bypass) -> None:
        """Look up and store nothing more for a request: its KV may not match its keys."""
        if state := self._requests.get(request_id):
            state.bypass = bypass

    def still_waits(self, request_id: str, tokens: int, computed: int) -> bool:
        """Would `match` return None again for a request of ``tokens`` tokens? If not, call it.

        Cheap: thousands of requests may wait at the same time.
        """
        state = self._requests.get(request_id)
        if state is None or state.wait.asked is None or state.match.computed != computed or state.view.tokens != tokens:
            return False
        self._step_stack()
        if state.bypass or self._self_test.failure:
            return False
        late = state.late.pending and self._clock() < state.late.asks_again
        if not late and not self.manager.still_pending(state.holder):
            return False
        waits = self._waiting.goes_on(state)
        if waits:
            self._loads.asked(state)
        return waits

    def match(self, view: RequestView, computed: int) -> int | None:
        """How many tokens after the first ``computed`` can be loaded. None: ask again in a later step.

        The engine may ask as often as it likes, until it calls `admitted`.
        """
        state = self.track(view)
        self._waiting.asked(state)
        state.match, state.late.pending = Match(computed), False
        self._audits.drop(state)
        if reason := self._why_no_lookup(state):
            state.match.reason = reason
            self._loads.release(state)
            return 0
        self._step_stack()
        first = computed // self.chunk_tokens
        keys = self._requests.keys(state, self._loadable(view, computed))[first:]
        if view.computed_elsewhere and self._clock() >= state.late.asks_again:
            pause = max(_ASK_AGAIN, _ASK_AGAIN_SHARE * sum(state.wait.seconds.values()))
            state.late.tier, state.late.asks_again = self.manager.ask_again(keys), self._clock() + pause
        found = self._loads.find(state, keys, self._waiting.limit(state))
        state.match.shared, state.match.left = first + found.chain, found.rest
        if not self._self_test.is_open and not self._self_test.slots:
            self._loads.release(state)  # its slots may be those that the self-test lacks
        awaited = self._with_late(state, found)
        waits = awaited.pending or (found.slots and not self._self_test.is_open)
        if waits and self._waiting.allows(state, awaited):
            return None
        end = (first + found.chunks) * self.chunk_tokens
        if not found.slots or end <= computed or not self._self_test.is_open:
            state.match.reason = self._why_no_hit(keys, found)
            return 0
        state.match.found = found
        if end - self.chunk_tokens > computed and self._audits.begin(state, keys, found):
            end -= self.chunk_tokens
        return end - computed

    def shared_tokens(self, request_id: str) -> int:
        """How many tokens of a request others have stored, as `match` found, even if it cannot continue there."""
        state = self._requests.get(request_id)
        return state.match.shared * self.chunk_tokens if state else 0

    def admitted(
        self, view: RequestView, tables: BlockTables, tokens: int, *, approximate: int = 0, remark: str = ""
    ) -> None:
        """The engine allocated the request's blocks, and wants to load ``tokens`` of those that `match` offered.

        Its connector fills ``approximate`` more with KV that is never stored. ``remark`` goes into the log line.
        """
        state = self.track(view)
        self.events.tell(self._waiting.end(state, tokens))
        state.admitted = view.tokens
        if not view.computed_tokens:  # otherwise it returns from a load
            state.trust = Trust()
        computed = view.computed_tokens or state.match.computed
        self._stores.provenance.allocated(tables, computed)
        if tokens:
            first = state.match.computed // self.chunk_tokens
            self._tell_of_path(state, first, first + state.match.found.chunks)
            loaded = self._loads.begin(state, tables, tokens)
            self._stores.provenance.loaded(tables, loaded, self._requests.ahead(state))
        else:
            self._loads.release(state)
            self._stores.not_loaded(tables, computed)
        if not state.logged:
            state.logged = True
            self._log_hit(state, tokens + approximate, remark)
            self._requests.matched(state)
            if not tokens:
                self._count(state, {})

    def load_limit(self, state: RequestState) -> LoadLimit | None:
        """The limit on the cost of another load for a request that waits; None if there is none."""
        return self._waiting.limit(state)

    @property
    def loads_nothing(self) -> str:
        """Why no request is given anything that the tiers hold; empty if some may be."""
        return self._self_test.failure if self._may_load else "this engine is configured to store only"

    @property
    def storing(self) -> set[ChunkKey]:
        """Chunks that are being stored."""
        return self._stores.jobs.keys

    def sources(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the load that was just admitted, by the tier that supplied them."""
        state = self._requests.get(request_id)
        return state.load.sources if state else {}

    # -- a step ----------------------------------------------------------------------------------------

    def plan(self, step: Step) -> StepPlan:
        """The plan of this step for the workers."""
        if step.computes_nothing:
            self.drain(_IDLE_WAIT)
        else:
            self.events.record(self.manager.step())
        self._handovers.step()
        self._steering.step()
        self._starvation.look()
        self.events.watch(self.manager.usage, now=step.computes_nothing)
        self.status.step()
        self._stepped = False
        self._waiting.step_planned(len(step.requests), self._requests.scheduled(step.requests))
        self._loads.release_forgotten()
        stores_to_fence = self._stores.to_fence(step)
        if self._self_test.renew():
            self._loads.fail_planned()
            self._audits.drop_all()
        may_store = self._may_store and not self._self_test.failure
        stores: list[tuple[int, Transfer]] = []
        audits: list[tuple[int, Transfer]] = []
        for scheduled in step.requests:
            if state := self._requests.get(scheduled.request_id):
                stores += self._stores.plan(state, scheduled, step, may_store=may_store)
                audits += self._audits.plan(state, step)
        testing = bool(self._self_test.slots)
        return StepPlan(
            attachment=self._self_test.attachment,
            arenas=tuple(self.manager.handles.values()) if testing else (),
            reader_handles=self.manager.reader_handles if testing else {},
            layout=attrs.evolve(self._layout, packed=self.manager.packed) if testing else None,
            self_test_slots=self._self_test.slots,
            loads=self._loads.take_planned(),
            stores=tuple(stores),
            stores_to_fence=stores_to_fence,
            failed_loads=self._loads.take_impossible(),
            audits=tuple(audits),
            epoch=self.epoch,
        )

    def progress(self, result: StepResult) -> None:
        """Process the progress of the workers."""
        if self._stores.provenance.trusts_any(result.invalid_blocks):
            self._stores.distrust_all()
        if result.progress:
            if how := result.progress.changed.get(self.epoch):
                logger.warning("kvtier: the weights have changed; stored KV is invalidated: %s", how)
                self.invalidate_all()
            if result.progress.off:
                self._self_test.end(result.progress.off)
            self._self_test.record(result.progress)
            self._stores.jobs.record(result.progress)
            self._end_audits(self._audits.record(result.progress.audits))
            self._loads.note_unread(result.progress.unread)
        failed = self._loads.under_way(result.failed_loads)
        for request_id in self._loads.under_way(result.ended_loads) - failed:
            if state := self._requests.get(request_id):
                loaded = state.loaded_from(self._layout, self._clock() - state.load.begun)
                self.events.record([*self._waiting.loaded(state), *loaded])
                self._count(state, state.load.sources)
        self._loads.end(result.ended_loads, failed)
        for request_id in failed:
            if state := self._requests.get(request_id):
                state.load.failed, state.logged = True, False

    def step_ended(self) -> None:
        """The oldest step that was planned has ended. Called once for each."""
        self.events.tell(self._waiting.step_ended())

    def drain(self, timeout: float) -> None:
        """Wait until nothing is in flight in the stack, at most ``timeout`` seconds."""
        self.events.record(self.manager.drain(timeout))

    # -- endings ---------------------------------------------------------------------------------------

    def finished(self, view: RequestView, reason: str) -> int:
        """The request has ended, or was aborted, and its blocks are free. ``reason`` goes into its last event.

        Stores of its blocks may be under way: a later step fences them before it overwrites the blocks. Returns the
        number of tokens of its prompt that are kept for the engine that continues it; 0 if none does.
        """
        state, kept = self._requests.finish(view.request_id), 0
        whole = self._requests.loadable(view.prompt_tokens)
        prompt = 0 if view.memory_only else min(whole, view.most_stored)
        if state:
            self._stores.provenance.look_ahead(state.trust, self._requests.ahead(state))
            if not view.continued_elsewhere:
                self._handovers.drop(state)
            elif state.bypass or not prompt:
                why = state.bypass.reason if state.bypass else _MEMORY_ONLY if view.most_stored else _WITHHELD
                self._handovers.refuse(state, why, self._requests.chunks(whole))
            else:
                path = self._requests.keys(state, prompt)
                kept = self._handovers.hand_over(state, path, self._waiting.limit(state))
            self._loads.release(state)
            self._audits.drop(state)
            self._tell_of(EventKind.FINISHED, state, seconds=self._clock() - state.since, why=reason)
            if view.withheld:
                tier = next(iter(self.manager.media), "")
                self.events.tell([Event(EventKind.WITHHELD, tier, tokens=view.withheld, request=state.name)])
        if not self._requests:  # there may be no further step to report it in
            self.events.watch(self.manager.usage, now=True)
        self.status.step()
        return kept

    def busy(self) -> bool:
        """Must the engine keep stepping because transfers are under way, or self-tests? False if they seem to hang."""
        if self._self_test.wants_steps():
            return True
        if not (self._stores.jobs or self._loads or self.manager.jobs):
            return False
        if self._clock() - self.events.last_event < _STALL_TIMEOUT:
            return True
        if self._logged_stall != self.events.last_event:  # each stall is logged once
            self._logged_stall = self.events.last_event
            self._log_pins()
        return False

    def invalidate_all(self) -> bool:
        """Open a new epoch, in which nothing that was stored before is found. False if a load is under way."""
        self.epoch += 1
        self.namespace = self._first_namespace.renewed()
        self.manager.invalidate_all(self.namespace)
        self._steering.end()
        self._handovers.release_all()
        self._audits.drop_all()
        # The KV that these requests have computed belongs to the old epoch, and what they will compute depends on it.
        self._requests.reset(self._open_database(), Bypass("it began before the cache was reset"))
        self._stores.distrust_all()
        return not self._loads

    def close(self) -> None:
        """Let stores in flight finish for some seconds, then close the stack and log the totals."""
        self.status.close()
        self._steering.end()
        if self.namespace is not self._first_namespace:
            self.manager.invalidate_all(self._first_namespace)  # no other process could find a later epoch's
        self.events.record(self.manager.close())
        self.events.log_totals()
        # Requests that were unfinished when the engine stopped may have pins: that is not an error.
        self._log_pins(self._loads.holders.union(state.holder for state in self._requests))
        self.events.close()

    def abandon(self) -> None:
        """Close everything that a failed side has opened. What does not close is kept until the process ends."""
        run(self.status.close)
        run(self.manager.close)
        run(self.events.close)

    # -- inside ----------------------------------------------------------------------------------------

    def _end_audits(self, events: Sequence[Event]) -> None:
        """Store and load nothing more if a stored chunk is not what the engine computes."""
        self.events.record(events)
        if wrong := next((event for event in events if event.kind is EventKind.CORRUPT), None):
            key, identity = wrong.keys[0].hex()[:8], self.namespace.digest.hex()[:8]
            stored = f"{wrong.tier} has under {key} of identity {identity}"
            why = f"the KV that {stored} is not what this engine computes: {wrong.why}"
            self._self_test.end(f"{wrong.request}: {why}")

    def _tell_of(self, kind: EventKind, state: RequestState, **known: Any) -> None:
        self.events.tell([Event(kind, "", request=state.name, tokens=state.view.tokens, **known)])

    def _tell_of_path(self, state: RequestState, first: int, end: int) -> None:
        for listener in self.path_listeners:
            listener(state.view.request_id, state.path[first:end], first)

    def _open_database(self) -> TokenDatabase:
        return open_token_database(self._config, self.namespace)

    def _why_no_lookup(self, state: RequestState) -> str:
        """Why nothing is looked up for a request; empty if something is."""
        if self.loads_nothing:
            return self.loads_nothing
        if state.bypass:
            return state.bypass.reason
        if state.load.failed:
            return "its load failed"
        return "" if state.view.most_loaded else "it asked not to read cached prefixes"

    def _why_no_hit(self, keys: Sequence[ChunkKey], found: Lookup) -> str:
        """Why a lookup found nothing that can be loaded now."""
        chunk, ahead = self.chunk_tokens, self._lookahead
        if not keys and ahead:
            return f"less than one chunk of {chunk} tokens to look up before the {ahead} that drafts read"
        if not keys:
            return f"less than one chunk of {chunk} tokens to look up"
        if not found.slots and not found.pending:
            return found.miss_reason
        if not self._self_test.is_open:
            return "the self-test has not finished"
        return "it was not promoted in time"

    def _loadable(self, view: RequestView, computed: int = 0) -> int:
        """The number of tokens whose chunks may be loaded, of an engine that has the first ``computed``."""
        return min(self._requests.loadable(view.tokens), computed + view.most_loaded)

    def _step_stack(self) -> None:
        """Process what the threads did during the last step, before the first request of the next one is matched."""
        if not self._stepped:
            self._stepped = True
            self.events.record(self.manager.step())

    def _log_hit(self, state: RequestState, tokens: int, remark: str) -> None:
        match = state.match
        why = match.reason + (self._waiting.explain(state, tokens) if tokens else "") + remark
        if state in self._audits:
            why += "; the next chunk is audited"
        if state.view.withheld:
            most = state.view.most_stored
            why += f"; it asked to store {most} tokens" if most else f"; {_WITHHELD}"
        if state.view.memory_only and state.view.most_stored:
            why += f"; {_MEMORY_ONLY}"
        asked, tiers = state.view.tokens, dict(state.load.sources if tokens else {})
        told = {"tokens": asked, "loaded": tokens, "engine_had": match.computed, "tiers": tiers, "why": why}
        if self._config.log_requests in ("all", "hits" if tokens else "misses"):
            logger.info("kvtier: %s: %d tokens: %s", state.name, asked, sources(told))
        self.status.note(state.name, waited=state.wait.total, **told)

    def _count(self, state: RequestState, hits: Mapping[str, int]) -> None:
        """Count a request's tokens: after a load that ended well, the ``hits`` of each tier."""
        asked = bool(hits) or not self._why_no_lookup(state)
        ago = self._clock() - state.load.begun
        self.events.tell(state.looked_up(list(self.manager.media), hits, self.chunk_tokens, asked=asked, ago=ago))
        salt = state.view.identity.salt if isinstance(state.view.identity, KVIdentity) else None
        self.status.count(salt, state.view.tokens, state.view.tokens - state.match.computed, sum(hits.values()))

    def _name(self, tokens: Sequence[int], cache_salt: str) -> tuple[list[ChunkKey], bytes]:
        """The keys of a prompt that no request has, and its salt."""
        identity = KVIdentity.of(cache_salt)
        state = RequestState(RequestView("", tokens, len(tokens), identity), Printable(""), 0.0, "")
        return self._requests.keys(state, len(tokens)), identity.salt

    def _with_late(self, state: RequestState, found: Lookup) -> Lookup:
        """``found``, and what another engine has just computed for the request and no tier has, as arriving chunks."""
        here = state.match.computed // self.chunk_tokens + found.chunks + found.pending
        tokens = min(state.view.computed_elsewhere, self._loadable(state.view, state.match.computed))
        late = self._requests.chunks(tokens) - here
        fits = not isinstance(found.rest, Declined | TooSmall)
        unasked = state.late.tier in ("", *self._loads.terms(state, None).without)
        if late <= 0 or not fits or unasked or state.view.preemptions:
            return found
        state.late.pending = found.arriving is None
        arriving = found.arriving or Arriving(0, state.late.tier)
        return attrs.evolve(found, arriving=attrs.evolve(arriving, chunks=arriving.chunks + late))

    def _log_pins(self, but: Collection[str] = ()) -> None:
        for holder, pins in self.manager.pins_by_holder().items():
            if holder not in self._handovers.holders.union(but) and not holder.startswith(PINNED):
                logger.warning(
                    "kvtier: %s still holds %d slots; a tier is hanging, or this is a bug in kvtier", holder, pins
                )
