"""Readings are folded from events."""

from __future__ import annotations

from kvtier_core.telemetry.readings import DECLINED, Readings
from kvtier_core.types import ChunkKey, Event, EventKind

A, B = ChunkKey(b"a" * 32), ChunkKey(b"b" * 32)


def test_each_tier_is_counted_by_itself():
    readings = Readings()
    readings.add([Event(EventKind.WRITTEN, "disk", (A, B), 8192), Event(EventKind.CORRUPT, "disk", (A,))])
    readings.add([Event(EventKind.CORRUPT, "disk", (B,)), Event(EventKind.BREAKER_OPEN, "s3")])
    assert readings.of("disk").chunks[EventKind.CORRUPT] == 2
    assert readings.of("s3").chunks == {EventKind.BREAKER_OPEN: 1}
    assert readings.of("redis").chunks == {}
    assert readings.lines() == ["disk: written 2 chunks (8KiB), corrupt 2", "s3: breaker_open 1"]


def test_chunks_are_one_number_whatever_the_reason_and_a_metric_for_each():
    readings = Readings()
    added = readings.add(Event(EventKind.EVICTED, "disk", (A, B), 8192, why) for why in ("for room", "for an epoch"))
    assert readings.lines() == ["disk: evicted 4 chunks (16KiB)"]
    assert readings.of("disk").describe()["events"] == {"evicted": {"chunks": 4, "nbytes": 16384}}
    by_reason = [each.labels for each in added if each.metric == "kvtier_evicted_chunks"]
    assert by_reason == [("disk", "for room"), ("disk", "for an epoch")]


def test_tokens_are_shown_as_hits_of_those_queried():
    readings = Readings()
    readings.add([Event(EventKind.QUERIED, "disk", tokens=70), Event(EventKind.HIT, "disk", tokens=32)])
    readings.add([Event(EventKind.MISSED, "disk", tokens=38), Event(EventKind.ARRIVED, "", tokens=9)])
    assert readings.lines() == ["disk: hit 32 of 70 tokens"]
    assert readings.of("disk").describe()["tokens"] == {"queried": 70, "hit": 32, "missed": 38}
    readings.add([Event(EventKind.WRITTEN, "disk", (A, B), 8192)])
    assert readings.lines() == ["disk: written 2 chunks (8KiB), hit 32 of 70 tokens"]
    assert readings.of("s3").describe()["tokens"] == {}


def test_savings_are_what_was_avoided_less_what_was_waited():
    readings = Readings()
    readings.add([Event(EventKind.HIT, "far", tokens=100), Event(EventKind.AVOIDED, "far", seconds=0.5)])
    readings.add(Event(EventKind.WAITED, "far", seconds=seconds) for seconds in (0.1, 0.5))
    readings.add(Event(EventKind.BYPASSED, "far", tokens=tokens, why=why) for tokens, why in ((64, DECLINED), (9, "")))
    readings.add([Event(EventKind.WRITTEN, "disk", (A,))])
    assert readings.lines_of_savings() == [
        "far: -0.10 s saved (0.50 s of computing avoided, 0.60 s waited), 100 tokens loaded, 64 declined"
    ]


def test_requests_are_counted_while_they_run():
    readings = Readings()
    readings.add(Event(EventKind.ARRIVED, "", request=each) for each in "abc")
    readings.add([Event(EventKind.FINISHED, "", request="b")])
    assert (readings.requests, readings.lines()) == (2, [])


def test_listeners_get_what_is_returned():
    readings, heard = Readings(), []
    readings.listeners.append(heard.extend)
    assert heard == list(readings.add([Event(EventKind.WRITTEN, "disk", (A, B), 8192, seconds=0.5)])) != []
