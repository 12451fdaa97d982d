"""The table of metrics through vLLM: at its ``/metrics``, and in its log; and hits by vLLM's own sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier_core.interfaces import Medium
from kvtier_core.telemetry.metrics import BUCKETS, METRICS, Metric, MetricType
from kvtier_core.telemetry.readings import Reading
from kvtier_vllm.versions import CacheHitSource

_METRICS = {metric.name: metric for metric in METRICS}
#: Joins labels: what vLLM sends from process to process has text as its keys.
_AND = "|"


class KVTierStats(KVConnectorStats):
    """Readings since the last report: ``data[metric][labels]`` is the sum of a counter, the last value of a gauge, or
    the list of what a histogram observes."""

    def add(self, readings: Iterable[Reading]) -> None:
        """Report these, too."""
        for name, labels, reading in readings:
            value = float(reading)  # vLLM sends no subclass of a number: its engine would never answer again
            self._add(name, _AND.join(labels), [value] if _METRICS[name].type is MetricType.HISTOGRAM else value)

    def take(self) -> KVTierStats | None:
        """The report so far, if there is anything to report; this one is empty again."""
        report = KVTierStats(self.data)
        self.reset()
        return None if report.is_empty() else report

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Is there nothing to report?"""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """Both reports as one; ``other`` is the later one."""
        both = KVTierStats({})
        for report in (self, other):
            for name, values in report.data.items():
                for labels, value in values.items():
                    both._add(name, labels, value)
        return both

    def reduce(self) -> dict[str, int | float]:
        """For a line of vLLM's log: tokens, and seconds saved or waited."""
        return {
            f"{labels} {name.removeprefix('kvtier_')}": round(value, 3)
            for name, values in sorted(self.data.items())
            if _METRICS[name].type is MetricType.COUNTER and _METRICS[name].unit in ("tokens", "seconds")
            for labels, value in sorted(values.items())
        }

    def _add(self, name: str, labels: str, value: Any) -> None:
        values = self.data.setdefault(name, {})
        gauge = _METRICS[name].type is MetricType.GAUGE
        values[labels] = value if gauge or labels not in values else values[labels] + value


class KVTierPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, with vLLM's own labels before those of the table."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        _unregister_former()
        self._shown = {metric.name: self._make(metric) for metric in METRICS}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report of one engine."""
        for name, values in transfer_stats_data.items():
            for labels, value in values.items():
                shown = self._shown[name].labels(*self.per_engine_labelvalues[engine_idx], *labels.split(_AND))
                match _METRICS[name].type:
                    case MetricType.COUNTER:
                        shown.inc(value)
                    case MetricType.GAUGE:
                        shown.set(value)
                    case MetricType.HISTOGRAM:
                        for each in value:
                            shown.observe(each)

    def _make(self, metric: Metric) -> Any:
        own = {"name": metric.name, "documentation": metric.text, "labelnames": [*self._labelnames, *metric.labels]}
        match metric.type:
            case MetricType.COUNTER:
                return self._counter_cls(**own)
            case MetricType.GAUGE:
                return self._gauge_cls(**own, multiprocess_mode="mostrecent")
            case MetricType.HISTOGRAM:
                return self._histogram_cls(**own, buckets=BUCKETS)


def tokens_by_source(tokens: Mapping[str, int], media: Mapping[str, Medium]) -> dict[CacheHitSource, int]:
    """Tokens by vLLM's kind of source, from tokens by tier. ``media`` has what each tier stores on."""
    by_medium = {Medium.HOST: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
    counts: Counter[CacheHitSource] = Counter()
    for tier, count in tokens.items():
        counts[by_medium.get(media.get(tier, Medium.UNSPECIFIED), CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    return dict(counts)


def _unregister_former() -> None:
    """Drop the metrics of an earlier engine in this process: vLLM unregisters only those with its own names."""
    registry = prometheus_client.REGISTRY
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", None) in _METRICS:
            registry.unregister(collector)
