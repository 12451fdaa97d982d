"""When a tier is left alone, for how long, and what ends it."""

from __future__ import annotations

import pytest

from kvtier_core.stack.store_tier.breaker import Breaker


@pytest.fixture
def breaker():
    return Breaker()


@pytest.fixture
def resting(breaker):
    """Since 10.0, for a second."""
    assert [breaker.fail(10.0) for _ in range(3)] == [False, False, True]
    return breaker


def probe(breaker, now):
    assert breaker.allows(now)
    breaker.begin(now)


def test_whoever_succeeds_is_never_left_alone(breaker):
    for now in range(5):
        probe(breaker, now)
        assert not breaker.succeed()
    assert breaker.allows(5)


def test_calls_do_not_wait_for_each_other(breaker):
    probe(breaker, 0.0)
    probe(breaker, 0.0)


def test_the_third_failure_in_a_row_begins_a_rest(resting):
    assert resting.rest == 1.0
    assert not resting.allows(10.0)
    assert not resting.allows(10.999)
    assert resting.allows(11.0)


def test_a_success_between_failures_starts_the_count_again(breaker):
    for _ in range(3):
        assert not breaker.fail(0.0)
        assert not breaker.fail(0.0)
        breaker.succeed()
    assert breaker.allows(0.0)


def test_one_call_goes_through_after_a_rest(resting):
    probe(resting, 11.0)
    assert not resting.allows(11.0)
    assert not resting.allows(1000.0), "until it has ended"


def test_a_probe_that_succeeds_ends_the_rest(resting):
    probe(resting, 11.0)
    assert resting.succeed()
    assert resting.allows(11.0)
    assert not resting.succeed(), "told twice"


def test_after_a_rest_all_is_forgotten(resting):
    probe(resting, 11.0)
    resting.fail(11.0)
    probe(resting, 13.0)
    resting.succeed()
    assert [resting.fail(20.0) for _ in range(3)] == [False, False, True]
    assert resting.rest == 1.0


def test_each_probe_that_fails_doubles_the_rest_up_to_a_minute(resting):
    rests, now = [], 11.0
    for _ in range(8):
        probe(resting, now)
        assert resting.fail(now)
        rests.append(resting.rest)
        assert not resting.allows(now + resting.rest - 0.001)
        now += resting.rest
    assert rests == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_straggler_that_fails_does_not_prolong_the_rest(resting):
    assert not resting.fail(10.5)
    assert resting.rest == 1.0
    assert resting.allows(11.0)


def test_a_straggler_that_succeeds_ends_the_rest(resting):
    assert resting.succeed()
    assert resting.allows(10.5)


def test_a_call_that_goes_out_during_a_rest_is_no_probe(resting):
    resting.begin(10.5)
    assert not resting.fail(10.6)
    assert resting.allows(11.0)
