"""What the tiers save, as vLLM's metrics: in its log, and at ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier_core.engine.scheduler.savings import TierSavings

#: By the fields of `TierSavings`.
_COUNTERS = {
    "loaded": ("vllm:kvtier_loaded_tokens", "Tokens whose KV was loaded."),
    "declined": ("vllm:kvtier_declined_tokens", "Tokens whose KV a tier had, and which were sooner computed."),
    "avoided": ("vllm:kvtier_avoided_seconds", "Seconds of computing that loading made unnecessary."),
    "waited": ("vllm:kvtier_waited_seconds", "Seconds that requests waited for a tier."),
}
_NET = ("vllm:kvtier_net_seconds_saved", "Seconds of computing avoided, less the seconds waited.")


class KVTierStats(KVConnectorStats):
    """What each tier saved since the last report: ``data[tier][field of TierSavings]``."""

    @classmethod
    def of(cls, savings: Mapping[str, TierSavings]) -> KVTierStats:
        """The report of these savings."""
        return cls({tier: {name: getattr(each, name) for name in _COUNTERS} for tier, each in savings.items()})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Is there nothing to report?"""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        """The sum of both reports."""
        tiers = self.data.keys() | other.data.keys()
        return KVTierStats(
            {tier: dict(Counter(self.data.get(tier, {})) + Counter(other.data.get(tier, {}))) for tier in tiers}
        )

    def reduce(self) -> dict[str, int | float]:
        """For a line of vLLM's log."""
        return {
            f"{tier} {name}": round(value, 3)
            for tier, values in sorted(self.data.items())
            for name, value in values.items()
        }


class KVTierPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, with the label ``tier``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = [*labelnames, "tier"]
        counter, gauge = metric_types[prometheus_client.Counter], metric_types[prometheus_client.Gauge]
        self._counters = {
            name: counter(name=metric, documentation=text, labelnames=labels)
            for name, (metric, text) in _COUNTERS.items()
        }
        metric, text = _NET
        self._net = gauge(name=metric, documentation=text, labelnames=labels)
        self._saved: Counter[tuple[int, str]] = Counter()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report of one engine."""
        for tier, values in transfer_stats_data.items():
            labels = [*self.per_engine_labelvalues[engine_idx], tier]
            for name, counter in self._counters.items():
                counter.labels(*labels).inc(values.get(name, 0))
            self._saved[engine_idx, tier] += values.get("avoided", 0.0) - values.get("waited", 0.0)
            self._net.labels(*labels).set(self._saved[engine_idx, tier])
