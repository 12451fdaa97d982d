"""What a policy learned lies in the store as one more frame, and is believed only if it is whole."""

from __future__ import annotations

import pytest
from machine import LAYOUT, NAMESPACE, Shelf
from manual_pool import ManualPool

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.policy_state import PolicyState, key_of
from kvtier_core.types import Namespace
from kvtier_testing.samples import make_keys

PLENTY = 1 << 30
LOVED = make_keys(1)


def learned(index):
    for now in range(1, 200):
        index.request(LOVED, float(now), {})
    return index


def kept():
    """A store in which a policy left what it had learned."""
    shelf = Shelf()
    index = CacheIndex(GittinsConfig().open())
    state = PolicyState(shelf, index.policy, FrameCodec(NAMESPACE, LAYOUT), PLENTY)
    learned(index)
    state.keep()
    return shelf, index.policy.save()


def recalled(shelf, namespace=NAMESPACE, capacity=PLENTY):
    index = CacheIndex(GittinsConfig().open())
    PolicyState(shelf, index.policy, FrameCodec(namespace, LAYOUT), capacity).recall()
    return index.policy.save()


COLD = GittinsConfig().open().save()


def warm(saved):
    """What a policy knows that was given this."""
    policy = GittinsConfig().open()
    policy.restore(saved)
    return policy.save()


def test_the_policy_is_warm_after_a_restart():
    shelf, saved = kept()
    assert saved != COLD
    assert recalled(shelf) != COLD


@pytest.mark.parametrize("at", [0, 60, 4096, 5000])
def test_a_damaged_memo_is_a_cold_start(at):
    shelf, _ = kept()
    spoiled = bytearray(shelf.frames[key_of(NAMESPACE.digest)])
    spoiled[at] ^= 1
    shelf.frames[key_of(NAMESPACE.digest)] = bytes(spoiled)
    assert recalled(shelf) == COLD


def test_a_store_that_fails_or_is_empty_is_a_cold_start():
    shelf, _ = kept()
    shelf.fails = True
    assert recalled(shelf) == recalled(Shelf()) == COLD


def test_another_namespace_has_another_memo():
    shelf, _ = kept()
    assert recalled(shelf, Namespace.of({"model": "other"})) == COLD


def test_a_tier_smaller_than_a_chunk_keeps_none():
    shelf, _ = kept()
    assert recalled(shelf, capacity=1 << 16) == COLD
    memo = PolicyState(Shelf(), GittinsConfig().open(), FrameCodec(NAMESPACE, LAYOUT), 1 << 16)
    assert memo.nbytes == 0


def test_a_policy_that_learns_nothing_takes_no_room():
    assert PolicyState(Shelf(), LruConfig().open(), FrameCodec(NAMESPACE, LAYOUT), PLENTY).nbytes == 0


# -- now and then ----------------------------------------------------------------------------------


class Now:
    """A policy that may learn, and a thread that keeps it when the test says so."""

    def __init__(self, shelf=None):
        self.shelf = shelf or Shelf()
        self.index = CacheIndex(GittinsConfig().open())
        self.memo = PolicyState(self.shelf, self.index.policy, FrameCodec(NAMESPACE, LAYOUT), PLENTY)
        self.pool = ManualPool()
        self.outcomes = []

    def at(self, now):
        """Was something handed to the thread?"""
        before = self.pool.jobs
        if self.memo.due(now):
            self.memo.keep_by(self.pool, now, self.outcomes.append)
        return self.pool.jobs > before

    def keep(self):
        self.pool.wait(0)
        self.pool.step()


def test_the_policy_state_is_kept_once_a_minute():
    each = Now()
    assert not each.at(1000.0)
    learned(each.index)
    assert [each.at(now) for now in (1001.0, 1059.9, 1060.0)] == [False, False, True]
    saved = each.index.policy.save()
    each.index.request(LOVED, 500.0, {})  # what a thread writes is what was known when it was told to
    each.keep()
    assert recalled(each.shelf) == warm(saved)
    assert [each.at(now) for now in (1100.0, 1120.0)] == [False, True]


def test_an_unchanged_state_is_not_written():
    each = Now()
    learned(each.index)
    assert [each.at(now) for now in (0.0, 60.0)] == [False, True]
    each.keep()
    assert [each.at(now) for now in (120.0, 180.0, 240.0)] == [False] * 3


def test_a_save_never_overlaps_another():
    each = Now()
    each.at(0.0)
    learned(each.index)
    assert each.at(60.0)
    each.index.request(LOVED, 500.0, {})
    assert not each.at(600.0)
    each.keep()
    assert each.at(601.0)


def test_a_failed_write_of_the_state_is_retried():
    each = Now()
    each.at(0.0)
    learned(each.index)
    each.shelf.fails = True
    assert each.at(60.0)
    each.keep()
    assert isinstance(each.outcomes[0].error, BackendError)
    each.shelf.fails = False
    assert [each.at(now) for now in (61.0, 120.0)] == [False, True]
    each.keep()
    assert recalled(each.shelf) == warm(each.index.policy.save())


def test_engines_that_share_a_store_do_not_overwrite_each_other():
    class Shared(Shelf):
        shared = True

    each = Now(Shared())
    learned(each.index)
    assert [each.at(now) for now in (0.0, 60.0, 120.0)] == [False] * 3
