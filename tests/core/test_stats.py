"""Counters folded from Events."""

from __future__ import annotations

from kvtier_core.stack.stats import Stats
from kvtier_core.types import ChunkKey, Event, EventKind

A, B = ChunkKey(b"a" * 32), ChunkKey(b"b" * 32)


def test_each_tier_is_counted_by_itself():
    stats = Stats()
    stats.count_events([Event(EventKind.WRITTEN, "disk", (A, B), 8192), Event(EventKind.CORRUPT, "disk", (A,))])
    stats.count_events([Event(EventKind.CORRUPT, "disk", (B,)), Event(EventKind.BREAKER_OPEN, "s3")])
    assert stats.of("disk", EventKind.CORRUPT) == 2
    assert stats.of("s3", EventKind.BREAKER_OPEN) == 1
    assert stats.of("s3", EventKind.CORRUPT) == stats.of("redis", EventKind.MISSING) == 0
    assert stats.describe() == ["disk: written 2 (8KiB), corrupt 2", "s3: breaker_open 1"]


def test_tokens_are_told_as_hits_of_what_was_queried():
    stats = Stats()
    stats.count_tokens([Event(EventKind.QUERIED, "disk", tokens=70), Event(EventKind.HIT, "disk", tokens=32)])
    stats.count_tokens([Event(EventKind.MISSED, "disk", tokens=38), Event(EventKind.ARRIVED, "", tokens=9)])
    assert stats.describe() == ["disk: hit 32 of 70 tokens"]
    assert stats.tokens("disk") == {"queried": 70, "hit": 32, "missed": 38}
    stats.count_events([Event(EventKind.WRITTEN, "disk", (A, B), 8192)])
    assert stats.describe() == ["disk: written 2 (8KiB), hit 32 of 70 tokens"]
    assert stats.tokens("s3") == {}


def test_every_ten_minutes_it_is_time_to_tell():
    stats = Stats(now=1000.0)
    stats.count_events([Event(EventKind.WRITTEN, "disk", (A, B), 8192)])
    assert stats.due(1599.0) == []
    assert stats.due(1600.0) == stats.describe() == ["disk: written 2 (8KiB)"]
    assert stats.due(1601.0) == stats.due(2199.0) == []
    assert stats.due(5000.0) == ["disk: written 2 (8KiB)"]
