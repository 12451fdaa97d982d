"""Makes spans of events, and has OpenTelemetry's SDK export them."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvtier_core.interfaces import Observer
from kvtier_core.types import Event, EventKind
from kvtier_core.work.io_pool import run_aside

#: The outcome for a request's tokens in a tier: these events follow each other, and form one span.
_LOOKUP = {EventKind.QUERIED, EventKind.HIT, EventKind.MISSED, EventKind.BYPASSED}
_SPANS = {
    EventKind.WAITED: "wait",
    EventKind.LOADED: "load",
    EventKind.STORED: "store",
    EventKind.READ: "read",
    EventKind.WRITTEN: "write",
    EventKind.ASKED: "ask",
}
#: Each is a span of zero length, with the reason.
_FAILURES = {
    EventKind.REJECTED,
    EventKind.MISSING,
    EventKind.CORRUPT,
    EventKind.INCOMPATIBLE,
    EventKind.IO_ERROR,
}
#: Number of the latest requests and chunks that are remembered: tiers write chunks after their request has ended.
_REQUESTS, _CHUNKS = 1 << 12, 1 << 16
#: Seconds that `close` waits for the last spans to be sent, and for a call to the collector to be given up.
_FLUSH, _GIVE_UP = 1.0, 0.5


def exporter_of_environment() -> SpanExporter:
    """Sends to the collector that the environment names. Raises ValueError, or ImportError."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GRPCExporter

        return GRPCExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise ValueError(f"OTLP over {protocol} is not supported; write http/protobuf or grpc")


class Spans(Observer):
    """A span for each request, from its arrival to its end, with a child for everything that a tier did for it.

    A store knows no requests: what happens to a chunk there belongs to the request that named it last.
    """

    def __init__(self, engine: int, exporter: SpanExporter):
        """``engine`` is the number of the replica."""
        self._exporter = exporter
        # Its own provider: vLLM has set that of the process, or another observer will.
        self._provider = TracerProvider(resource=Resource.create({"kvtier.engine": engine}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvtier")
        self._requests: dict[str, tuple[Span, Context]] = {}
        self._named_by: dict[bytes, str] = {}  # the request that named a chunk last

    def observe(self, events: Sequence[Event]) -> None:
        """Begin and end spans. The SDK's thread sends them."""
        for (request, tier, is_lookup), group in itertools.groupby(events, _same_span):
            if is_lookup:
                self._lookup(request, tier, list(group))
                continue
            for event in group:
                self._observe(event)

    def close(self) -> None:
        """Send what is left, but do not wait for a collector that hangs or is away."""
        ending = run_aside(self._provider.shutdown, "spans-end")
        ending.join(_FLUSH)
        if ending.is_alive():
            self._exporter.shutdown()
            ending.join(_GIVE_UP)

    def _observe(self, event: Event) -> None:
        if event.kind is EventKind.ARRIVED:
            self._arrived(event)
        elif event.kind is EventKind.FINISHED:
            self._finished(event)
        elif event.kind in _SPANS or event.kind in _FAILURES:
            name = _SPANS.get(event.kind, event.kind.value)
            for request, chunks in self._concerned(event).items():
                known: dict[str, int | str] = {"chunks": chunks, "bytes": event.nbytes, "reason": event.why}
                self._child(name, request, event, known, failed=event.kind in _FAILURES)

    def _arrived(self, event: Event) -> None:
        parent = TraceContextTextMapPropagator().extract({"traceparent": event.traceparent})
        attributes: dict[str, int | str] = {"kvtier.request": event.request, "kvtier.tokens": event.tokens}
        span = self._tracer.start_span("kvtier request", parent, attributes=attributes, start_time=_ns(event.at))
        self._requests[event.request] = (span, set_span_in_context(span))
        for key in event.keys:
            self._named_by.pop(_chunk(key), None)
            self._named_by[_chunk(key)] = event.request
        _forget_oldest(self._requests, _REQUESTS)
        _forget_oldest(self._named_by, _CHUNKS)

    def _finished(self, event: Event) -> None:
        if event.request in self._requests:
            span, _ = self._requests[event.request]
            span.set_attribute("kvtier.end", event.why)
            span.end(_ns(event.at))

    def _lookup(self, request: str, tier: str, events: Sequence[Event]) -> None:
        """The events state in turn what a tier was asked for, and the outcome."""
        known: dict[str, int | str] = {f"{event.kind.value}_tokens": event.tokens for event in events}
        known["reason"] = next((event.why for event in events if event.why), "")
        self._child("lookup", request, events[0], known)

    def _child(
        self, name: str, request: str, event: Event, known: Mapping[str, int | str], *, failed: bool = False
    ) -> None:
        if request not in self._requests:
            return
        attributes = {f"kvtier.{key}": value for key, value in known.items() if value}
        span = self._tracer.start_span(
            f"{name} {event.tier}",
            self._requests[request][1],
            attributes={"kvtier.tier": event.tier, **attributes},
            start_time=_ns(event.at - event.seconds),
        )
        if failed:
            span.set_status(StatusCode.ERROR, event.why)
        span.end(_ns(event.at))

    def _concerned(self, event: Event) -> Counter[str]:
        """The requests that an event belongs to, each with the number of its chunks in the event."""
        if event.request:
            return Counter({event.request: len(event.keys)})
        named = (self._named_by.get(_chunk(key)) for key in event.keys)
        return Counter(request for request in named if request is not None)


def _same_span(event: Event) -> tuple[str, str, bool]:
    return event.request, event.tier, event.kind in _LOOKUP


def _chunk(key: bytes) -> bytes:
    """The bytes that the keys of a chunk's parts have in common."""
    return key[:-1]


def _forget_oldest(remembered: dict, limit: int) -> None:
    for oldest in list(itertools.islice(remembered, max(0, len(remembered) - limit))):
        del remembered[oldest]


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9)) if seconds < 1e10 else 0
