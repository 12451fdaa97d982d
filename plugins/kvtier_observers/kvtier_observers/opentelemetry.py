"""An observer that sends a trace of each request to an OpenTelemetry collector."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext


@attrs.frozen
class OpenTelemetryConfig(ObserverConfig):
    """``type: opentelemetry`` has no other keys: OpenTelemetry's environment variables set where and what to send."""

    type: ClassVar[str] = "opentelemetry"

    def open(self, ctx: OpenContext) -> Observer:
        """Begin to trace. No collector is called yet. Raises BackendError."""
        try:
            from kvtier_observers.spans import Spans, exporter_of_environment
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'kvtier[otel]'") from error
        try:
            return Spans(ctx.replica, exporter_of_environment())
        except ValueError as error:
            raise BackendError(f"invalid variable OTEL_…: {error}") from error
