"""What an index holds and may evict: the policy says in which order, the prefix tree says what not yet."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.stack.index import cache_index as module
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.prefix_tree import PlainPrefixTree, PrefixTree
from kvtier_core.types import KEY_NBYTES
from kvtier_policies.fifo import Fifo
from kvtier_policies.mru import Mru
from kvtier_policies.s3fifo import S3Fifo
from kvtier_testing.samples import make_keys


@pytest.fixture(params=[PlainPrefixTree, PrefixTree], ids=["plain", "best"], autouse=True, scope="module")
def tree(request):
    """Each test with the one in Python, and with the one that is used here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PrefixTree", request.param)
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
    """CacheIndex that took in these paths, leaves first, as tiers do."""
    index = CacheIndex(policy(order))
    for path in paths:
        for i in reversed(range(len(path))):
            if letters(index.resident.missing(keys(path[i]))):
                admit(index, path[i], path[i - 1] if i else None, nbytes)
        index.request(keys(path), 0.0, {})
    return index


def admit(index, key, parent, nbytes):
    index.admit(keys(key), [keys(parent)[0] if parent else None], nbytes)


def parent(index, key):
    found = index.resident.parent(*keys(key))
    return found and letters([found])


def choose(index, amount, spared=""):
    return letters(index.select_victims(amount, index.resident.nbytes, [keys(spared)]))


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
    index = held(order, *paths)
    for amount in range(len(chosen) + 1):
        assert choose(index, amount) == chosen[:amount]


def test_a_policy_may_have_no_opinion_on_trees():
    assert choose(held("abc", "abc", policy=Indifferent), 2) == "ab"


def test_a_chunk_that_stays_keeps_its_parents():
    index = held("abcx", "abc", "x")
    assert choose(index, 9, spared="c") == "x"
    assert choose(index, 9, spared="b") == "cx"
    assert choose(index, 9, spared="a") == "cbx"


def test_less_is_chosen_when_there_is_no_more():
    assert choose(held("ab", "ab"), 9) == "ba"
    assert choose(held(""), 9) == ""


@pytest.mark.parametrize("amount", [0, -1])
def test_no_victim_is_selected_for_nothing(amount):
    assert choose(held("ab", "ab"), amount) == ""


def test_victims_are_weighed():
    index = held("abc", "abc", nbytes=10)
    assert choose(index, 10) == "c"
    assert choose(index, 11) == "cb"
    assert letters(index.select_victims(2, lambda key: 1)) == "cb"


def test_choosing_victims_removes_none():
    index = held("abc", "abc")
    assert choose(index, 2) == choose(index, 2)
    assert (len(index), index.resident.used) == (3, 3)


def test_a_parent_is_free_when_its_children_are_gone():
    index = held("abc", "ab", "ac")
    index.remove(keys("b"))
    assert choose(index, 1) == "c"
    index.remove(keys("c"))
    assert choose(index, 1) == "a"


def test_bytes_are_accounted():
    index = CacheIndex(Listed("ab"))
    admit(index, "a", None, 10)
    admit(index, "b", "a", 20)
    assert (index.resident.used, len(index), sorted(index.resident)) == (30, 2, keys("ab"))
    a, b = keys("ab")
    index.resident.resize(b, 5)
    assert (index.resident.used, index.resident.nbytes(b)) == (15, 5)
    index.resident.resize(a, 11)
    assert index.resident.used == 16
    index.remove(keys("b"))
    assert (index.resident.used, list(index.resident)) == (11, [a])
    assert a in index
    assert b not in index


def trade(index, newcomers, room, spared=""):
    welcome, victims = index.plan_admission(keys(newcomers), 1, room, index.resident.nbytes, [keys(spared)])
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


def test_chunks_after_a_refused_newcomer_are_refused():
    index = CacheIndex(Listed("ab", refuses="y"))
    for key in "ab":
        admit(index, key, None, 1)
    assert trade(index, "xyz", 0) == ("x", "a")
    assert trade(index, "xyz", 2) == ("xyz", "a"), "what it refuses is admitted while there is room"


def test_trading_changes_nothing():
    index = held("abc", "abc")
    assert trade(index, "xy", 0) == trade(index, "xy", 0)
    assert (len(index), index.resident.used) == (3, 3)


def test_a_newcomer_may_cost_several_victims():
    index = held("abc", "abc")
    assert index.plan_admission(keys("xy"), 2, 0, index.resident.nbytes) == (keys("x"), keys("cb"))


def test_a_newcomer_is_due_when_enough_requests_named_it():
    index = CacheIndex(Listed("a"), store_after=2)
    index.request(keys("ab"), 0.0, {})
    assert not index.meets_frequency(keys("abc"))
    index.request(keys("ac"), 1.0, {})
    assert index.meets_frequency(keys("abc")) == keys("a")
    assert index.meets_frequency(keys("ba")) == [], "a chunk behind one that is not due is not due"


