"""The worker sides of several ranks: who stores what they all have, and where each tests its copies."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import FakeCuda

from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import StepPlan, Transfer
from kvtier_core.engine.worker import side as worker_side
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.errors import ConfigError
from kvtier_core.interfaces import DirectReader, JobResult, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.library import Method
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import Location, Slot, StoredFrame
from kvtier_testing.samples import PagedBuffer, make_context, make_group, make_key, make_layout

LAYOUT = make_layout((64, 32), blocks=2, ranks=2, replicas=2)
BLOCKS = 8
EMPTY = bytes(LAYOUT.frame_nbytes)


def stack_of(slots):
    tiers = [{"type": "heap", "capacity": f"{slots * LAYOUT.frame_nbytes}B"}]
    return load_config({"version": 1, "chunk_tokens": LAYOUT.tokens, "tiers": tiers}, Registry.discover())


@pytest.fixture
def arena():
    return stack_of(4).arenas[0].config.open(make_context(layout=LAYOUT, capacity=4 * LAYOUT.frame_nbytes))


@pytest.fixture
def ranks(arena):
    """The worker sides of both ranks, after the first step."""
    plan = StepPlan(arenas=(arena.handle,), layout=LAYOUT, self_test_slots=(Slot(0, 0), Slot(0, 1)))
    sides = []
    for rank in range(2):
        caches = {name: torch.rand(BLOCKS, nbytes // 4) for name, nbytes in (("a", 64), ("b", 32))}
        sides.append(WorkerSide(stack_of(4).arenas, rank, pages_of(caches, rank), [caches]))
        sides[rank].attach(plan)
    yield sides
    for side in sides:
        side.close()


def pages_of(caches, rank):
    runs = tuple(PageRun(cache.data_ptr(), cache[0].nbytes, cache[0].nbytes) for cache in caches.values())
    return lambda layout: PagedKVCache(runs, BLOCKS, "cpu", rank, layout)


def test_each_tests_a_slot_of_its_own(ranks, arena):
    assert [side.progress().self_tests for side in ranks] == [Counter({(0, ""): 1})] * 2
    used = [bytes(arena.view(slot)) != EMPTY for slot in range(4)]
    assert used == [True, True, False, False]


def test_ranks_test_different_parts_at_the_same_time(monkeypatch):
    """The shards of different parts begin at different places: in one slot they would overlap."""
    groups = [make_group((256,), kind=KVKind.SLIDING_WINDOW, reach=16), make_group((64, 64))]
    layout = ChunkLayout(groups, tokens=16, ranks=2, stages=((0, 2), (1, 0)))
    arena = stack_of(4).arenas[0].config.open(make_context(layout=layout, capacity=4 * layout.frame_nbytes))
    slots = tuple(Slot(0, number) for number in range(layout.self_test_slots))
    plan = StepPlan(arenas=(arena.handle,), layout=layout, self_test_slots=slots)
    window, full = {"a": torch.rand(BLOCKS, 64)}, {"b": torch.rand(BLOCKS, 16), "c": torch.rand(BLOCKS, 16)}
    first = WorkerSide(stack_of(4).arenas, 0, pages_of(full, 0), [{}, full])
    second = WorkerSide(stack_of(4).arenas, 1, pages_of(window, 1), [window, {}])
    load = HostMover.load
    monkeypatch.setattr(HostMover, "load", lambda mover, *job: (second.attach(plan), load(mover, *job)))
    first.attach(plan)  # while it tests its copies, after it has stored, the other one begins and ends
    assert [side.progress().self_tests for side in (first, second)] == [Counter({(0, ""): 1})] * 2
    for side in (first, second):
        side.close()


def test_one_engine_stores_and_both_load(ranks, arena):
    pages = (((3, 5),),)
    for side in ranks:
        side.progress()
    for side in reversed(ranks):  # first the one that stores nothing
        assert bytes(arena.view(2)) == EMPTY
        side.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), pages)),)))
    stored, other = (side.progress() for side in ranks)
    assert stored.ended == other.ended == Counter({7: 1})
    assert not stored.failed and not other.failed and not other.checksums
    assert set(stored.checksums) <= {(7, 0)}, "they are summed by shard"
    assert bytes(arena.view(2)) != EMPTY
    for side in ranks:
        side.load(StepPlan(loads=(("a request", Transfer((Slot(0, 2),), (((1, 2),),))),)), idle=False)
        side.suspend()  # waits for it
        assert side.loaded() == ({"a request"}, set())


def test_a_plan_of_other_memory_is_not_carried_out(ranks, arena):
    """It may come while the worker cannot attach yet. Its slots are numbers of a memory that the worker has not."""
    stored = Transfer((Slot(0, 2),), (((3, 5),),))
    side = ranks[0]
    side.progress()
    side.store(StepPlan(attachment=1, stores=((7, stored),)))
    assert side.progress().failed == Counter({7: 1})
    side.load(StepPlan(attachment=1, loads=(("a request", stored),)), idle=False)
    assert side.loaded() == ({"a request"}, {"a request"})
    assert bytes(arena.view(2)) == EMPTY


def test_another_attachment_is_tested_when_the_copies_of_the_one_before_have_ended(ranks, arena):
    other = stack_of(4).arenas[0].config.open(make_context(layout=LAYOUT, capacity=4 * LAYOUT.frame_nbytes))
    plan = StepPlan(1, (other.handle,), layout=LAYOUT, self_test_slots=(Slot(0, 0), Slot(0, 1)))
    side = ranks[0]
    side.progress()
    side.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), (((3, 5),),))),)))
    side.attach(plan)
    assert bytes(other.view(0)) == EMPTY, "a copy of the one before was under way"
    assert not side.progress().self_tests
    side.attach(plan)
    assert side.progress().self_tests == Counter({(1, ""): 1}) and bytes(other.view(0)) != EMPTY
    other.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_stores_of_an_engine_that_overwrites_blocks_early_are_fenced_at_once(arena, monkeypatch, at_once):
    fenced = []
    monkeypatch.setattr(HostMover, "fence", lambda mover, jobs: fenced.append(len(jobs)))
    caches = {name: torch.rand(BLOCKS, nbytes // 4) for name, nbytes in (("a", 64), ("b", 32))}
    side = WorkerSide(stack_of(4).arenas, 0, pages_of(caches, 0), [caches], fence_at_once=at_once)
    side.attach(StepPlan(arenas=(arena.handle,), layout=LAYOUT, self_test_slots=(Slot(0, 0), Slot(0, 1))))
    side.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), (((3, 5),),))),)))
    assert fenced == [1] * at_once
    side.close()


def test_a_reader_waits_for_the_stores_under_way(arena, monkeypatch):
    """It does not know which pages they read. Its mark is behind them, and good for this step alone."""
    calls, marks = [], iter("abcd")
    monkeypatch.setattr(HostMover, "fence", lambda mover, jobs: calls.append(f"fence {len(jobs)}"))
    caches = {name: torch.rand(BLOCKS, nbytes // 4) for name, nbytes in (("a", 64), ("b", 32))}
    side = WorkerSide(stack_of(4).arenas, 0, pages_of(caches, 0), [caches])
    side.attach(StepPlan(arenas=(arena.handle,), layout=LAYOUT, self_test_slots=(Slot(0, 0), Slot(0, 1))))
    reader = side._readers["store"] = Mock(DirectReader, finished=list)
    reader.mark = lambda: calls.append(mark := next(marks)) or mark
    reader.load = lambda job, frames, pages, after: calls.append(f"load after {after}")
    side.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), (((3, 5),),))),)))
    side.fence(StepPlan())
    side.mark()
    frame = StoredFrame("store", Location((0,), LAYOUT.frame_nbytes), make_key(0), b"")
    plan = StepPlan(loads=(("a request", Transfer((frame,), (((3, 5),),))),))
    side.fence(plan)
    side.mark()
    side.load(plan, idle=False)
    side.load(StepPlan(loads=(("another", plan.loads[0][1]),)), idle=False)
    assert calls == ["a", "fence 1", "b", "load after b", "load after None"]
    side.close()


@pytest.fixture
def over_a_device(monkeypatch):
    """A device that works when a test says so, and a way to make worker sides of its pages, with so many arenas."""
    cuda, pages = FakeCuda(deferred=True), PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
    world = SimpleNamespace(layout=LAYOUT, kv_cache=pages.kv_cache(), slots=bytearray(4 * LAYOUT.frame_nbytes))
    monkeypatch.setattr(worker_side, "attach", lambda *_: cuda.mover(world, autotune=decided(Method.STAGED)))
    monkeypatch.setattr(worker_side, "try_copies", lambda *_: "")  # it would wait for the device
    sides = []

    def make(arenas=1):
        sides.append(WorkerSide(stack_of(4).arenas * arenas, 0, lambda _: world.kv_cache, []))
        sides[-1].attach(StepPlan(arenas=("",) * arenas, layout=LAYOUT))
        return sides[-1]

    yield cuda, make
    cuda.hold(None)
    cuda.finish()
    for side in sides:
        side.close()


def must_not_overtake(cuda, loading, loads, storing):
    """The device has not begun a store of blocks that a load fills."""
    cuda.hold(storing._movers[0]._stores.kernels)
    loading.load(loads, idle=False)
    cuda.finish()
    assert loading.loaded() == (set(), set()), "the load overtook the store"
    cuda.hold(None)
    cuda.finish()
    assert loading.loaded() == ({"a request"}, set())


@pytest.mark.parametrize("arena", [0, 1])
def test_no_load_overtakes_a_store_into_another_arena(over_a_device, arena):
    cuda, make = over_a_device
    side = make(arenas=2)
    side.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), (((3, 5),),))),)))
    plan = StepPlan(loads=(("a request", Transfer((Slot(arena, 1),), (((3, 5),),))),))
    side.fence(plan)
    side.mark()
    must_not_overtake(cuda, side, plan, side)


def test_no_load_overtakes_a_store_of_another_worker_side(over_a_device):
    """Two connectors of one engine: the plan of the second names its store, as the first loads into those blocks."""
    cuda, make = over_a_device
    loading, storing = make(), make()
    storing.store(StepPlan(stores=((7, Transfer((Slot(0, 2),), (((3, 5),),))),)))
    plan = StepPlan(loads=(("a request", Transfer((Slot(0, 1),), (((3, 5),),))),))
    loading.fence(plan)
    storing.fence(StepPlan(stores_to_fence=(7,)))
    loading.mark()
    storing.mark()
    must_not_overtake(cuda, loading, plan, storing)


def test_movers_are_closed_when_no_reader_reads_any_more(ranks, monkeypatch):
    """With its movers a server is told that this worker touches nothing any more."""
    closed, close = [], HostMover.close
    side = ranks[0]
    side._readers["store"] = Mock(DirectReader, close=lambda: closed.append("reader"))
    monkeypatch.setattr(HostMover, "close", lambda mover: closed.append("mover") or close(mover))
    side.close()
    monkeypatch.undo()
    assert closed == ["reader", "mover"]


@pytest.mark.parametrize(
    "filled, leading",
    [([0, 1], 2), ([0, 2], 1), ([1, 2], 0), ([], 0)],
)
def test_of_a_store_that_fills_some_slots_the_leading_ones_are_reported(ranks, monkeypatch, filled, leading):
    side = ranks[0]
    side.progress()
    (mover,) = side._movers
    monkeypatch.setattr(mover, "finished", lambda: [JobResult(1, ok=False, filled=filled)])
    slots = tuple(Slot(0, number) for number in (1, 3, 2))
    side.store(StepPlan(stores=((7, Transfer(slots, (((0, 1),), ((2, 3),), ((4, 5),)))),)))
    progress = side.progress()
    assert progress.ended == Counter({7: 1})
    assert (progress.filled[7], progress.failed) == (leading, Counter())
    monkeypatch.undo()
    mover.finished()


def test_an_arena_has_a_slot_for_each(arena):
    context = make_context(layout=LAYOUT)
    open_stack(stack_of(2), context).close()
    with pytest.raises(ConfigError, match="the self-test of copies needs 2 slots, got 1"):
        open_stack(stack_of(1), context)


class Weights:
    """Those of a worker: a text in place of tensors."""

    def __init__(self):
        self.now = self.known = "first"

    def changed(self):
        return "" if self.now == self.known else f"they are the {self.now}"

    def renew(self):
        self.known = self.now


@pytest.fixture
def weighed(arena):
    """The worker side of a rank, after the first step, and its weights."""
    caches, weights = {name: torch.rand(BLOCKS, nbytes // 4) for name, nbytes in (("a", 64), ("b", 32))}, Weights()
    side = WorkerSide(stack_of(4).arenas, 0, pages_of(caches, 0), [caches], weights=weights)
    side.attach(StepPlan(arenas=(arena.handle,), layout=LAYOUT, self_test_slots=(Slot(0, 0), Slot(0, 1))))
    side.progress()
    yield side, weights
    side.close()


STORE = (7, Transfer((Slot(0, 2),), (((3, 5),),)))
LOAD = ("a request", Transfer((Slot(0, 2),), (((1, 2),),)))


def test_a_step_after_the_weights_changed_stores_and_loads_nothing(weighed, arena):
    side, weights = weighed
    weights.now = "second"
    plan = StepPlan(loads=(LOAD,), stores=(STORE,))
    side.watch_weights(plan)
    side.load(plan, idle=False)
    side.store(plan)
    assert side.loaded() == ({"a request"}, {"a request"})
    progress = side.progress()
    assert progress.failed == progress.ended == Counter({7: 1})
    assert progress.changed == {0: "rank 0: they are the second"}
    assert bytes(arena.view(2)) == EMPTY


def test_stores_resume_with_the_first_plan_of_the_new_epoch(weighed):
    side, weights = weighed
    weights.now = "second"
    for epoch, failed in ((0, 1), (0, 1), (1, 0), (1, 0)):
        plan = StepPlan(stores=(STORE,), epoch=epoch)
        side.watch_weights(plan)
        side.store(plan)
        progress = side.progress()
        assert progress.failed.total() == failed
    assert not progress.changed, "it is the epoch of these weights"


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_load_under_way_when_the_weights_change_has_failed(weighed, epoch):
    """Whether this worker notices or hears of it."""
    side, weights = weighed
    plan = StepPlan(loads=(LOAD,))
    side.watch_weights(plan)
    side.load(plan, idle=False)
    weights.now = "second"
    side.watch_weights(StepPlan(epoch=epoch))
    side.suspend()  # waits for it
    assert side.loaded() == ({"a request"}, {"a request"})


def test_weights_that_change_back_between_two_epochs_are_compared_with_those_of_the_second(weighed):
    side, weights = weighed
    weights.now = "second"
    side.watch_weights(StepPlan(epoch=1))  # computes, and moves no KV
    weights.now = "first"
    plan = StepPlan(stores=(STORE,), epoch=1)
    side.watch_weights(plan)
    side.store(plan)
    assert side.progress().changed == {1: "rank 0: they are the first"}


def test_jobs_that_fail_alike_have_one_line_until_the_worker_ends(ranks, monkeypatch, caplog):
    def refuse(mover, number, pages, slots):
        raise RuntimeError("no such page")

    monkeypatch.setattr(HostMover, "store", refuse)
    side = ranks[0]
    for job in range(7, 12):
        side.store(StepPlan(stores=((job, Transfer((Slot(0, 2),), (((3, 5),),))),)))
        assert side.progress().filled == {job: 0}
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["kvtier: store failed: 7: no such page"]
    side.close()
    assert [record.getMessage() for record in caplog.records][1:] == [
        "kvtier: store failed: 4 more in 0 s: no such page"
    ]
