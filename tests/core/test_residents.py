"""Who is held and who may leave: the policy says whom, the prefix tree says whom not yet."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.residents import Residents


class Listed(EvictionPolicy):
    """Names its victims in an order that the test gives, and writes down what it is told."""

    def __init__(self, order, refuses=()):
        self._order = order
        self._refuses = refuses
        self._held = set()
        self.told = []

    def request(self, path, now, hints):
        self.told.append((path, now, hints))

    def admit(self, key, nbytes):
        self._held.add(key)

    def prefers(self, newcomer, victim):
        return newcomer not in self._refuses

    def forget(self, key, *, evicted):
        self._held.remove(key)
        self.told.append((key, evicted))

    def victims(self):
        return iter([key for key in self._order if key in self._held])


class Indifferent(Listed):
    leaf_first = False


def held(order, *paths, policy=Listed, nbytes=1):
    """Residents that took in these paths, leaves first, as tiers do."""
    residents = Residents(policy(order))
    for path in paths:
        for i in reversed(range(len(path))):
            if path[i] not in residents:
                residents.admit(path[i], path[i - 1] if i else None, nbytes)
        residents.request(path, 0.0, {})
    return residents


def choose(residents, amount, spared=""):
    return "".join(residents.choose(amount, residents.nbytes, lambda key: key not in spared))


@pytest.mark.parametrize(
    ("order", "paths", "chosen"),
    [
        ("xyz", ["x", "y", "z"], "xyz"),
        ("abc", ["abc"], "cba"),
        ("cba", ["abc"], "cba"),
        ("bac", ["abc"], "cba"),
        ("abc", ["ab", "ac"], "bca"),
        ("acb", ["ab", "ac"], "cba"),
        ("axbyc", ["abc", "x", "y"], "xycba"),
        ("caxyb", ["abc", "x", "y"], "cxyba"),
        ("abcxyz", ["abc", "axyz"], "cbzyxa"),
    ],
)
def test_a_parent_leaves_with_or_after_its_last_child(order, paths, chosen):
    residents = held(order, *paths)
    for amount in range(len(chosen) + 1):
        assert choose(residents, amount) == chosen[:amount]


def test_a_policy_may_have_no_opinion_on_trees():
    assert choose(held("abc", "abc", policy=Indifferent), 2) == "ab"


def test_whoever_may_not_leave_keeps_its_parents():
    residents = held("abcx", "abc", "x")
    assert choose(residents, 9, spared="c") == "x"
    assert choose(residents, 9, spared="b") == "cx"
    assert choose(residents, 9, spared="a") == "cbx"


def test_less_is_chosen_when_there_is_no_more():
    assert choose(held("ab", "ab"), 9) == "ba"
    assert choose(held(""), 9) == ""


@pytest.mark.parametrize("amount", [0, -1])
def test_nobody_need_leave_for_nothing(amount):
    assert choose(held("ab", "ab"), amount) == ""


def test_victims_are_weighed():
    residents = held("abc", "abc", nbytes=10)
    assert choose(residents, 10) == "c"
    assert choose(residents, 11) == "cb"
    assert residents.choose(2, lambda key: 1, lambda key: True) == ["c", "b"]


def test_choosing_removes_nobody():
    residents = held("abc", "abc")
    assert choose(residents, 2) == choose(residents, 2)
    assert (len(residents), residents.used) == (3, 3)


def test_a_parent_is_free_when_its_children_are_gone():
    residents = held("abc", "ab", "ac")
    residents.remove("b")
    assert choose(residents, 1) == "c"
    residents.remove("c")
    assert choose(residents, 1) == "a"


def test_bytes_are_accounted():
    residents = Residents(Listed("ab"))
    residents.admit("a", None, 10)
    residents.admit("b", "a", 20)
    assert (residents.used, len(residents), set(residents)) == (30, 2, {"a", "b"})
    residents.resize("b", 5)
    assert (residents.used, residents.nbytes("b")) == (15, 5)
    residents.resize("a", 11)
    assert residents.used == 16
    residents.remove("b")
    assert (residents.used, list(residents)) == (11, ["a"])
    assert "a" in residents
    assert "b" not in residents


def trade(residents, newcomers, room, spared=""):
    welcome, victims = residents.trade(newcomers, 1, room, residents.nbytes, lambda key: key not in spared)
    return "".join(welcome), "".join(victims)


@pytest.mark.parametrize(
    ("room", "spared", "traded"),
    [
        (3, "", ("xyz", "")),
        (2, "", ("xyz", "c")),
        (0, "", ("xyz", "cba")),
        (0, "b", ("x", "c")),
        (0, "abc", ("", "")),
    ],
)
def test_newcomers_are_traded_for_victims_root_first(room, spared, traded):
    assert trade(held("abc", "abc"), "xyz", room, spared) == traded


def test_whoever_hangs_on_a_newcomer_that_was_refused_is_refused():
    residents = Residents(Listed("ab", refuses="y"))
    for key in "ab":
        residents.admit(key, None, 1)
    assert trade(residents, "xyz", 0) == ("x", "a")
    assert trade(residents, "xyz", 2) == ("xyz", "a"), "there is room for whom it refuses"


def test_trading_changes_nothing():
    residents = held("abc", "abc")
    assert trade(residents, "xy", 0) == trade(residents, "xy", 0)
    assert (len(residents), residents.used) == (3, 3)


def test_a_newcomer_may_cost_several_victims():
    residents = held("abc", "abc")
    assert residents.trade("xy", 2, 0, residents.nbytes, lambda key: True) == (["x"], ["c", "b"])


def test_a_newcomer_is_due_when_enough_requests_named_it():
    residents = Residents(Listed("a"), store_after=2)
    residents.request("ab", 0.0, {})
    assert not residents.seen_enough("a")
    residents.request("ac", 1.0, {})
    assert [residents.seen_enough(key) for key in "abc"] == [True, False, False]


def test_one_sighting_is_enough_by_default():
    assert Residents(Listed("a")).seen_enough("a")


def test_the_policy_is_told_of_requests_and_ends():
    policy = Listed("ab")
    residents = Residents(policy)
    residents.admit("a", None, 1)
    residents.admit("b", "a", 1)
    residents.request("abc", 3.0, {"priority": "low"})
    residents.remove("b", evicted=True)
    residents.remove("a")
    assert policy.told == [("abc", 3.0, {"priority": "low"}), ("b", True), ("a", False)]


def test_a_parent_that_is_not_known_is_told_by_the_next_request():
    """As after a restart."""
    residents = Residents(Listed("abc"))
    for key in "abc":
        residents.admit(key, None, 1)
    assert residents.parent("c") is None
    assert choose(residents, 3) == "abc"
    residents.request("abc", 0.0, {})
    assert [residents.parent(key) for key in "abc"] == [None, "a", "b"]
    assert choose(residents, 3) == "cba"


def test_a_parent_that_comes_later_has_its_children():
    residents = Residents(Listed("ab"))
    residents.admit("b", "a", 1)
    assert residents.parent("b") == "a"
    residents.admit("a", None, 1)
    assert choose(residents, 1) == "b"


def test_a_parent_that_left_and_came_back_has_its_children():
    residents = held("ab", "ab")
    residents.remove("a")
    residents.admit("a", None, 1)
    assert choose(residents, 1) == "b"


def test_whoever_left_is_remembered_nowhere():
    residents = held("abc", "abc")
    for key in "cab":
        residents.remove(key)
    assert residents.used == 0
    assert not any(residents.parent(key) for key in "abc")
    residents.admit("b", None, 1)
    assert choose(residents, 1) == "b"


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 12))
def test_what_remains_can_be_reached(seed, count, amount):
    """In any forest and any order, no chunk is left behind by its parent, and as many leave as should."""
    rng = random.Random(seed)
    keys = list(range(count))
    parents = {key: rng.choice([None, *keys[:key]]) for key in keys}
    residents = Residents(Listed(rng.sample(keys, count)))
    for key in rng.sample(keys, count):
        residents.admit(key, parents[key], 1)
    chosen = residents.choose(amount, residents.nbytes, lambda key: True)
    assert len(set(chosen)) == len(chosen) == min(amount, count)
    for i, key in enumerate(chosen):
        assert all(child in chosen[:i] for child in keys if parents[child] == key)
