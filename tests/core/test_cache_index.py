"""Who is held and who may leave: the policy says whom, the prefix tree says whom not yet."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.stack.index import cache_index as module
from kvtier_core.stack.index.cache_index import Residents
from kvtier_core.stack.index.prefix_tree import PlainTree, Tree
from kvtier_core.types import KEY_NBYTES


@pytest.fixture(params=[PlainTree, Tree], ids=["plain", "best"], autouse=True, scope="module")
def tree(request):
    """Each test with the one in Python, and with the one that is used here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Tree", request.param)
        yield


def keys(letters):
    """A key for each letter."""
    return [letter.encode().ljust(KEY_NBYTES, b".") for letter in letters]


def letters(keys):
    return "".join(key[:1].decode() for key in keys)


class Listed(EvictionPolicy):
    """Names its victims in an order that the test gives, and writes down what it is told."""

    def __init__(self, order, refuses=""):
        self._order = keys(order)
        self._refuses = keys(refuses)
        self._held = set()
        self.told = []

    def request(self, path, now, hints):
        self.told.append((letters(path), now, hints))

    def admit(self, key, nbytes):
        self._held.add(key)

    def prefers(self, newcomer, victim):
        return newcomer not in self._refuses

    def forget(self, key, *, evicted):
        self._held.remove(key)
        self.told.append((letters([key]), evicted))

    def victims(self):
        return iter([key for key in self._order if key in self._held])


class Indifferent(Listed):
    leaf_first = False


def held(order, *paths, policy=Listed, nbytes=1):
    """Residents that took in these paths, leaves first, as tiers do."""
    residents = Residents(policy(order))
    for path in paths:
        for i in reversed(range(len(path))):
            if letters(residents.held.missing(keys(path[i]))):
                admit(residents, path[i], path[i - 1] if i else None, nbytes)
        residents.request(keys(path), 0.0, {})
    return residents


def admit(residents, key, parent, nbytes):
    residents.admit(keys(key), [keys(parent)[0] if parent else None], nbytes)


def parent(residents, key):
    found = residents.held.parent(*keys(key))
    return found and letters([found])


def choose(residents, amount, spared=""):
    return letters(residents.choose(amount, residents.held.nbytes, [keys(spared)]))


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
    assert letters(residents.choose(2, lambda key: 1)) == "cb"


def test_choosing_removes_nobody():
    residents = held("abc", "abc")
    assert choose(residents, 2) == choose(residents, 2)
    assert (len(residents), residents.used) == (3, 3)


def test_a_parent_is_free_when_its_children_are_gone():
    residents = held("abc", "ab", "ac")
    residents.remove(keys("b"))
    assert choose(residents, 1) == "c"
    residents.remove(keys("c"))
    assert choose(residents, 1) == "a"


def test_bytes_are_accounted():
    residents = Residents(Listed("ab"))
    admit(residents, "a", None, 10)
    admit(residents, "b", "a", 20)
    assert (residents.used, len(residents), sorted(residents.held)) == (30, 2, keys("ab"))
    a, b = keys("ab")
    residents.resize(b, 5)
    assert (residents.used, residents.held.nbytes(b)) == (15, 5)
    residents.resize(a, 11)
    assert residents.used == 16
    residents.remove(keys("b"))
    assert (residents.used, list(residents.held)) == (11, [a])
    assert a in residents
    assert b not in residents


def trade(residents, newcomers, room, spared=""):
    welcome, victims = residents.trade(keys(newcomers), 1, room, residents.held.nbytes, [keys(spared)])
    return letters(welcome), letters(victims)


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
        admit(residents, key, None, 1)
    assert trade(residents, "xyz", 0) == ("x", "a")
    assert trade(residents, "xyz", 2) == ("xyz", "a"), "there is room for whom it refuses"


def test_trading_changes_nothing():
    residents = held("abc", "abc")
    assert trade(residents, "xy", 0) == trade(residents, "xy", 0)
    assert (len(residents), residents.used) == (3, 3)


def test_a_newcomer_may_cost_several_victims():
    residents = held("abc", "abc")
    assert residents.trade(keys("xy"), 2, 0, residents.held.nbytes) == (keys("x"), keys("cb"))


def test_a_newcomer_is_due_when_enough_requests_named_it():
    residents = Residents(Listed("a"), store_after=2)
    residents.request(keys("ab"), 0.0, {})
    assert not residents.seen_enough(keys("abc"))
    residents.request(keys("ac"), 1.0, {})
    assert residents.seen_enough(keys("abc")) == keys("a")
    assert residents.seen_enough(keys("ba")) == [], "whoever hangs on one that is not due is not due"


def test_one_sighting_is_enough_by_default():
    assert Residents(Listed("a")).seen_enough(keys("a")) == keys("a")


def test_the_policy_is_told_of_requests_and_ends():
    policy = Listed("ab")
    residents = Residents(policy)
    admit(residents, "a", None, 1)
    admit(residents, "b", "a", 1)
    residents.request(keys("abc"), 3.0, {"priority": "low"})
    residents.remove(keys("b"), evicted=True)
    residents.remove(keys("a"))
    assert policy.told == [("abc", 3.0, {"priority": "low"}), ("b", True), ("a", False)]


def test_a_parent_that_is_not_known_is_told_by_the_next_request():
    """As after a restart."""
    residents = Residents(Listed("abc"))
    for key in "abc":
        admit(residents, key, None, 1)
    assert parent(residents, "c") is None
    assert choose(residents, 3) == "abc"
    residents.request(keys("abc"), 0.0, {})
    assert [parent(residents, key) for key in "abc"] == [None, "a", "b"]
    assert choose(residents, 3) == "cba"


def test_a_parent_that_comes_later_has_its_children():
    residents = Residents(Listed("ab"))
    admit(residents, "b", "a", 1)
    assert parent(residents, "b") == "a"
    admit(residents, "a", None, 1)
    assert choose(residents, 1) == "b"


def test_a_parent_that_left_and_came_back_has_its_children():
    residents = held("ab", "ab")
    residents.remove(keys("a"))
    admit(residents, "a", None, 1)
    assert choose(residents, 1) == "b"


def test_whoever_is_leaving_holds_nobody():
    residents = held("abc", "abc")
    residents.leave(keys("cb"))
    assert choose(residents, 3, spared="bc") == "a"
    residents.request(keys("abc"), 0.0, {})
    assert choose(residents, 3, spared="bc") == "", "they stayed"
    residents.remove(keys("cb"))
    assert choose(residents, 3) == "a"


def test_whoever_left_is_remembered_nowhere():
    residents = held("abc", "abc")
    residents.remove(keys("cab"))
    assert residents.used == 0
    assert not any(parent(residents, key) for key in "abc")
    admit(residents, "b", None, 1)
    assert choose(residents, 1) == "b"


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 12))
def test_what_remains_can_be_reached(seed, count, amount):
    """In any forest and any order, no chunk is left behind by its parent, and as many leave as should."""
    rng = random.Random(seed)
    all_of_them = "abcdefghijkl"[:count]
    parents = {key: rng.choice([None, *all_of_them[:i]]) for i, key in enumerate(all_of_them)}
    residents = Residents(Listed("".join(rng.sample(all_of_them, count))))
    for key in rng.sample(all_of_them, count):
        admit(residents, key, parents[key], 1)
    chosen = choose(residents, amount)
    assert len(set(chosen)) == len(chosen) == min(amount, count)
    for i, key in enumerate(chosen):
        assert all(child in chosen[:i] for child in all_of_them if parents[child] == key)