def test_one_sighting_is_enough_by_default():
    assert CacheIndex(Listed("a")).meets_frequency(keys("a")) == keys("a")


def test_the_policy_is_told_of_requests_and_ends():
    policy = Listed("ab")
    index = CacheIndex(policy)
    admit(index, "a", None, 1)
    admit(index, "b", "a", 1)
    index.request(keys("abc"), 3.0, {"priority": "low"})
    index.remove(keys("b"), evicted=True)
    index.remove(keys("a"))
    assert policy.told == [("abc", 3.0, {"priority": "low"}), ("b", True), ("a", False)]


def test_a_parent_that_is_not_known_is_reported_by_the_next_request():
    """As after a restart."""
    index = CacheIndex(Listed("abc"))
    for key in "abc":
        admit(index, key, None, 1)
    assert parent(index, "c") is None
    assert choose(index, 3) == "abc"
    index.request(keys("abc"), 0.0, {})
    assert [parent(index, key) for key in "abc"] == [None, "a", "b"]
    assert choose(index, 3) == "cba"


def test_a_parent_that_comes_later_has_its_children():
    index = CacheIndex(Listed("ab"))
    admit(index, "b", "a", 1)
    assert parent(index, "b") == "a"
    admit(index, "a", None, 1)
    assert choose(index, 1) == "b"


def test_a_parent_that_left_and_came_back_has_its_children():
    index = held("ab", "ab")
    index.remove(keys("a"))
    admit(index, "a", None, 1)
    assert choose(index, 1) == "b"


class Walked(Fifo):
    """Counts how many victims it names."""

    def __init__(self):
        super().__init__()
        self.named = 0

    def victims(self):
        for key in super().victims():
            self.named += 1
            yield key


def grown(policy, chunks):
    """A path that grew by one chunk with each request, so that each parent was admitted before its child."""
    index = CacheIndex(policy)
    path = make_keys(chunks)
    for end in range(1, chunks + 1):
        index.request(path[:end], float(end), {})
        index.admit(path[end - 1 : end], [path[end - 2] if end > 1 else None], 1)
    return index, path


@pytest.mark.parametrize("policy", [Fifo, Mru, S3Fifo])
def test_a_spared_parent_leaves_after_its_children(policy):
    index, path = grown(policy(), 40)
    for leaf in reversed(path):
        assert index.select_victims(1, lambda key: 1) == [leaf]
        index.remove([leaf], evicted=True)


def test_a_spared_parent_is_passed_over_once():
    """Whether chunks leave one by one or are asked about again and again."""
    policy = Walked()
    index, path = grown(policy, 1000)
    for leaf in reversed(path[500:]):
        for _ in range(3):
            assert index.select_victims(1, lambda key: 1) == [leaf]
        index.remove([leaf], evicted=True)
    assert policy.named < 1000 + 3 * 500 + 500
    index.remove(path[:500])
    assert (list(policy.victims()), len(index)) == ([], 0)


def test_a_spared_chunk_that_gets_another_child_is_spared_again():
    index, (root, child, other) = grown(Fifo(), 2)[0], make_keys(3)
    assert index.select_victims(1, lambda key: 1) == [child]
    index.remove([child], evicted=True)
    index.admit([other], [root], 1)
    assert index.select_victims(2, lambda key: 1) == [other, root]
    index.detach([other])
    assert index.select_victims(1, lambda key: 1, [{other}]) == [root]


def test_a_leaving_chunk_does_not_keep_its_parent():
    index = held("abc", "abc")
    index.detach(keys("cb"))
    assert choose(index, 3, spared="bc") == "a"
    index.request(keys("abc"), 0.0, {})
    assert choose(index, 3, spared="bc") == "", "they stayed"
    index.remove(keys("cb"))
    assert choose(index, 3) == "a"


def test_a_removed_chunk_leaves_nothing_behind():
    index = held("abc", "abc")
    index.remove(keys("cab"))
    assert index.resident.used == 0
    assert not any(parent(index, key) for key in "abc")
    admit(index, "b", None, 1)
    assert choose(index, 1) == "b"


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 12))
def test_the_remaining_chunks_are_reachable(seed, count, amount):
    """In any forest and any order, no chunk is left behind by its parent, and as many leave as should."""
    rng = random.Random(seed)
    all_of_them = "abcdefghijkl"[:count]
    parents = {key: rng.choice([None, *all_of_them[:i]]) for i, key in enumerate(all_of_them)}
    index = CacheIndex(Listed("".join(rng.sample(all_of_them, count))))
    for key in rng.sample(all_of_them, count):
        admit(index, key, parents[key], 1)
    chosen = choose(index, amount)
    assert len(set(chosen)) == len(chosen) == min(amount, count)
    for i, key in enumerate(chosen):
        assert all(child in chosen[:i] for child in all_of_them if parents[child] == key)
