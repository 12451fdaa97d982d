"""The table of return odds, its index, and what the policy makes of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_policies import PLAIN_GITTINS, PLAIN_SIMPLE_GITTINS

from kvtier_core.policies.gittins import Gittins, GittinsConfig
from kvtier_core.policies.lifetable import _WIDTHS, AGES, EDGES, LifeTable, _gittins
from kvtier_core.policies.lru import LruConfig
from kvtier_testing.samples import make_key

#: As it is opened here, and in Python.
both = pytest.mark.parametrize("full", [GittinsConfig(), PLAIN_GITTINS])
both_simple = pytest.mark.parametrize("simple", [GittinsConfig(classes="simple"), PLAIN_SIMPLE_GITTINS])


def empty(classes):
    return [[0.0] * AGES for _ in range(classes)]


@given(st.integers(0, 1000))
def test_the_index_is_the_best_rate_over_all_horizons(seed):
    rng = random.Random(seed)
    odds = [rng.choice((0.0, rng.random() * 0.02, rng.random() * 0.3)) for _ in range(AGES)]
    index = _gittins(odds)
    for age in range(AGES):
        best, alive, returned, idle = 0.0, 1.0, 0.0, 0.0
        for chance, width in zip(odds[age:], _WIDTHS[age:], strict=True):
            idle += alive * width * (1 - chance / 2)
            returned += alive * chance
            alive *= 1 - chance
            best = max(best, returned / idle)
        assert abs(index[age] - best) <= 1e-6 * best


def test_while_nothing_is_known_the_older_has_the_lower_index():
    table = LifeTable(1, 1)
    assert table.index[0] == sorted(table.index[0], reverse=True)


def test_a_class_that_comes_back_ranks_above_one_that_does_not():
    table = LifeTable(1, 2)
    for _ in range(200):
        table.returned(0, 10, 1.0)
        table.went_on(1, 10, 1.0)
    table.rank(empty(2))
    assert table.index[0][10] > table.index[1][10]


def test_a_class_of_which_little_is_known_leans_on_its_family():
    table = LifeTable(2, 2)
    for _ in range(200):
        table.returned(0, 10, 1.0)
        table.went_on(2, 10, 1.0)
    table.rank(empty(4))
    assert table.index[1][10] > table.index[3][10]


def test_a_restored_state_keeps_its_proportions():
    table, other = LifeTable(1, 1), LifeTable(1, 1)
    for _ in range(100_000):
        table.returned(0, 5, 1.0)
        table.went_on(0, 5, 1.0)
    assert other.restore(table.save())
    other.rank(empty(1))
    table.rank(empty(1))
    assert abs(other.index[0][5] - table.index[0][5]) < 0.05 * table.index[0][5]


def test_impossible_votes_are_not_believed():
    table = LifeTable(1, 1)
    table._returns[0][3] = 2.0  # of one life
    table._lives[0][3] = 1.0
    for wrong in (table.save(), table.save()[:-4] + b"\0\0\xc0\x7f"):
        assert not LifeTable(1, 1).restore(wrong)


def numbered(numbers):
    return [make_key(number) for number in numbers]


@both
def test_cold_it_evicts_as_lru_does(full):
    rng = random.Random(0)
    gittins, lru = full.open(), LruConfig().open()
    for now in range(40):
        path = numbered(rng.sample(range(50), 3))
        for policy in (gittins, lru):
            policy.request(path, float(now * 10), {})
            held = set(policy.victims())
            for key in reversed(path):
                if key not in held:
                    policy.admit(key, 1)
    ages = [now for now in EDGES if now <= 400]
    assert len(ages) > 10, "several steps of age were passed"
    oldest = list(lru.victims())[:10]
    assert set(list(gittins.victims())[:15]) >= set(oldest[:5])


LOVED, NEWCOMER, STRANGER = numbered([-1, -2, -3])


def taught(policy):
    """One comes back all the time, and many never."""
    for now, key in enumerate(numbered(range(1, 2000)), start=1):
        policy.request([key], now * 1.0, {})
        policy.request([LOVED], now * 1.0 + 0.9, {})


@both_simple
def test_a_newcomer_of_a_class_that_never_returns_is_refused_once_that_is_known(simple):
    policy = simple.open()
    policy.request([LOVED], 0.0, {})
    policy.admit(LOVED, 1)
    assert policy.prefers(STRANGER, LOVED), "nothing is known yet"
    taught(policy)
    policy.request([NEWCOMER], 2000.0, {})
    assert not policy.prefers(NEWCOMER, LOVED)


@both_simple
@pytest.mark.parametrize("they_lie", [False, True])
def test_chunks_of_sessions_that_are_said_to_end_leave_first_unless_they_come_back(simple, they_lie):
    """What the hint is worth is learned: who says it of sessions that go on loses and gains nothing."""
    policy, ends = simple.open(), {"session": "ends"}
    for now in range(0, 20_000, 10):
        goes_on, ended = numbered([now + 1, now + 2])
        policy.request([goes_on], now * 1.0, {})
        policy.request([ended], now * 1.0, ends)
        policy.request([goes_on], now + 9.0, {})
        if they_lie:
            policy.request([ended], now + 9.0, ends)
    for key, now, hints in ((LOVED, 20_000.0, {}), (NEWCOMER, 20_000.4, ends)):
        policy.request([key], now, hints)
        policy.admit(key, 1)
    assert next(policy.victims()) == (LOVED if they_lie else NEWCOMER)


@both_simple
@pytest.mark.parametrize("they_lie", [False, True])
def test_chunks_of_a_client_that_pauses_leave_first_unless_its_pauses_are_short(simple, they_lie):
    policy, pause = simple.open(), {"pause": "600"}
    for now in range(0, 40_000, 100):
        goes_on, paused = numbered([now + 1, now + 2])
        policy.request([goes_on], now * 1.0, {})
        policy.request([paused], now * 1.0, pause)
        policy.request([goes_on], now + 9.0, {})
        if they_lie:
            policy.request([paused], now + 9.0, pause)
    for key, now, hints in ((LOVED, 40_000.0, {}), (NEWCOMER, 40_000.4, pause)):
        policy.request([key], now, hints)
        policy.admit(key, 1)
    assert next(policy.victims()) == (LOVED if they_lie else NEWCOMER)


@both_simple
@pytest.mark.parametrize("said", ["63", "soon", "1234567890", ""])
def test_a_pause_that_is_short_or_no_number_changes_nothing(simple, said):
    silent, saying = simple.open(), simple.open()
    for now in range(0, 5000, 7):
        path = numbered([now % 11, now % 13 + 20])
        silent.request(path, now * 1.0, {})
        saying.request(path, now * 1.0, {"pause": said})
        if now < 70:
            for each in (silent, saying):
                each.admit(path[0], 1)
    assert [*silent.victims()] == [*saying.victims()] and silent.save() == saying.save()


@both_simple
def test_gittins_is_warm_after_a_restart(simple):
    before, after = simple.open(), simple.open()
    taught(before)
    after.restore(before.save())
    after.request([LOVED], 0.0, {})
    after.admit(LOVED, 1)
    after.request([LOVED], 0.9, {})
    after.request([NEWCOMER], 1.0, {})
    assert not after.prefers(NEWCOMER, LOVED)


@both_simple
def test_a_key_that_stands_twice_in_a_path_was_named_once(simple):
    once, twice = simple.open(), simple.open()
    for now in range(200):
        once.request([LOVED, NEWCOMER], float(now), {})
        twice.request([LOVED, NEWCOMER, LOVED, NEWCOMER], float(now), {})
    assert once.save() == twice.save()


def test_repeated_requests_leave_nothing_behind():
    """Its cell lies empty each time, and is waited for only once."""
    policy = Gittins(sizes=1)
    for now in range(1000):
        policy.request([LOVED], now / 1000, {})
    assert len(policy._due) <= 3
