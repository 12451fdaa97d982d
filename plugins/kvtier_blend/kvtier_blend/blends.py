"""Decides which requests are blended, and from which chunks. For the scheduler's thread."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvtier_blend.content_index import ContentIndex, Moved
from kvtier_blend.messages import Order
from kvtier_blend.plan import Plan, Refused, make_plan, stretches
from kvtier_blend.settings import SALT, BlendSettings
from kvtier_core.config.quality import ReportRefused
from kvtier_core.engine.messages import Transfer
from kvtier_core.engine.request_view import ANY_MEDIUM, KVIdentity, RequestView
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.step import BlockTables
from kvtier_core.outside import printable
from kvtier_core.stack.outcomes import Declined, LoadLimit, Terms, TooSmall
from kvtier_core.types import ChunkKey, Event, EventKind, Slot

logger = logging.getLogger("kvtier")

#: Steps for which a request that waits keeps its pins if the engine does not ask about it again.
_KEPT_STEPS = 2

#: A lookup with this limit brings nothing into an arena.
_NOTHING = LoadLimit(0.0, 0.0)

#: An order, and the load that goes before it, with its name.
Planned = tuple[Order, tuple[str, Transfer]]


@attrs.define
class Offer:
    """What a request may be given."""

    start: int  #: tokens that it has then: those in the engine's own cache, and its exact prefix
    tokens: int  #: its own, when this was made
    chunks: Sequence[Moved]  #: that are known
    until: float  #: when its wait for chunks below the arenas ends
    asked: int = 0  #: the step in which the engine asked last
    holders: list[str] = attrs.field(factory=list)  #: of the pins of its slots
    slots: dict[int, tuple[Slot, str]] = attrs.field(factory=dict)  #: by the place of the chunk; and its tier
    plan: Plan | None = None
    has_exact: bool = False  #: is a part of the load exact?

    def by_tier(self) -> Mapping[str, int]:
        """The moved tokens, by the tier that supplied them."""
        assert self.plan is not None, "it was offered"
        counts = Counter(self.slots[chunk.at][1] for chunk in self.plan.chunks)
        shares = {tier: self.plan.moved * chunks // len(self.plan.chunks) for tier, chunks in counts.items()}
        first = next(iter(shares))
        return shares | {first: shares[first] + self.plan.moved - sum(shares.values())}


class Blends:
    """The requests that are blended, from the engine's first question until their loads have ended."""

    def __init__(
        self,
        settings: BlendSettings,
        side: SchedulerSide,
        block_tokens: int,
        load_wait: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """A request waits at most ``load_wait`` seconds for chunks below the arenas; ``clock`` returns seconds."""
        self.index = ContentIndex(side.chunk_tokens)
        self._fault = "the test of this engine has not finished"  # why nothing is blended; empty: everything may be
        self._quality = ""  # how far answers differ; empty: no report says so
        weights = dict(side.namespace.facts).get("weights", "")
        try:
            self._quality = settings.check(weights, side.chunk_tokens)
        except ReportRefused as error:
            self._refuse_all(str(error))
        self._settings, self._side = settings, side
        self._block_tokens, self._load_wait, self._clock = block_tokens, load_wait, clock
        self._epoch, self._step, self._last_load = side.epoch, 0, 0
        self._secret = secrets.token_hex(8)  # no client can name its request like a load
        self._offers: dict[str, Offer] = {}  # by request, until it is admitted
        self._loading: dict[str, Offer] = {}  # by request
        self._failed: set[str] = set()  # requests whose blending failed
        self._refusals: dict[str, str] = {}  # by request, until it is admitted
        self._planned: list[Planned] = []
        self._impossible: list[str] = []  # requests that were promised KV which they cannot get

    def learn(self, view: RequestView, keys: Sequence[ChunkKey], first: int) -> None:
        """Chunks of a request are loaded or stored, from number ``first`` on. Other prompts may hold them, too."""
        if isinstance(view.identity, KVIdentity):
            size, state = self._side.chunk_tokens, self._side.track(view)
            for number, key in enumerate(keys, first):
                if key not in state.unwanted:
                    tokens = view.token_ids[number * size : (number + 1) * size]
                    self.index.learn(view.identity.salt, tokens, state.path, number)

    def tested(self, fault: str) -> None:
        """The worker has tested whether this engine can blend, and found a ``fault``, or none."""
        if fault:
            self._refuse_all(f"this engine cannot blend: {fault}")
        elif self._quality:
            self._fault = ""
            logger.info("kvtier: requests are blended if they ask for it; their answers may differ: %s", self._quality)

    def offer(self, view: RequestView, exact: int, *, is_apart: bool) -> int | None:
        """How many tokens can be filled after the ``exact`` ones that kvtier offers. None: ask again in a later step.

        ``is_apart``: does the engine keep the request's blocks apart from those of requests that are not blended?
        """
        state = self._side.track(view)
        if self._side.epoch != self._epoch:  # the keys have changed
            self._epoch = self._side.epoch
            self.index.clear()
            for request_id in list(self._offers):
                self._drop(request_id)
        start = state.match.computed + exact
        if why := self._why_not(state, start, is_apart):
            return self._refuse(view, why)
        offer = self._offers.get(view.request_id)
        if offer is None or (offer.start, offer.tokens) != (start, view.tokens):
            self._drop(view.request_id)
            found = self.index.find(state.identity.salt, view.token_ids, start)
            offer = Offer(start, view.tokens, found, self._clock() + self._load_wait)
            self._offers[view.request_id] = offer
            plan = self.plan_of(offer)
            if isinstance(plan, Refused):
                return self._compute(state, offer, plan)
        offer.asked = self._step
        pending = any(map(self._side.manager.still_pending, offer.holders))
        if not pending:
            pending, _ = self._look_up(state, offer, self._side.load_limit(state))
        if pending and self._clock() < offer.until:
            return None
        offer.chunks = [chunk for chunk in offer.chunks if chunk.at in offer.slots]
        plan = self.plan_of(offer)
        if isinstance(plan, Refused):
            return self._refuse(view, plan.why)
        offer.plan = plan
        return plan.end - start

    def admitted(self, view: RequestView, tables: BlockTables, tokens: int, *, is_apart: bool) -> int:
        """The engine wants to load ``tokens`` tokens into these blocks. Returns how many of them are exact."""
        offer, state = self._offers.pop(view.request_id, None), self._side.track(view)
        refusal = self._refusals.pop(view.request_id, "")
        remark = "; the engine's own cache may hold blended KV" if is_apart and state.match.computed else ""
        if offer is None or offer.plan is None or not tokens:
            self._release(offer)
            remark += refusal and f"; not blended: {refusal}"
            self._side.admitted(view, tables, tokens, remark=remark)
            return tokens
        plan, exact = offer.plan, offer.plan.start - state.match.computed
        if tokens != exact + plan.end - plan.start:
            self._release(offer)
            self._impossible.append(view.request_id)
            self._side.admitted(view, tables, 0, remark="; not blended: the engine asked for another number of tokens")
            return 0
        remark += f"; blended: {plan.moved} moved, {plan.computed} recomputed; the answer may differ"
        self._side.admitted(view, tables, exact, approximate=plan.end - plan.start, remark=remark)
        self._loading[view.request_id], offer.has_exact = offer, exact > 0
        self._planned.append(self._order(view, offer, plan, tables[0], exact))
        by_number = sorted((chunk.known for chunk in plan.chunks), key=lambda known: known.number)
        for known in {id(known.path): known for known in by_number}.values():  # the last one of each earlier prompt
            # What others may have stored in memory only stays there.
            self._side.manager.on_request(known.path[: known.number + 1], salt=state.identity.salt, memory_only=True)
        return exact

    def ended(self, requests: Collection[str], failed: Collection[str]) -> None:
        """The loads of these requests have ended; what ``failed`` is computed."""
        for request_id in self._loading.keys() & requests:
            offer = self._loading.pop(request_id)
            self._release(offer)
            if request_id in failed:
                self._failed.add(request_id)
            else:
                name = printable(request_id)
                by_tier = offer.by_tier().items()
                told = [Event(EventKind.BLENDED, tier, tokens=tokens, request=name) for tier, tokens in by_tier]
                self._side.events.tell(told)

    def sources(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the load that was just admitted, by tier. Tokens computed during the load have no tier."""
        offer = self._loading.get(request_id)
        if offer is None or offer.plan is None:
            return self._side.sources(request_id)
        exact = self._side.sources(request_id) if offer.has_exact else {}
        return Counter(exact) + Counter(offer.by_tier()) + Counter({"": offer.plan.computed})

    def finished(self, request_id: str) -> None:
        """The request has ended; its load may be under way."""
        self._drop(request_id)
        self._refusals.pop(request_id, None)
        self._failed.discard(request_id)

    def take_planned(self) -> tuple[list[Planned], list[str]]:
        """What this step begins: the orders with their loads, and requests whose loads are impossible."""
        self._step += 1
        for request_id in [each for each, offer in self._offers.items() if offer.asked < self._step - _KEPT_STEPS]:
            self._drop(request_id)
        planned, self._planned = self._planned, []
        impossible, self._impossible = self._impossible, []
        return planned, impossible

    # -- inside ------------------------------------------------------------------------------------------

    def _refuse_all(self, why: str) -> None:
        self._fault = why
        logger.warning("kvtier: no request is blended: %s", why)

    def _why_not(self, state: RequestState, start: int, is_apart: bool) -> str:
        """Why a request is not blended; empty if it may be."""
        view = state.view
        if self._fault:
            return self._fault
        if not is_apart:
            return f"its cache_salt does not begin with {SALT}"
        if self._side.loads_nothing or state.bypass:
            return "it is not looked up"
        if state.load.failed or view.request_id in self._failed:
            return "its load failed"
        if view.request_id in self._loading:
            return "its load is in progress"
        if view.most_loaded < view.tokens or view.media != ANY_MEDIUM:
            return "it says what may be loaded"
        if view.continued_elsewhere or view.computed_elsewhere:
            return "another engine computes a part of it"
        if state.audits and state.match.found.chunks:
            return "its hit is audited"
        if start % self._block_tokens:
            return "the engine has a part of a block"
        return ""

    def plan_of(self, offer: Offer) -> Plan | Refused:
        """The plan for the chunks of an offer."""
        size = self._side.chunk_tokens
        sizes = {"chunk_tokens": size, "block_tokens": self._block_tokens}
        return make_plan(offer.chunks, offer.start, offer.tokens, self._settings, **sizes)

    def _look_up(self, state: RequestState, offer: Offer, limit: LoadLimit | None) -> tuple[bool, list[Moved]]:
        """Find slots of an offer's chunks. Are some on their way? And which chunks does a tier have?"""
        size, manager = self._side.chunk_tokens, self._side.manager
        terms = Terms(limit, state.identity.salt, not_direct=tuple(manager.media))
        self._release(offer)
        offer.slots, pending, held = {}, False, []
        for stretch in stretches(offer.chunks, size):
            while stretch:
                holder = f"{state.holder} blended {len(offer.holders)}"
                offer.holders.append(holder)
                found = manager.lookup([chunk.known.key for chunk in stretch], holder, terms)
                pending |= bool(found.pending)
                for chunk, slot, tier in zip(stretch[: found.exact], found.slots, found.sources, strict=False):
                    if isinstance(slot, Slot):
                        offer.slots[chunk.at] = slot, tier
                known = found.chunks + found.pending
                if isinstance(found.rest, Declined | TooSmall):
                    known += found.rest.chunks
                for lost in stretch[known : known + 1]:
                    self.index.forget(lost.known)
                held += stretch[:known]
                stretch = stretch[known + 1 :]
        return pending, held

    def _order(self, view: RequestView, offer: Offer, plan: Plan, blocks: Sequence[int], exact: int) -> Planned:
        """The chunks are loaded into the request's own blocks, one after the other, and then moved."""
        size = self._side.chunk_tokens
        self._last_load += 1
        load = f"blend {self._secret} {self._last_load}"
        own = blocks[plan.start // self._block_tokens : plan.end // self._block_tokens]
        each = size // self._block_tokens
        pages = tuple((tuple(own[at : at + each]),) for at in range(0, len(plan.chunks) * each, each))
        order = Order(
            view.request_id,
            frozenset({load, view.request_id} if exact else {load}),
            plan.start,
            plan.end,
            tuple((chunk.at, chunk.known.number * size) for chunk in plan.chunks),
            plan.runs,
            tuple(token for begin, end in plan.runs for token in view.token_ids[begin:end]),
            tuple(blocks[: plan.end // self._block_tokens]),
        )
        return order, (load, Transfer(tuple(offer.slots[chunk.at][0] for chunk in plan.chunks), pages))

    def _compute(self, state: RequestState, offer: Offer, refused: Refused) -> int:
        """Have a request computed. Only new chunks are stored: copies of known ones would displace what others need."""
        if refused.known:
            _, offer.chunks = self._look_up(state, offer, _NOTHING)
            again = self.plan_of(offer)
            known = again.known if isinstance(again, Refused) else ()
            state.unwanted = {state.path[number] for number in known if number < len(state.path)}
        return self._refuse(state.view, refused.why)

    def _refuse(self, view: RequestView, why: str) -> int:
        self._drop(view.request_id)
        self._refusals[view.request_id] = why
        return 0

    def _drop(self, request_id: str) -> None:
        self._release(self._offers.pop(request_id, None))

    def _release(self, offer: Offer | None) -> None:
        if offer:
            for holder in offer.holders:
                self._side.manager.release(holder)
            offer.holders.clear()
