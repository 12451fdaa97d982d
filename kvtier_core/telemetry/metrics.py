"""The table of metrics. docs/metrics.md has the same table, for people."""

from __future__ import annotations

import enum

import attrs


class MetricType(enum.Enum):
    """Prometheus' types. A counter's name ends in ``_total`` when it is shown."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_UNITS = ("tokens", "seconds", "bytes", "chunks", "slots", "sessions", "ends")


@attrs.frozen
class Metric:
    """One row of the table."""

    name: str  #: with its unit, as Prometheus has it
    type: MetricType
    text: str
    labels: tuple[str, ...] = ("tier",)

    @property
    def unit(self) -> str:
        """The word of the name that is its unit; empty if the value is 1 or 0."""
        return next((word for word in self.name.split("_") if word in _UNITS), "")


#: Bounds of histograms in seconds, from a copy in memory to a store that hangs.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_OPERATION = ("tier", "operation")
_REASON = ("tier", "reason")
_COUNTER, _GAUGE, _HISTOGRAM = MetricType
METRICS = (
    Metric("kvtier_query_tokens", _COUNTER, "Tokens that neither the engine nor a tier above had"),
    Metric("kvtier_hit_tokens", _COUNTER, "Tokens whose KV was loaded from the tier"),
    Metric("kvtier_miss_tokens", _COUNTER, "Tokens that the tier did not have"),
    Metric("kvtier_bypass_tokens", _COUNTER, "Tokens that were not looked up, or were faster to recompute", _REASON),
    Metric("kvtier_handed_over_tokens", _COUNTER, "Prompt tokens that are kept for the engine that continues them"),
    Metric("kvtier_not_kept_tokens", _COUNTER, "Tokens of such prompts that are not kept", _REASON),
    Metric("kvtier_withheld_tokens", _COUNTER, "Tokens of requests that asked not to store them"),
    Metric("kvtier_blended_tokens", _COUNTER, "Tokens with KV moved from other prompts; answers may differ"),
    Metric("kvtier_avoided_seconds", _COUNTER, "Seconds that requests did not wait for computing"),
    Metric("kvtier_waited_seconds", _COUNTER, "Seconds that requests waited for the tier"),
    Metric("kvtier_chunks", _COUNTER, "Frames to which anything else happened, by event", ("tier", "event")),
    Metric("kvtier_moved_bytes", _COUNTER, "Bytes of the frames that were moved, or deleted", _OPERATION),
    Metric("kvtier_operation_seconds", _HISTOGRAM, "Seconds that one operation took", _OPERATION),
    Metric("kvtier_evicted_chunks", _COUNTER, "Frames that left the tier", _REASON),
    Metric("kvtier_rejected_chunks", _COUNTER, "Frames that the tier did not take", _REASON),
    Metric("kvtier_breaker_open", _GAUGE, "1 while the store is not called but for a probe", _OPERATION),
    Metric("kvtier_held_bytes", _GAUGE, "Bytes of the frames that the tier holds"),
    Metric("kvtier_held_chunks", _GAUGE, "Frames that the tier holds"),
    Metric("kvtier_capacity_bytes", _GAUGE, "Bytes that the tier may hold"),
    Metric("kvtier_writable_bytes", _GAUGE, "Bytes that a tier with a write budget may write now"),
    Metric("kvtier_inflight_bytes", _GAUGE, "Bytes on their way to a store tier or from it"),
    Metric("kvtier_pinned_slots", _GAUGE, "Slots of an arena in use by requests and tiers, once for each use"),
    Metric(
        "kvtier_net_seconds_saved",
        _GAUGE,
        "Seconds that requests did not wait for computing, less those that they waited for loads",
    ),
)
