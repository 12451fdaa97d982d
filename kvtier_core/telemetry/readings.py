"""The totals of one engine's events. Every log line, status page and endpoint shows these readings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from kvtier_core.types import Event, EventKind, Usage, size

#: Reasons why tokens are bypassed that a tier has, or may have.
DECLINED = "sooner computed than loaded"
NOT_ASKED = "not looked up"

#: Reasons why tokens are not kept for the engine that continues their prompt.
BYPASSED = "bypassed"
TOO_LONG = "prompts for other engines take half of the arena at most"
NO_ROOM = "no room in the arena, or it was not stored"

_OF_TOKENS = {
    EventKind.QUERIED: "kvtier_query_tokens",
    EventKind.HIT: "kvtier_hit_tokens",
    EventKind.MISSED: "kvtier_miss_tokens",
    EventKind.BYPASSED: "kvtier_bypass_tokens",
    EventKind.HANDED_OVER: "kvtier_handed_over_tokens",
    EventKind.NOT_KEPT: "kvtier_not_kept_tokens",
    EventKind.WITHHELD: "kvtier_withheld_tokens",
    EventKind.BLENDED: "kvtier_blended_tokens",
}
_OPERATIONS = {
    EventKind.STORED: "store",
    EventKind.LOADED: "load",
    EventKind.WRITTEN: "write",
    EventKind.READ: "read",
    EventKind.ASKED: "ask",
    EventKind.EVICTED: "delete",
}
_WITH_REASON = {EventKind.EVICTED: "kvtier_evicted_chunks", EventKind.REJECTED: "kvtier_rejected_chunks"}
_OF_SECONDS = {EventKind.AVOIDED: "kvtier_avoided_seconds", EventKind.WAITED: "kvtier_waited_seconds"}


class Reading(NamedTuple):
    """A value for one metric: to be added to a counter, observed by a histogram, shown by a gauge."""

    metric: str
    labels: tuple[str, ...]
    value: float


@attrs.define
class TierReadings:
    """Totals of one tier."""

    chunks: Counter[EventKind] = attrs.field(factory=Counter)  #: or events that concern the whole tier
    nbytes: Counter[EventKind] = attrs.field(factory=Counter)
    tokens: Counter[EventKind] = attrs.field(factory=Counter)  #: queried ones, and their outcomes
    declined: int = 0  #: tokens that it had, and that were faster to recompute
    avoided: float = 0.0  #: seconds that all requests did not wait for computing loaded tokens, except the unpriced
    waited: float = 0.0  #: seconds that requests waited for the tier's chunks, and for their loads
    unpriced: int = 0  #: loaded tokens whose computing time is not known yet

    @property
    def net(self) -> float | None:
        """Seconds saved; negative if waiting cost more than loading saved. None: not known yet."""
        return None if self.unpriced else self.avoided - self.waited

    @property
    def savings(self) -> dict[str, float]:
        """The gain of loading from the tier, in tokens and seconds."""
        loaded, names = self.tokens[EventKind.HIT], ("declined", "avoided", "waited", "unpriced")
        return {"loaded": loaded, **{name: getattr(self, name) for name in names}}

    def describe(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "events": {
                kind.value: {"chunks": chunks, "nbytes": self.nbytes[kind]} for kind, chunks in self.chunks.items()
            },
            "tokens": {kind.value: tokens for kind, tokens in self.tokens.items()},
            "savings": self.savings,
        }

    def phrases(self) -> Iterator[str]:
        """The totals of chunks and tokens, for the log."""
        for kind in EventKind:
            if self.chunks[kind]:
                nbytes = f" chunks ({size(self.nbytes[kind])})" if self.nbytes[kind] else ""
                yield f"{kind.value} {self.chunks[kind]}{nbytes}"
        if self.tokens:
            yield f"hit {self.tokens[EventKind.HIT]} of {self.tokens[EventKind.QUERIED]} tokens"

    def saved(self) -> str:
        """The savings, for the log."""
        tokens = f"{self.tokens[EventKind.HIT]} tokens loaded, {self.declined} declined"
        if self.net is None:
            unknown = "seconds saved are unknown: this engine has computed no prompt"
            return f"{unknown}; {self.waited:.2f} s waited, {tokens}"
        return (
            f"{self.net:.2f} s saved ({self.avoided:.2f} s of computing avoided, {self.waited:.2f} s waited), {tokens}"
        )


class Readings:
    """Folds events into totals, and into readings of the table of metrics."""

    def __init__(self) -> None:
        self.requests = 0  #: that have arrived and not finished
        self.listeners: list[Callable[[Sequence[Reading]], None]] = []  #: called with the readings that events add
        self._tiers: dict[str, TierReadings] = {}

    def add(self, events: Iterable[Event]) -> Sequence[Reading]:
        """Count these events. Returns the readings that they add to the metrics."""
        added = [reading for event in events for reading in self._count(event)]
        for listener in self.listeners:
            listener(added)
        return added

    def of(self, tier: str) -> TierReadings:
        """The totals of a tier."""
        return self._tiers.get(tier) or TierReadings()

    def lines(self) -> list[str]:
        """The totals of each tier, for the log."""
        told = {tier: ", ".join(totals.phrases()) for tier, totals in self._tiers.items()}
        return [f"{tier}: {phrases}" for tier, phrases in told.items() if phrases]

    def lines_of_savings(self) -> list[str]:
        """The savings of each tier, for the log, except of tiers from which nothing was loaded or declined."""
        return [f"{tier}: {totals.saved()}" for tier, totals in self._tiers.items() if any(totals.savings.values())]

    def _count(self, event: Event) -> Iterator[Reading]:
        if event.usage is not None:
            yield from readings_of(event.usage)
            return
        if event.kind in (EventKind.ARRIVED, EventKind.FINISHED):
            self.requests += 1 if event.kind is EventKind.ARRIVED else -1
            return
        tier = self._tiers.setdefault(event.tier, TierReadings())
        if name := _OF_TOKENS.get(event.kind):
            tier.tokens[event.kind] += event.tokens
            tier.declined += event.tokens if event.why == DECLINED else 0
            reason = (event.why,) if event.kind in (EventKind.BYPASSED, EventKind.NOT_KEPT) else ()
            yield Reading(name, (event.tier, *reason), event.tokens)
        elif name := _OF_SECONDS.get(event.kind):
            yield Reading(name, (event.tier,), event.seconds)
            yield from _balance(tier, event)
        else:
            yield from _of_chunks(tier, event)


def _balance(tier: TierReadings, event: Event) -> Iterator[Reading]:
    """The seconds that a tier has saved so far, if they are known."""
    if event.kind is EventKind.AVOIDED:
        tier.avoided += event.seconds
        tier.unpriced = 0
    else:
        tier.waited += event.seconds
        tier.unpriced += event.tokens
    if tier.net is not None:
        yield Reading("kvtier_net_seconds_saved", (event.tier,), tier.net)


def _of_chunks(tier: TierReadings, event: Event) -> Iterator[Reading]:
    chunks = len(event.keys) or (event.kind is not EventKind.ASKED)  # the others concern a whole tier
    tier.chunks[event.kind] += chunks
    tier.nbytes[event.kind] += event.nbytes
    if name := _WITH_REASON.get(event.kind):
        yield Reading(name, (event.tier, event.why), chunks)
    else:
        yield Reading("kvtier_chunks", (event.tier, event.kind.value), chunks)
    if operation := _OPERATIONS.get(event.kind):
        if event.seconds and event.kind is not EventKind.STORED:  # a copy beside the steps: those are its seconds
            yield Reading("kvtier_operation_seconds", (event.tier, operation), event.seconds)
        if event.nbytes:
            yield Reading("kvtier_moved_bytes", (event.tier, operation), event.nbytes)


def readings_of(usage: Usage) -> Iterator[Reading]:
    """The gauges of a tier."""
    values = {
        "kvtier_held_bytes": usage.nbytes,
        "kvtier_held_chunks": usage.chunks,
        "kvtier_capacity_bytes": usage.capacity,
        "kvtier_inflight_bytes": usage.inflight,
        "kvtier_pinned_slots": usage.pins,
    }
    if usage.writes is not None:
        values["kvtier_writable_bytes"] = usage.writes.left
    for name, value in values.items():
        yield Reading(name, (usage.tier,), value)
    for operation, works in (("read", usage.can_read), ("write", usage.can_write)):
        yield Reading("kvtier_breaker_open", (usage.tier, operation), not works)
