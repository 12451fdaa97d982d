"""The table of metrics. docs/metrics.md has the same table, for people."""

from __future__ import annotations

import enum

import attrs


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
