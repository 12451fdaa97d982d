"""A worker that reads frames by itself, from real slabs: what reaches its pages was verified, and nothing else does."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest
import torch
from patience import HANG, wait_until

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal_part
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.transfer import staged_reader
from kvtier_core.types import FRAME_ALIGNMENT, FrameRead, ReadStatus, Slot, StoredFrame
from kvtier_gds.slab_files import SlabFiles
from kvtier_testing.samples import make_context, make_frame, make_keys, make_layout, make_namespace

LAYOUT = make_layout((4096, 2048), blocks=2, ranks=2)
NBYTES = LAYOUT.frame_nbytes
SHARD = LAYOUT.payload_nbytes // 2
CHUNKS = 6
BLOCKS = 2 * CHUNKS
KEYS = make_keys(CHUNKS)
HOME = make_namespace()
HASTY = "500ms"
SELF_TEST = tuple(Slot(0, number) for number in range(LAYOUT.self_test_slots))


def sealed(key, seed, layout=LAYOUT):
    """A frame as a stack seals it, with a random payload."""
    frame = make_frame(key, layout.frame_nbytes, seed)
    seal_part(frame, HOME, key, layout.parts[0])
    return frame


class Machine:
    """A stack's stores, and the worker sides of two ranks with pages for two layers."""

    def __init__(self, folder, *, layout=LAYOUT, arena="heap", device="cpu", mode="gds", timeout="60s"):
        self.device, self.layout = device, layout
        capacity = 8 * layout.frame_nbytes
        tiers = [
            {"type": arena, "capacity": f"{capacity}B"},
            {"type": "gds", "paths": [str(folder)], "capacity": f"{capacity}B", "mode": mode, "timeout": timeout},
        ]
        config = load_config({"version": 1, "chunk_tokens": layout.tokens, "tiers": tiers}, Registry.discover())
        context = make_context(layout=layout, namespace=HOME, capacity=capacity)
        self.arena = config.arenas[0].config.open(context)
        self.slabs = config.stores[0].config.open(context)
        self.slabs.write(KEYS, [sealed(key, seed, layout) for seed, key in enumerate(KEYS)])
        self.caches = [
            [torch.zeros(BLOCKS, nbytes // 4, dtype=torch.int32) for nbytes in layout.groups[0].page_nbytes]
            for _ in range(2)
        ]
        self.sides = [
            WorkerSide(
                config.arenas, rank, self._pages(rank), [dict(zip("ab", caches, strict=True))], stores=config.stores
            )
            for rank, caches in enumerate(self.caches)
        ]
        self.plan = StepPlan(
            arenas=(self.arena.handle,),
            reader_handles={"gds": self.slabs.reader_handle()},
            layout=layout,
            self_test_slots=SELF_TEST,
        )

    def attach(self):
        """What the self-tests found wrong."""
        for side in self.sides:
            side.attach(self.plan)
        return [side.progress().self_tests for side in self.sides]

    def _pages(self, rank):
        runs = tuple(PageRun(cache.data_ptr(), cache[0].nbytes, cache[0].nbytes) for cache in self.caches[rank])
        return lambda layout: PagedKVCache(runs, BLOCKS, self.device, rank, layout)

    def frames(self, keys=KEYS, named=None, namespace=HOME):
        located = self.slabs.locate(keys)
        return [StoredFrame("gds", *each, namespace.digest) for each in zip(located, named or keys, strict=True)]

    def load(self, places, request="request"):
        """Load chunk after chunk into block after block, on both ranks: the outcomes of each."""
        pages = tuple(((2 * number, 2 * number + 1),) for number in range(len(places)))
        return [self._load(side, StepPlan(loads=((request, Transfer(tuple(places), pages)),))) for side in self.sides]

    def _load(self, side, plan):
        side.load(plan, idle=False)
        side.suspend()  # waits for it
        side.resume()
        ended, failed = side.loaded()
        assert ended == {request for request, _ in plan.loads}
        progress = side.progress() or WorkerProgress()
        return bool(failed), {key: read.status for read_of in progress.unread.values() for key, read in read_of.items()}

    def content(self):
        return [[cache.clone() for cache in caches] for caches in self.caches]

    def wipe(self):
        for caches in self.caches:
            for cache in caches:
                cache.zero_()

    def change(self, key, content, at=0):
        """Bytes of its frame in the slab."""
        (((_, begin), _),) = self.slabs.locate([key])
        with open(self.slabs._slabs[0].path / "kvtier.slab", "r+b") as slab:
            slab.seek(begin + at)
            slab.write(content)

    def close(self):
        for side in self.sides:
            side.close()
        self.slabs.close()
        self.arena.close()


@pytest.fixture
def opened(tmp_path):
    with contextlib.closing(Machine(tmp_path)) as machine:
        yield machine


@pytest.fixture
def hasty(tmp_path):
    """For reads that never return."""
    with contextlib.closing(Machine(tmp_path, timeout=HASTY)) as machine:
        yield machine


@pytest.fixture
def machine(opened):
    assert [list(outcomes) for outcomes in opened.attach()] == [[(0, "")], [(0, "")]]
    return opened


def same(content, other):
    return all(torch.equal(*pair) for ranks in zip(content, other, strict=True) for pair in zip(*ranks, strict=True))


def good(machine):
    """What an arena brings to the pages from the same frames."""
    for number, key in enumerate(KEYS):
        machine.arena.view(number)[:] = sealed(key, number, machine.layout)
    assert machine.load([Slot(0, number) for number in range(CHUNKS)]) == [(False, {})] * 2
    content = machine.content()
    machine.wipe()
    return content


def test_each_rank_gets_the_shard_that_an_arena_would_bring(machine):
    expected = good(machine)
    assert machine.load(machine.frames()) == [(False, {})] * 2
    assert same(machine.content(), expected) and expected[0][0].any()


def test_a_request_may_load_from_an_arena_and_from_a_store(machine):
    expected = good(machine)
    places = [Slot(0, 0), *machine.frames()[1:4], Slot(0, 4), *machine.frames()[5:]]
    assert machine.load(places) == [(False, {})] * 2
    assert same(machine.content(), expected)


def test_more_chunks_than_there_is_memory_for(opened, monkeypatch):
    monkeypatch.setattr(staged_reader, "_HOST_LANE_NBYTES", NBYTES)
    opened.attach()
    expected = good(opened)
    assert opened.load(opened.frames()) == [(False, {})] * 2
    assert same(opened.content(), expected)


def test_unverified_bytes_reach_no_page(machine):
    empty = machine.content()
    stranger = machine.frames(KEYS[:1], named=KEYS[1:2])
    assert machine.load(stranger) == [(True, {KEYS[1]: ReadStatus.CORRUPT})] * 2
    foreign = machine.frames(KEYS[:1], namespace=make_namespace("another"))
    assert machine.load(foreign) == [(True, {KEYS[0]: ReadStatus.CORRUPT})] * 2
    machine.change(KEYS[2], b"\xff", at=40)
    assert machine.load(machine.frames(KEYS[2:3])) == [(True, {KEYS[2]: ReadStatus.CORRUPT})] * 2
    machine.change(KEYS[3], bytes(NBYTES))
    assert machine.load(machine.frames(KEYS[3:4])) == [(True, {KEYS[3]: ReadStatus.CORRUPT})] * 2
    assert same(machine.content(), empty)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [0, SHARD - 1])
def test_a_damaged_shard_reaches_no_page_of_its_rank(machine, rank, place):
    expected = good(machine)
    machine.change(KEYS[2], b"\xff", at=FRAME_ALIGNMENT + rank * SHARD + place)
    outcomes = machine.load(machine.frames())
    assert outcomes[rank] == (True, {KEYS[2]: ReadStatus.CORRUPT}) and outcomes[1 - rank] == (False, {})
    damaged, whole = machine.content()[rank], machine.content()[1 - rank]
    assert not any(cache[4:6].any() for cache in damaged)
    assert all(torch.equal(*pair) for pair in zip(whole, expected[1 - rank], strict=True))


def noted_reads(monkeypatch):
    """What is read from now on: where, and how much."""
    reads, read = [], SlabFiles.read_extents

    def noted(files, extents, into):
        reads.extend((extent.at, len(view)) for extent, view in zip(extents, into, strict=True))
        return read(files, extents, into)

    monkeypatch.setattr(SlabFiles, "read_extents", noted)
    return reads


def test_each_rank_reads_the_header_and_its_own_shard(machine, monkeypatch):
    reads = noted_reads(monkeypatch)
    frames = machine.frames()
    machine.load(frames)
    starts = [frame.location.place[1] for frame in frames]
    payloads = [(at + FRAME_ALIGNMENT + rank * SHARD, SHARD) for rank in range(2) for at in starts]
    assert sorted(reads) == sorted([*payloads, *((at, FRAME_ALIGNMENT) for at in starts * 2)])


def test_a_shard_that_begins_within_a_page_is_read_with_all_others(tmp_path, monkeypatch):
    """The first one does not, and is read alone, up to the end of its last page."""
    layout = make_layout((2048, 1024), blocks=2, ranks=2)
    with contextlib.closing(Machine(tmp_path, layout=layout)) as machine:
        machine.attach()
        expected = good(machine)
        reads = noted_reads(monkeypatch)
        assert machine.load(machine.frames()) == [(False, {})] * 2
        assert same(machine.content(), expected) and expected[1][1].any()
        own, both = 2 * FRAME_ALIGNMENT, layout.frame_nbytes - FRAME_ALIGNMENT
        assert [Counter(nbytes for _, nbytes in reads)[nbytes] for nbytes in (own, both)] == [CHUNKS, CHUNKS]
        machine.change(KEYS[2], b"\xff", at=FRAME_ALIGNMENT)
        assert [failed for failed, _ in machine.load(machine.frames())] == [True, True]


def test_a_frame_without_checksums_of_its_shards_is_a_miss(machine):
    """One that another version of kvtier wrote: through an arena it could still be read."""
    machine.slabs.write(KEYS[:1], [make_frame(KEYS[0], NBYTES, 0, HOME)])
    assert machine.load(machine.frames(KEYS[:1])) == [(True, {KEYS[0]: ReadStatus.INCOMPATIBLE})] * 2


def test_a_frame_that_is_longer_than_a_slot_does_not_reach_into_the_next(machine, monkeypatch):
    reads = noted_reads(monkeypatch)
    frames = machine.frames(KEYS[:3])
    machine.load([frame._replace(location=frame.location._replace(nbytes=2 * NBYTES)) for frame in frames])
    assert sorted(nbytes for _, nbytes in reads) == [FRAME_ALIGNMENT] * 6 + [SHARD] * 6


def test_a_request_fails_with_one_of_its_chunks_and_others_do_not(machine):
    machine.change(KEYS[2], b"\xff", at=40)
    assert [failed for failed, _ in machine.load(machine.frames())] == [True, True]
    assert machine.load(machine.frames(KEYS[:2])) == [(False, {})] * 2


def test_a_store_that_fails_as_a_whole_says_so(machine, monkeypatch):
    def fail(files, extents, into):
        raise BackendError("gone")

    monkeypatch.setattr(SlabFiles, "read_extents", fail)
    assert machine.load(machine.frames(KEYS[:2])) == [(True, dict.fromkeys(KEYS[:2], ReadStatus.IO_ERROR))] * 2


def test_a_read_that_hangs_fails_and_loads_go_on_when_it_returns(hasty, monkeypatch):
    machine = hasty
    machine.attach()
    returns, read = threading.Event(), SlabFiles.read_extents

    def hang(files, extents, into):
        returns.wait(HANG)
        into[0][:] = bytes(len(into[0]))
        return read(files, extents, into)

    monkeypatch.setattr(SlabFiles, "read_extents", hang)
    assert machine.load(machine.frames(KEYS[:1])) == [(True, {KEYS[0]: ReadStatus.IO_ERROR})] * 2
    monkeypatch.undo()
    expected = good(machine)
    returns.set()
    while machine.load(machine.frames()) != [(False, {})] * 2:  # it may take a moment to return
        pass
    assert same(machine.content(), expected)


def test_a_read_that_was_given_up_reaches_no_page_when_it_returns(hasty, monkeypatch):
    """The engine has computed these pages by then."""
    machine = hasty
    machine.attach()
    returns, returned, read = threading.Event(), threading.Semaphore(0), SlabFiles.read_extents

    def hang(files, extents, into):
        returns.wait(HANG)
        try:
            return read(files, extents, into)
        finally:
            returned.release()

    monkeypatch.setattr(SlabFiles, "read_extents", hang)
    assert machine.load(machine.frames(KEYS[:1])) == [(True, {KEYS[0]: ReadStatus.IO_ERROR})] * 2
    monkeypatch.undo()
    empty = machine.content()
    returns.set()
    for _ in range(2):
        assert returned.acquire(timeout=HANG)
    for side in machine.sides:
        side.close()  # waits for the threads
    assert same(machine.content(), empty)


def test_a_load_goes_on_while_the_engine_takes_no_step(opened, monkeypatch):
    """A step may take longer than the whole load."""
    monkeypatch.setattr(staged_reader, "_HOST_LANE_NBYTES", NBYTES)
    opened.attach()
    expected = good(opened)
    pages = tuple(((2 * number, 2 * number + 1),) for number in range(CHUNKS))
    plan = StepPlan(loads=(("request", Transfer(tuple(opened.frames()), pages)),))
    for side in opened.sides:
        side.load(plan, idle=False)
    wait_until(lambda: same(opened.content(), expected), "the load waits for a step")
    for side in opened.sides:
        side.suspend()
        assert side.loaded() == ({"request"}, set())


def test_files_that_cannot_be_reached_are_reported_at_the_start(opened, tmp_path):
    (tmp_path / "kvtier.slab").unlink()
    for side in opened.sides:
        side.attach(opened.plan)
    progress = [side.progress() for side in opened.sides]
    assert [list(each.self_tests) for each in progress] == [[(0, "")], [(0, "")]], "the arena is served all the same"
    assert all("No such file" in each.no_readers["gds"] for each in progress)
    assert [failed for failed, _ in opened.load(opened.frames())] == [True, True]


def test_a_frame_that_one_rank_could_not_read_counts_as_unread():
    bad = FrameRead(ReadStatus.CORRUPT, "damaged")
    first = WorkerProgress(unread={"a": {KEYS[0]: bad}})
    second = WorkerProgress(unread={"a": {KEYS[1]: bad}, "b": {KEYS[2]: bad}}, no_readers={"gds": "no GPU"})
    merged = first.merge(second)
    assert merged.unread == {"a": {KEYS[0]: bad, KEYS[1]: bad}, "b": {KEYS[2]: bad}}
    assert merged.no_readers == second.merge(first).no_readers == {"gds": "no GPU"}
