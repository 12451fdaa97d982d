"""Chunks that may be stored in memory only, and lookups without some of the tiers."""

from __future__ import annotations

import pytest
from benches import PENDING, READY, StackBench
from test_asking import Asked

from kvtier_core.stack.outcomes import Terms
from kvtier_testing.samples import make_keys

KEYS = make_keys(8)
PATH, OTHERS = KEYS[:4], KEYS[4:]


@pytest.fixture
def bench():
    return StackBench(arenas=(4,))


def store_in_memory(bench, path):
    bench.manager.on_request(path, memory_only=True)
    if bench.manager.reserve(path, "store", memory_only=True):
        bench.manager.commit("store")
    bench.settle()


def test_chunks_are_written_once_a_request_that_is_not_memory_only_names_them(bench):
    store_in_memory(bench, PATH)
    store_in_memory(bench, PATH)
    assert bench.look(PATH) == [READY] * 4 and not bench.shelves[0].frames
    bench.manager.on_request(PATH[:3])
    bench.settle()
    assert bench.shelves[0].frames.keys() == {*PATH[:3]}
    bench.at_rest()


def test_a_tier_below_learns_only_of_chunks_that_it_has(bench, monkeypatch):
    named = []
    bench.store(PATH[:2])
    monkeypatch.setattr(bench.tiers[0].index, "request", lambda path, now, hints: named.append(list(path)))
    store_in_memory(bench, PATH)
    assert named == [PATH[:2]]
    assert bench.shelves[0].frames.keys() == {*PATH[:2]}


def test_what_a_job_stores_for_two_requests_is_written_for_one_of_them(bench):
    """A chunk is reserved once: the request that comes second adds nothing."""
    bench.fill(PATH[:2], "store")
    assert bench.manager.reserve(PATH, "more", memory_only=True).keys() == {*PATH[2:]}
    bench.manager.commit("store")
    bench.manager.commit("more")
    bench.settle()
    assert bench.shelves[0].frames.keys() == {*PATH[:2]}


def test_peers_see_a_chunk_once_a_request_that_is_not_memory_only_names_it(bench):
    bench.arenas[0].sealed = {}
    store_in_memory(bench, PATH)
    assert not bench.arenas[0].sealed
    bench.manager.on_request(PATH[:1])
    bench.settle()
    assert [*bench.arenas[0].sealed] == PATH[:1]


def test_nothing_is_read_from_a_tier_that_a_lookup_excludes(bench):
    bench.store(PATH)
    bench.store(OTHERS)
    terms, reads = Terms(without=["disk"]), []
    bench.shelves[0].read = lambda keys, into: reads.append(keys)
    bench.manager.prefetch(PATH, terms)
    found = bench.manager.lookup(PATH, "request", terms)
    assert not found.slots and not found.pending
    assert found.miss_reason == "it asked not to load from disk, which has it"
    bench.manager.release("request")
    bench.settle()
    assert not reads and bench.look(PATH) == [PENDING] * 4


def test_a_shared_store_that_a_lookup_excludes_is_not_asked():
    bench = StackBench(arenas=(4,), tiers=(12, 12), shelf=Asked)
    terms = Terms(without=["disk"])
    bench.manager.prefetch(PATH, terms)
    assert bench.manager.lookup(PATH, "request", terms).pending == 4
    bench.settle()
    assert [shelf.questions for shelf in bench.shelves] == [[], [PATH]]
