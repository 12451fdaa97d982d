"""The observers that the package offers."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import ObserverConfig
from kvtier_observers.jsonl import JsonLinesConfig
from kvtier_observers.opentelemetry import OpenTelemetryConfig
from kvtier_observers.prometheus import PrometheusConfig


@hookimpl
def kvtier_observers() -> list[type[ObserverConfig]]:
    return [JsonLinesConfig, OpenTelemetryConfig, PrometheusConfig]
