"""Chunks of several parts in one tier: what leaves together, and what the policy is asked."""

from __future__ import annotations

import pytest

from kvtier_core.layouts import chunk_key, part_key
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.parted_index import PartedIndex
from kvtier_testing.samples import make_keys

KEYS = [chunk_key(key) for key in make_keys(12)]
A, B, C, D, E, F, G = KEYS[:7]


def part(chunk, number=1):
    return part_key(chunk, number)


@pytest.fixture
def index():
    """The least recently named goes first."""
    return PartedIndex(LruConfig().open())


def hold(index, path, *parts):
    """Hold a path, root first, that a request has just named, and other parts of its chunks."""
    new = index.resident.missing(path)
    index.request(path, 0.0, {})
    index.admit(new, [path[path.index(key) - 1] if path.index(key) else None for key in new], 1)
    index.admit(parts, [None] * len(parts), 1)


def victims(index, amount=1, **others):
    return index.select_victims(amount, lambda key: 1, **others)


def test_a_boundary_leaves_with_its_parts_and_the_chunks_that_only_it_needed(index):
    hold(index, [A, B, C, D], part(D), part(D, 2))
    assert victims(index) == [D, part(D), part(D, 2), C, B, A]


def test_chunks_stay_for_an_earlier_boundary(index):
    hold(index, [A, B, C, D], part(B), part(D))
    assert victims(index) == [D, part(D), C]
    index.remove(victims(index), evicted=True)
    assert victims(index) == [B, part(B), A]


def test_chunks_stay_for_another_branch(index):
    hold(index, [A, B, C], part(C))
    hold(index, [A, B, D, E], part(E))
    assert victims(index) == [C, part(C)]
    assert victims(index, 3) == [C, part(C), E, part(E), D, B, A]


def test_pinned_and_spared_chunks_stay_with_all_before_them(index):
    hold(index, [A, B, C], part(C))
    index.remove([part(C)])
    index.admit([part(C)], [None], 1, [7])
    assert victims(index, pinned={7}) == [], "a part of it is pinned"
    index.remove([part(C)])
    index.admit([part(C)], [None], 1, [8])
    assert victims(index, spared=[{B}]) == [C, part(C)]
    assert victims(index, spared=[{C}]) == []


def test_parts_whose_chunk_is_gone_leave_first(index):
    """And only once: nothing can be found by them."""
    hold(index, [A], part(A))
    hold(index, [B], part(B))
    index.remove([B])
    assert victims(index, 9) == [part(B), A, part(A)]
    assert victims(index, spared=[{B}]) == [A, part(A)], "its chunk is about to be held again"
    hold(index, [B])
    assert victims(index, 9) == [A, part(A), B, part(B)]


def test_a_newcomer_needs_the_room_of_all_that_leaves(index):
    hold(index, [A, B], part(B))
    hold(index, [C], part(C))
    index.request([D, E, F, G], 1.0, {})
    admitted, gone = index.plan_admission([D, E, F, G], 1, 0, lambda key: 1)
    assert (admitted, gone) == ([D, E, F, G], [B, part(B), A, C, part(C)])


def test_the_policy_hears_of_chunks_alone(monkeypatch):
    heard = []
    policy = LruConfig().open()

    class Spy:
        leaf_first = policy.leaf_first

        def __getattr__(self, name):
            def call(*args, **options):
                heard.append((name, *args[:1]))
                return getattr(policy, name)(*args, **options)

            return call

    index = PartedIndex(Spy())
    hold(index, [A, B], part(B), part(B, 2))
    index.remove([part(B), B])
    assert [call for call in heard if call[0] != "request"] == [("admit", B), ("admit", A), ("forget", B)]


def test_parts_go_where_their_chunks_go(index):
    hold(index, [A])
    offered = [B, part(A), part(B), part(C), part(D)]

    def all_but_c(path):
        assert list(path) == [B, C, D] or set(path) == {B, C, D}
        return [key for key in path if key != C]

    assert index.with_their_parts(offered, all_but_c) == [B, part(A), part(B), part(D)]
