"""When a tier is left alone, for how long, and what ends it."""

from __future__ import annotations

import pytest

from kvtier_core.stack.store_tier.health import Breaker


@pytest.fixture
def breaker():
    return Breaker()


@pytest.fixture
def tripped(breaker):
    """Since 10.0, for a second."""
    assert [breaker.fail(10.0) for _ in range(3)] == [False, False, True]
    return breaker


def probe(breaker, now):
    assert breaker.allows(now)
    breaker.begin(now)


def test_a_store_that_succeeds_is_never_blocked(breaker):
    for now in range(5):
        probe(breaker, now)
        assert not breaker.succeed()
    assert breaker.allows(5)


def test_calls_do_not_wait_for_each_other(breaker):
    probe(breaker, 0.0)
    probe(breaker, 0.0)


def test_the_third_failure_in_a_row_begins_a_rest(tripped):
    assert tripped.pause == 1.0
    assert not tripped.allows(10.0)
    assert not tripped.allows(10.999)
    assert tripped.allows(11.0)


def test_a_success_between_failures_starts_the_count_again(breaker):
    for _ in range(3):
        assert not breaker.fail(0.0)
        assert not breaker.fail(0.0)
        breaker.succeed()
    assert breaker.allows(0.0)


def test_one_call_goes_through_after_a_rest(tripped):
    probe(tripped, 11.0)
    assert not tripped.allows(11.0)
    assert not tripped.allows(1000.0), "until it has ended"


def test_a_probe_that_succeeds_ends_the_rest(tripped):
    probe(tripped, 11.0)
    assert tripped.succeed()
    assert tripped.allows(11.0)
    assert not tripped.succeed(), "told twice"


def test_after_a_rest_all_is_forgotten(tripped):
    probe(tripped, 11.0)
    tripped.fail(11.0)
    probe(tripped, 13.0)
    tripped.succeed()
    assert [tripped.fail(20.0) for _ in range(3)] == [False, False, True]
    assert tripped.pause == 1.0


def test_each_probe_that_fails_doubles_the_rest_up_to_a_minute(tripped):
    rests, now = [], 11.0
    for _ in range(8):
        probe(tripped, now)
        assert tripped.fail(now)
        rests.append(tripped.pause)
        assert not tripped.allows(now + tripped.pause - 0.001)
        now += tripped.pause
    assert rests == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_straggler_that_fails_does_not_prolong_the_rest(tripped):
    assert not tripped.fail(10.5)
    assert tripped.pause == 1.0
    assert tripped.allows(11.0)


def test_a_straggler_that_succeeds_ends_the_rest(tripped):
    assert tripped.succeed()
    assert tripped.allows(10.5)


def test_a_call_that_goes_out_during_a_rest_is_no_probe(tripped):
    tripped.begin(10.5)
    assert not tripped.fail(10.6)
    assert tripped.allows(11.0)
