"""What a policy learned lies in the store as one more frame, and is believed only if it is whole."""

from __future__ import annotations

import pytest

from kvtier_core.builtin.git import GitConfig
from kvtier_core.builtin.lru import LruConfig
from kvtier_core.memo import Memo, key_of
from kvtier_core.residents import Residents
from kvtier_core.testing.machine import NAMESPACE, Shelf
from kvtier_core.testing.samples import make_key
from kvtier_core.types import Namespace

PLENTY = 1 << 30
LOVED = make_key(0)


def learned(residents):
    for now in range(1, 200):
        residents.request([LOVED], float(now), {})
    return residents


def kept():
    """A store in which a policy left what it had learned."""
    shelf = Shelf()
    residents = learned(Residents(GitConfig().open()))
    Memo(shelf, residents, PLENTY).keep(NAMESPACE)
    return shelf, residents.save()


def recalled(shelf, namespace=NAMESPACE, capacity=PLENTY):
    residents = Residents(GitConfig().open())
    Memo(shelf, residents, capacity).recall(namespace)
    return residents.save()


COLD = GitConfig().open().save()


def test_what_was_learned_is_warm_after_a_restart():
    shelf, saved = kept()
    assert saved != COLD
    assert recalled(shelf) != COLD


@pytest.mark.parametrize("at", [0, 60, 4096, 5000])
def test_a_damaged_memo_is_a_cold_start(at):
    shelf, _ = kept()
    spoiled = bytearray(shelf.frames[key_of(NAMESPACE)])
    spoiled[at] ^= 1
    shelf.frames[key_of(NAMESPACE)] = bytes(spoiled)
    assert recalled(shelf) == COLD


def test_a_store_that_fails_or_is_empty_is_a_cold_start():
    shelf, _ = kept()
    shelf.fails = True
    assert recalled(shelf) == recalled(Shelf()) == COLD


def test_another_namespace_has_another_memo():
    shelf, _ = kept()
    assert recalled(shelf, Namespace.of({"model": "other"})) == COLD


def test_a_small_tier_keeps_none():
    shelf, _ = kept()
    assert recalled(shelf, capacity=1 << 16) == COLD
    memo = Memo(Shelf(), Residents(GitConfig().open()), 1 << 16)
    assert memo.nbytes == 0


def test_a_policy_that_learns_nothing_takes_no_room():
    assert Memo(Shelf(), Residents(LruConfig().open()), PLENTY).nbytes == 0
