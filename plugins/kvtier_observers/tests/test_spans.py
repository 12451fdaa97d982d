"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import logging
import socket
import threading
from collections import defaultdict

import pytest
from patience import HANG
from servers.otlp import Collector, known_of

from kvtier_core.errors import BackendError
from kvtier_core.telemetry.readings import Readings
from kvtier_core.types import Event, EventKind
from kvtier_observers.opentelemetry import OpenTelemetryConfig
from kvtier_testing import ObserverLaws
from kvtier_testing.samples import make_context, make_keys


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with Collector() as serving:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", serving.url)
        yield serving


class TestSpans(ObserverLaws):
    @pytest.fixture(autouse=True)
    def _collected(self, collector):
        """There is somebody to send to."""

    def config(self, folder):
        return OpenTelemetryConfig()


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def events_of_a_request():
    keys = tuple(make_keys(4))
    return [
        Event(EventKind.ARRIVED, "", keys, tokens=40, request="a", traceparent=TRACE, at=100.0),
        Event(EventKind.QUERIED, "cpu", tokens=40, seconds=0.5, request="a", at=101.0),
        Event(EventKind.MISSED, "cpu", tokens=40, seconds=0.5, request="a", at=101.0),
        Event(EventKind.QUERIED, "disk", tokens=40, seconds=0.5, request="a", at=101.0),
        Event(EventKind.HIT, "disk", tokens=32, seconds=0.5, request="a", at=101.0),
        Event(EventKind.BYPASSED, "disk", tokens=8, why="sooner computed", request="a", at=101.0),
        Event(EventKind.READ, "disk", keys[:3], 4096, seconds=0.25, at=100.75),
        Event(EventKind.WAITED, "disk", seconds=1.0, request="a", at=101.5),
        Event(EventKind.LOADED, "cpu", nbytes=4096, seconds=0.5, request="a", at=101.5),
        Event(EventKind.FINISHED, "", seconds=2.0, tokens=44, why="stop", request="a", at=102.0),
        Event(EventKind.WRITTEN, "disk", keys[3:], 1024, seconds=0.125, at=103.0),
        Event(EventKind.CORRUPT, "disk", keys[:1], why="checksum", at=103.0),
        Event(EventKind.WRITTEN, "disk", tuple(make_keys(9)[8:]), 1024, at=103.0),
    ]


def test_a_request_is_a_span_with_a_child_for_what_each_tier_did(collector):
    observer = OpenTelemetryConfig().open(make_context())
    observer.observe(events_of_a_request())
    observer.close()
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {
        *("kvtier request", "lookup cpu", "lookup disk", "read disk", "wait disk", "load cpu", "write disk"),
        "corrupt disk",
    }
    assert len(collector.spans) == len(spans), "a chunk that no request named is in no trace"
    whole = spans.pop("kvtier request")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == tuple(TRACE.split("-")[1:3])
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (100 * 10**9, 102 * 10**9)
    assert known_of(whole) == {"kvtier.request": "a", "kvtier.tokens": 40, "kvtier.end": "stop"}
    assert {(span.trace_id, span.parent_span_id) for span in spans.values()} == {(whole.trace_id, whole.span_id)}
    assert known_of(spans["lookup disk"]) == {
        "kvtier.tier": "disk", "kvtier.queried_tokens": 40, "kvtier.hit_tokens": 32, "kvtier.bypassed_tokens": 8,
        "kvtier.reason": "sooner computed",
    }  # fmt: skip
    assert known_of(spans["read disk"]) == {"kvtier.tier": "disk", "kvtier.chunks": 3, "kvtier.bytes": 4096}
    assert spans["read disk"].start_time_unix_nano == 100_500_000_000
    assert (spans["corrupt disk"].status.code, spans["corrupt disk"].status.message) == (2, "checksum")


def test_arrivals_and_ends_of_requests_add_to_no_metric():
    told = [Event(kind, "", tuple(make_keys(1)), request="a") for kind in (EventKind.ARRIVED, EventKind.FINISHED)]
    assert not Readings().add(told)


def test_a_call_for_several_requests_is_in_the_trace_of_each(collector):
    keys = tuple(make_keys(4))
    observer = OpenTelemetryConfig().open(make_context())
    observer.observe(
        [Event(EventKind.ARRIVED, "", keys[:1], request="a"), Event(EventKind.ARRIVED, "", keys[1:], request="b")]
    )
    observer.observe([Event(EventKind.READ, "disk", keys)])
    observer.close()
    chunks = defaultdict(int)
    for span in collector.spans:
        chunks[span.trace_id] += known_of(span)["kvtier.chunks"]
    assert sorted(chunks.values()) == [1, 3]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_collector_that_hangs_or_is_away_costs_nothing(collector, monkeypatch, hangs, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")  # it would be waited for as long
    if hangs:
        collector.answers.clear()
    else:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
    observer = OpenTelemetryConfig().open(make_context())

    def observe():
        for _ in range(1000):
            observer.observe(events_of_a_request())
        observer.close()

    told = threading.Thread(target=observe, daemon=True)
    told.start()
    told.join(HANG)
    assert not told.is_alive(), "it waits for the collector"
    assert not collector.spans


def test_a_protocol_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(BackendError, match="write http/protobuf or grpc"):
        OpenTelemetryConfig().open(make_context())
