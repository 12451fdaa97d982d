"""The table of metrics, and what each event adds to them. docs/metrics.md has the same table, for people."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import attrs

from kvtier_core.types import Event, EventKind, Usage


class MetricType(enum.Enum):
    """Prometheus' types, of which a counter's name ends in ``_total`` where it is shown."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_UNITS = ("tokens", "seconds", "bytes", "chunks", "slots")


@attrs.frozen
class Metric:
    """One row of the table."""

    name: str  #: with its unit, as Prometheus has it
    type: MetricType
    text: str
    labels: tuple[str, ...] = ("tier",)

    @property
    def unit(self) -> str:
        """The word of the name that is its unit; empty for what is 1 or 0."""
        return next((word for word in self.name.split("_") if word in _UNITS), "")


#: Bounds of histograms in seconds, from a copy in memory to a store that hangs.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_OPERATION = ("tier", "operation")
_REASON = ("tier", "reason")
_COUNTERS = {
    "kvtier_query_tokens": "Tokens that neither the engine nor a tier above had",
    "kvtier_hit_tokens": "Tokens whose KV was loaded from the tier",
    "kvtier_miss_tokens": "Tokens that the tier did not have",
}
_GAUGES = {
    "kvtier_held_bytes": "Bytes of the frames that the tier holds",
    "kvtier_held_chunks": "Frames that the tier holds",
    "kvtier_capacity_bytes": "Bytes that the tier may hold",
    "kvtier_inflight_bytes": "Bytes on their way to a store tier or from it",
    "kvtier_pinned_slots": "Slots of an arena in use by requests and tiers, once for each use",
    "kvtier_net_seconds_saved": "Seconds of computing that loading made unnecessary, less those that requests waited",
}
METRICS = (
    *(Metric(name, MetricType.COUNTER, text) for name, text in _COUNTERS.items()),
    Metric(
        "kvtier_bypass_tokens", MetricType.COUNTER, "Tokens that were not looked up, or were sooner computed", _REASON
    ),
    Metric("kvtier_avoided_seconds", MetricType.COUNTER, "Seconds of computing that loading made unnecessary"),
    Metric("kvtier_waited_seconds", MetricType.COUNTER, "Seconds that requests waited for the tier"),
    Metric("kvtier_chunks", MetricType.COUNTER, "Frames to which anything else happened, by event", ("tier", "event")),
    Metric("kvtier_moved_bytes", MetricType.COUNTER, "Bytes of the frames that were moved, or deleted", _OPERATION),
    Metric("kvtier_operation_seconds", MetricType.HISTOGRAM, "Seconds that one operation took", _OPERATION),
    Metric("kvtier_evicted_chunks", MetricType.COUNTER, "Frames that left the tier", _REASON),
    Metric("kvtier_rejected_chunks", MetricType.COUNTER, "Frames that the tier did not take", _REASON),
    Metric("kvtier_breaker_open", MetricType.GAUGE, "1 while the store is not called but for a probe", _OPERATION),
    *(Metric(name, MetricType.GAUGE, text) for name, text in _GAUGES.items()),
)


class Reading(NamedTuple):
    """A value for one metric: to be added to a counter, observed by a histogram, shown by a gauge."""

    metric: str
    labels: tuple[str, ...]
    value: float


_OF_TOKENS = {
    EventKind.QUERIED: "kvtier_query_tokens",
    EventKind.HIT: "kvtier_hit_tokens",
    EventKind.MISSED: "kvtier_miss_tokens",
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


class Readings:
    """Turns the events of one engine into readings. The same events give the same readings."""

    def __init__(self) -> None:
        self._saved: Counter[str] = Counter()  # seconds, by tier
        self._not_known: set[str] = set()  # tiers of which it is not known yet how much computing they avoided

    def of(self, events: Iterable[Event]) -> Iterator[Reading]:
        """What these events add."""
        for event in events:
            if event.usage is not None:
                yield from _of_usage(event.usage)
            elif event.kind in (EventKind.ARRIVED, EventKind.FINISHED):
                continue
            elif name := _OF_TOKENS.get(event.kind):
                yield Reading(name, (event.tier,), event.tokens)
            elif event.kind is EventKind.BYPASSED:
                yield Reading("kvtier_bypass_tokens", (event.tier, event.why), event.tokens)
            elif name := _OF_SECONDS.get(event.kind):
                yield Reading(name, (event.tier,), event.seconds)
                yield from self._net(event)
            else:
                yield from _of_chunks(event)

    def _net(self, event: Event) -> Iterator[Reading]:
        """What a tier saved so far, if that is known."""
        tier = event.tier
        if event.kind is EventKind.AVOIDED:
            self._saved[tier] += event.seconds
            self._not_known.discard(tier)
        else:
            self._saved[tier] -= event.seconds
            if event.why:
                self._not_known.add(tier)
        if tier not in self._not_known:
            yield Reading("kvtier_net_seconds_saved", (tier,), self._saved[tier])


def _of_chunks(event: Event) -> Iterator[Reading]:
    chunks = len(event.keys) or 1  # some events concern a whole tier, or a request
    if name := _WITH_REASON.get(event.kind):
        yield Reading(name, (event.tier, event.why), chunks)
    else:
        yield Reading("kvtier_chunks", (event.tier, event.kind.value), chunks)
    if operation := _OPERATIONS.get(event.kind):
        if event.seconds and event.kind is not EventKind.STORED:  # a copy beside the steps: those are its seconds
            yield Reading("kvtier_operation_seconds", (event.tier, operation), event.seconds)
        if event.nbytes:
            yield Reading("kvtier_moved_bytes", (event.tier, operation), event.nbytes)


def _of_usage(usage: Usage) -> Iterator[Reading]:
    values = {
        "kvtier_held_bytes": usage.nbytes,
        "kvtier_held_chunks": usage.chunks,
        "kvtier_capacity_bytes": usage.capacity,
        "kvtier_inflight_bytes": usage.inflight,
        "kvtier_pinned_slots": usage.pins,
    }
    for name, value in values.items():
        yield Reading(name, (usage.tier,), value)
    for operation, works in (("read", usage.can_read), ("write", usage.can_write)):
        yield Reading("kvtier_breaker_open", (usage.tier, operation), not works)
