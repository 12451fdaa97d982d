"""The requests that the engine has not finished, and the keys of their chunks."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from kvtier_core.engine.request_view import Bypass, KVIdentity, RequestView
from kvtier_core.engine.scheduler.prefill_speed import Computed, pairs
from kvtier_core.engine.scheduler.provenance import Ahead, Trust
from kvtier_core.engine.step import ScheduledRequest
from kvtier_core.interfaces import TokenDatabase
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import Printable, printable
from kvtier_core.stack.interface import Lookups
from kvtier_core.stack.outcomes import Declined, Lookup, Missing, TooSmall
from kvtier_core.telemetry.readings import DECLINED, NOT_ASKED
from kvtier_core.types import KEY_NBYTES, ChunkKey, Event, EventKind

#: BLAKE2b's personalization of keys that also depend on the tokens after a chunk.
_AHEAD = b"kvtier-ahead"


@attrs.define
class Asked:
    """The step in which the engine has asked about a request."""

    until: float = math.inf  #: when the next step was planned, in which the engine may have asked again


@attrs.define
class Match:
    """The last answer to the engine about what it can load."""

    computed: int = 0  #: tokens that it had then
    found: Lookup = attrs.field(factory=Lookup)  #: the offer, from the chunk that contains ``computed`` on
    left: Declined | TooSmall | Missing | None = None  #: why the lookup found no more
    shared: int = 0  #: chunks of its tokens that others had stored, even if it could not load them
    reason: str = ""  #: for the log


@attrs.define
class Wait:
    """The waits of a request, and the tiers that it waited for."""

    asked: Asked | None = None  #: the step in which the engine was last told to wait; None: it need not wait
    since: float = 0.0  #: when this wait began
    until: float = 0.0  #: when its longest permitted wait ends
    tier: str = ""  #: the tier that it waits for; empty: none
    most_chunks: int = 0  #: the most chunks that it waited for together
    seconds: dict[str, float] = attrs.field(factory=dict)  #: by tier, until they are counted
    total: float = 0.0  #: all seconds that it waited, once it is admitted


@attrs.define
class Late:
    """KV that another engine has just computed for a request, and that no tier has yet."""

    pending: bool = False  #: does the request wait for it?
    tier: str = ""  #: the tier that was asked for it again; empty: none can be
    asks_again: float = 0.0  #: when to ask tiers again


@attrs.define
class Load:
    """The last load of a request."""

    begun: float = 0.0  #: when it was planned
    sources: Counter[str] = attrs.field(factory=Counter)  #: tokens, by tier
    frames: dict[str, list[ChunkKey]] = attrs.field(factory=dict)  #: by tier: an arena, or a store that workers read
    failed: bool = False  #: then nothing more is looked up for the request; what it computes is stored


@attrs.define
class RequestState:
    """The state of an unfinished request on the scheduler side."""

    view: RequestView  #: the latest one
    name: Printable  #: its id, for people
    since: float  #: when it was first seen
    holder: str  #: the holder of its pins in the stack; unique, even among requests with the same id
    bypass: Bypass | None = None
    keys: list[ChunkKey] = attrs.field(factory=list)  #: as the token database made them
    path: list[ChunkKey] = attrs.field(factory=list)  #: the same, as the stack knows them
    stored_chunks: int = 0  #: leading chunks that were handed to the stack or found in it
    unwanted: Collection[ChunkKey] = ()  #: chunks of its path that its connector does not want to be stored
    trust: Trust = attrs.field(factory=Trust)
    admitted: int = 0  #: tokens that it had when it was admitted: its prompt, and generated ones if preempted
    logged: bool = False
    audits: bool | None = None  #: is a hit of it to be audited? None: it had none yet
    match: Match = attrs.field(factory=Match)
    wait: Wait = attrs.field(factory=Wait)
    late: Late = attrs.field(factory=Late)
    load: Load = attrs.field(factory=Load)

    @property
    def identity(self) -> KVIdentity:
        """What its KV depends on besides its tokens. Only of a request that is not bypassed."""
        assert isinstance(self.view.identity, KVIdentity), "it is bypassed"
        return self.view.identity

    def loaded_from(self, layout: ChunkLayout, seconds: float) -> list[Event]:
        """An event for each tier, after its load succeeded in ``seconds`` seconds."""
        return [
            Event(
                EventKind.LOADED,
                tier,
                tuple(keys),
                layout.payloads_nbytes(keys),
                seconds=seconds,
                request=self.name,
            )
            for tier, keys in self.load.frames.items()
        ]

    def looked_up(
        self, tiers: Sequence[str], hits: Mapping[str, int], chunk_tokens: int, *, asked: bool, ago: float
    ) -> list[Event]:
        """The outcome for the tokens that the engine lacked, as events that add up: queried = hit + missed + bypassed.

        Call it once, when it is known which of them were loaded. A tier is queried for the tokens that no tier above it
        had. ``tiers`` are all tiers, hottest first; ``hits`` are tokens by tier. Without ``asked`` nothing was looked
        up for the request. The engine was answered ``ago`` seconds ago.
        """
        events: list[Event] = []
        left, answered = self.view.tokens - self.match.computed, time.time() - ago
        unasked = max(0, left - self.view.most_loaded) if asked else left
        for tier in tiers:
            if left <= 0:
                break
            hit = hits.get(tier, 0)
            rest = self.match.left
            here = rest.chunks if isinstance(rest, Declined) and rest.tier == tier else 0
            declined = min(here * chunk_tokens, left - hit - unasked)
            missed = left - hit - declined - unasked
            waited, request = self.wait.total, self.name
            events += [
                Event(kind, tier, tokens=tokens, why=why, seconds=waited, request=request, at=answered)
                for kind, tokens, why in (
                    (EventKind.QUERIED, left, ""),
                    (EventKind.HIT, hit, ""),
                    (EventKind.MISSED, missed, ""),
                    (EventKind.BYPASSED, declined, DECLINED),
                    (EventKind.BYPASSED, unasked, NOT_ASKED),
                )
                if tokens
            ]
            left = missed + unasked
        return events


class Requests:
    """Request states by id. A request is known from its first `track` to its `finish`.

    The KV of a chunk also depends on ``lookahead`` tokens after it. So does its key: without them it has none.
    """

    def __init__(
        self, stack: Lookups, database: TokenDatabase, layout: ChunkLayout, lookahead: int, clock: Callable[[], float]
    ):
        self._stack = stack
        self._database = database
        self.chunk_tokens = layout.tokens  #: tokens of a chunk
        self._lookahead = lookahead
        self._layout = layout
        self._leaves_one = not (layout.keeps_every_token or lookahead)
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request; None if it was never tracked or has finished."""
        return self._states.get(request_id)

    def track(self, view: RequestView) -> RequestState:
        """Note the latest view of a request. The first one tells the stack's policies its path if all may be stored."""
        state = self._states.get(view.request_id)
        if state is None:
            name = printable(view.request_id)
            holder = f"request {name} ({next(self._arrivals)})"
            state = self._states[view.request_id] = RequestState(view, name, self._clock(), holder)
            if not isinstance(view.identity, Bypass) and not view.withheld:
                path, salt = self.keys(state, view.tokens), view.identity.salt
                self._stack.on_request(path, view.hints, salt, memory_only=view.memory_only)
        if isinstance(view.identity, Bypass):
            state.bypass = view.identity
        if view.preemptions != state.view.preemptions:
            state.stored_chunks, state.logged = 0, False
        state.view = view
        return state

    def matched(self, state: RequestState) -> None:
        """Tell the stack's policies about the rest of a request's path: of tokens that may not be stored, only those
        that others have stored.
        """
        view, match = state.view, state.match
        if view.withheld and not state.bypass:
            own, others = self.chunks(view.most_stored), match.shared
            if others <= max(own, match.computed // self.chunk_tokens):
                others = 0
            path = self.keys(state, view.tokens)[: max(own, others)]
            memory_only = view.memory_only or others > 0  # others may have stored theirs in memory only
            self._stack.on_request(path, view.hints, state.identity.salt, memory_only=memory_only)

    def finish(self, request_id: str) -> RequestState | None:
        """Forget a request. Returns its last state; None if it was never tracked."""
        return self._states.pop(request_id, None)

    def scheduled(self, requests: Sequence[ScheduledRequest]) -> Computed:
        """What a step computes: a prompt is the tokens that a request was admitted with."""
        total = sum(request.scheduled for request in requests)
        prompts, compared = 0, 0.0
        for request in requests:
            state = self._states.get(request.request_id)
            if state and (end := min(request.end, state.admitted)) > request.computed:
                prompts += end - request.computed
                compared += pairs(request.computed, end)
        return Computed(prompts, compared, total - prompts)

    def chunks(self, tokens: int) -> int:
        """How many whole chunks have a key if ``tokens`` tokens are known."""
        return max(0, tokens - self._lookahead) // self.chunk_tokens

    def loadable(self, tokens: int) -> int:
        """The number of tokens whose chunks may be loaded. If not all KV is kept, one token is left to compute."""
        return tokens - self._leaves_one

    def keys(self, state: RequestState, tokens: int) -> list[ChunkKey]:
        """Keys of all whole chunks among the first ``tokens`` of a request that is not bypassed; computed once."""
        chunks = self.chunks(tokens)
        if chunks > len(state.keys):
            identity, known = state.identity, len(state.keys)
            extra = identity.extra(self.chunk_tokens)
            state.keys = self._database.keys(
                state.view.token_ids[: chunks * self.chunk_tokens], known=state.keys, salt=identity.salt, extra=extra
            )
            digest = functools.partial(self._digest, state, ahead=self.ahead(state))
            state.path += self._layout.keys(map(digest, range(known, chunks)), identity.tenant)
        return state.path[:chunks]

    def ahead(self, state: RequestState) -> Ahead:
        """What the KV of a request depends on after any number of its tokens."""
        count, size = self._lookahead, self.chunk_tokens
        if not count or isinstance(state.view.identity, Bypass):
            only = state.holder.encode() if count else b""  # what a bypassed request computes is no other's
            return lambda end: only
        extra = functools.cache(functools.partial(state.identity.extra, size))

        def ahead(end: int) -> bytes | None:
            tokens = state.view.token_ids[end : end + count]
            items = [extra().get(chunk, b"") for chunk in range(end // size, (end + count - 1) // size + 1)]
            return struct.pack(f"<{count}I", *tokens) + b"".join(items) if len(tokens) == count else None

        return ahead

    def _digest(self, state: RequestState, chunk: int, ahead: Ahead) -> ChunkKey:
        """The digest of a chunk, and of what follows it as far as its KV depends on that."""
        key, after = state.keys[chunk], ahead((chunk + 1) * self.chunk_tokens)
        assert after is not None, "it has no key"
        return ChunkKey(hashlib.blake2b(key + after, digest_size=KEY_NBYTES, person=_AHEAD).digest()) if after else key

    def reset(self, database: TokenDatabase, bypass: Bypass) -> None:
        """Name chunks by another token database from now on, and bypass every request that is under way."""
        self._database = database
        for state in self._states.values():
            state.bypass = bypass
