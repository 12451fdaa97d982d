"""The log of an engine whose stores fail again and again: each cause at once, then how many more there were."""

from __future__ import annotations

import logging
import random

import pytest

from kvtier_core.telemetry.event_log import EventLog
from kvtier_core.telemetry.log_limit import EVERY, LogLimit
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.types import Event, EventKind


@pytest.fixture
def log(caplog):
    """Lines, which the test takes out."""
    caplog.set_level(logging.INFO, "kvtier")

    def take():
        lines = [record.getMessage().removeprefix("kvtier: ") for record in caplog.records]
        caplog.clear()
        return lines

    return take


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def events(clock):
    return EventLog(Observers(), clock)


def failed(why, kind=EventKind.IO_ERROR, tier="redis", chunks=3):
    return Event(kind, tier, tuple(bytes([i]) * 32 for i in range(chunks)), why=why)


def test_the_first_is_logged_at_once_and_the_others_are_counted(events, clock, log):
    for _ in range(213):
        events.record([failed("Connection refused")])
    assert log() == ["redis: io_error: 3 chunks: Connection refused"]
    clock.now += EVERY
    events.record([])
    assert log() == ["redis: io_error: 212 more in 60 s: Connection refused"]


def test_a_cause_that_goes_on_is_reported_once_a_minute_and_one_that_ended_is_new_again(events, clock, log):
    for _ in range(3 * 60):
        events.record([failed("Connection refused")])
        clock.now += 1
    assert log() == [
        "redis: io_error: 3 chunks: Connection refused",
        "redis: io_error: 59 more in 60 s: Connection refused",
        "redis: io_error: 60 more in 60 s: Connection refused",
    ]
    clock.now += EVERY
    events.record([])
    assert log() == ["redis: io_error: 60 more in 120 s: Connection refused"]
    clock.now += EVERY
    events.record([])
    assert log() == []
    events.record([failed("Connection refused")])
    assert log() == ["redis: io_error: 3 chunks: Connection refused"]


@pytest.mark.parametrize(
    "other",
    [
        failed("Connection reset by peer"),
        failed("Connection refused", tier="s3"),
        failed("Connection refused", kind=EventKind.CORRUPT),
        failed("[Errno 28] 10.0.0.1:6379"),
        failed("[Errno 5] 10.0.0.2:6379"),
        failed("[Errno 5] 10.0.0.1:6380"),
    ],
    ids=lambda event: f"{event.tier} {event.kind.value} {event.why}",
)
def test_the_first_line_of_every_cause_is_logged(events, log, other):
    events.record([failed("Connection refused"), failed("[Errno 5] 10.0.0.1:6379"), other])
    assert log()[-1] == f"{other.tier}: {other.kind.value}: 3 chunks: {other.why}"


def test_frames_places_and_times_are_no_causes(events, log):
    rng = random.Random(0)
    for _ in range(50):
        name = rng.randbytes(32).hex()
        place, seconds = rng.randrange(10**6, 10**9), rng.random()
        events.record([failed(f"/kv/0123456789abcdef/{name[:2]}/{name}.kv at {place}: no answer in {seconds:.3f} s")])
    assert len(log()) == 1


def test_counts_are_reported_when_the_engine_ends(events, log):
    for _ in range(4):
        events.record([failed("Connection refused")])
    log()
    events.log_totals()
    assert "redis: io_error: 3 more in 0 s: Connection refused" in log()


def test_no_line_and_no_number_is_lost(clock, log, caplog):
    """Whatever comes when, the numbers add up."""
    rng, limit, said = random.Random(1), LogLimit(clock), 0
    for _ in range(2000):
        limit.log(logging.WARNING, "disk: io_error", "1 chunks", rng.choice("abc"))
        said += 1
        clock.now += rng.choice([0, 1, 10, 100])
    limit.flush(now=True)
    counts = [record.args[1] if len(record.args) > 1 else 1 for record in caplog.records]
    assert sum(counts) == said
    log()
    clock.now += EVERY
    limit.flush()
    assert log() == []
