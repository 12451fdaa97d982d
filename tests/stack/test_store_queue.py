"""Stores that wait for a slow store: they leave threads and room to loads, and the oldest are dropped."""

from __future__ import annotations

from benches import TierBench
from machine import Shelf

from kvtier_testing.samples import make_keys

KEYS = A, B, C, D, E, F = make_keys(6)


def test_a_thread_is_left_for_loads():
    bench = TierBench(frames=6)
    for key in KEYS:
        bench.write(key)
    assert bench.pool.jobs == 3, "of four threads"
    bench.turn()
    assert bench.pool.jobs == 3, "the next one begins when one has ended"
    bench.settle()
    assert bench.has(*KEYS) == [True] * 6


def test_the_oldest_store_that_waits_makes_room_for_a_new_one():
    bench = TierBench(frames=6, inflight=5)
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


class KeepsAll(Shelf):
    """Deletes nothing while it fails."""

    def _gate(self):
        pass

    def delete(self, keys):
        super()._gate()
        super().delete(keys)


def test_a_write_that_is_dropped_while_it_probes_ends_the_probe():
    """It waits for a delete that is repeated, whose outcome the breaker has counted already."""
    bench = TierBench(frames=2, inflight=1, shelf=KeepsAll())
    for key in (A, B):
        bench.write(key)
        bench.settle()
    bench.shelf.frames[A] = bytes(len(bench.shelf.frames[A]))
    bench.shelf.fails = True
    bench.read(A)
    bench.settle()
    bench.write(C)
    bench.settle()
    assert ("breaker_open", []) in bench.events() and bench.tier.would_admit([C]) == []
    bench.shelf.fails = False
    bench.now += 10.0
    bench.tier.poll()
    bench.write(C)
    assert list(bench.read(B)) == [B] and bench.released[-1] == C
    bench.settle()
    bench.events()
    assert bench.tier.would_admit([C]) == [C], "the next one is another probe"
    bench.write(C)
    bench.settle()
    assert ("breaker_closed", []) in bench.events() and bench.has(C) == [True]


def test_loads_go_before_stores_that_wait():
    bench = TierBench(frames=6, inflight=4)
    bench.write(A)
    bench.settle()
    for key in (B, C, D, E):
        bench.write(key)
    assert bench.pool.jobs == 3
    assert list(bench.read(A)) == [A], "its slot is that of a store that had not begun"
    assert bench.released == [A, E]
    bench.settle()
    assert (bench.good, bench.has(B, C, D, E)) == ([A], [True, True, True, False])


def test_a_dropped_chunk_is_stored_when_it_is_offered_again():
    bench = TierBench(frames=6, inflight=4)
    for key in (A, B, C, D, E):
        bench.write(key)
    assert bench.released == [D]
    bench.settle()
    assert bench.tier.would_admit([D]) == [D]
    bench.write(D)
    bench.settle()
    assert bench.has(D) == [True]
    assert bench.tier.usage().inflight == 0
