"""Stores that wait for a slow store: they leave threads and room to loads, and the oldest are dropped."""

from __future__ import annotations

from test_store_tier import Bench

from kvtier_core.testing.samples import make_keys

KEYS = A, B, C, D, E, F = make_keys(6)


def test_a_thread_is_left_for_loads():
    bench = Bench(frames=6)
    for key in KEYS:
        bench.write(key)
    assert bench.pool.jobs == 3, "of four threads"
    bench.turn()
    assert bench.pool.jobs == 3, "the next one begins when one has ended"
    bench.settle()
    assert bench.has(*KEYS) == [True] * 6


def test_the_oldest_store_that_waits_makes_room_for_a_new_one():
    bench = Bench(frames=6, inflight=5)
    for key in (A, B, C, D, E):
        bench.write(key)
    assert bench.events() == []
    bench.write(F)
    assert [(event.kind.value, event.keys, event.why) for event in bench.tier.events] == [
        ("rejected", (D,), "it waited for a store that is too slow")
    ]
    assert bench.released == [D]
    bench.settle()
    assert bench.has(*KEYS) == [True, True, True, False, True, True]


def test_loads_go_before_stores_that_wait():
    bench = Bench(frames=6, inflight=4)
    bench.write(A)
    bench.settle()
    for key in (B, C, D, E):
        bench.write(key)
    assert bench.pool.jobs == 3
    assert list(bench.read(A)) == [A], "its slot is that of a store that had not begun"
    assert bench.released == [A, E]
    bench.settle()
    assert (bench.good, bench.has(B, C, D, E)) == ([A], [True, True, True, False])


def test_what_was_dropped_is_stored_when_it_is_offered_again():
    bench = Bench(frames=6, inflight=4)
    for key in (A, B, C, D, E):
        bench.write(key)
    assert bench.released == [D]
    bench.settle()
    assert bench.tier.would_admit([D]) == [D]
    bench.write(D)
    bench.settle()
    assert bench.has(D) == [True]
    assert bench.tier.usage().inflight == 0
