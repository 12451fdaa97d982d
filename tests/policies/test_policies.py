"""What all policies of the core promise, and the order that each of them is named for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_policies import PLAIN_LRU

from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import KEY_NBYTES
from kvtier_policies.fifo import FifoConfig
from kvtier_policies.lfu import LfuConfig
from kvtier_policies.mru import MruConfig

PLAIN = [FifoConfig(), LfuConfig(), PLAIN_LRU, MruConfig()]
CONFIGS = [*PLAIN, LruConfig()]

moves = st.lists(st.tuples(st.sampled_from(["request", "admit", "forget", "evict"]), st.text("abcdefg", max_size=7)))


def keys_of(letters):
    return [letter.encode().ljust(KEY_NBYTES) for letter in letters]


def held(config, admitted="", requests=()):
    """A policy that took in these keys one by one, then saw these requests."""
    policy = config.open()
    for key in keys_of(admitted):
        policy.admit(key, 1)
    for now, path in enumerate(requests):
        policy.request(keys_of(path), float(now), {})
    return policy


def order(policy):
    return "".join(key.decode().strip() for key in policy.victims())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
@given(moves)
def test_each_held_key_is_a_victim_once(config, steps):
    policy, keys = config.open(), set()
    for now, (move, letters) in enumerate(steps):
        path = keys_of(letters)
        if move == "request":
            policy.request(path, float(now), {})
        for key in dict.fromkeys(path):
            if move == "admit" and key not in keys:
                keys.add(key)
                policy.admit(key, 1)
            elif move in ("forget", "evict") and key in keys:
                keys.remove(key)
                policy.forget(key, evicted=move == "evict")
        victims = list(policy.victims())
        assert sorted(victims) == sorted(keys)
        assert list(policy.victims()) == victims, "telling the victims changed them"


@pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.type)
def test_a_forgotten_key_leaves_nothing_behind(config):
    policy = held(config, "abc", ["abc", "a"])
    for key in keys_of("abc"):
        policy.forget(key, evicted=True)
    assert not any(vars(policy).values())


@pytest.mark.parametrize(
    ("config", "requests", "victims"),
    [
        (LruConfig(), [], "cba"),
        (LruConfig(), ["a"], "cba"),
        (LruConfig(), ["bc"], "acb"),
        (LruConfig(), ["abxc"], "cba"),
        (PLAIN_LRU, [], "cba"),
        (PLAIN_LRU, ["bc"], "acb"),
        (PLAIN_LRU, ["abxc"], "cba"),
        (MruConfig(), [], "abc"),
        (MruConfig(), ["abc"], "cba"),
        (MruConfig(), ["c", "b"], "bca"),
        (FifoConfig(), ["abc", "c", "c"], "cba"),
        (LfuConfig(), [], "cba"),
        (LfuConfig(), ["abc", "ab", "a"], "cba"),
        (LfuConfig(), ["c", "c", "b"], "abc"),
        (LfuConfig(), ["c", "b"], "acb"),
        (LfuConfig(), ["abc", "xyz"], "cba"),
    ],
)
def test_the_order_of_victims(config, requests, victims):
    """The prompt `abc` was admitted leaf first, as tiers do."""
    assert order(held(config, "cba", requests)) == victims


def test_a_count_does_not_outlive_its_chunk():
    policy = held(LfuConfig(), "ab", ["a", "a"])
    a, b = keys_of("ab")
    policy.forget(a, evicted=True)
    policy.request([b], 3.0, {})
    policy.admit(a, 1)
    assert order(policy) == "ab"
