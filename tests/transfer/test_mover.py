"""The host mover against a slow reference, with poison all around."""

import ctypes
import functools
import mmap
import random
import threading
import zlib

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import NO_BLOCK, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.transfer import copier as module
from kvtier_core.transfer.copier import Copier, PlainCopier
from kvtier_core.transfer.host_mover import HostMover
from kvtier_testing.samples import make_group, make_layout

LAYOUT = make_layout(page_nbytes=(48, 96), blocks=4)
KINDS = [
    {"kind": KVKind.FULL_ATTENTION},
    {"kind": KVKind.SLIDING_WINDOW, "reach": 33},
    {"kind": KVKind.STATE},
]


class World:
    """A paged buffer and slots in one piece of random bytes each, and what they should be after each job."""

    def __init__(self, layout, *, part=0, rank=0, blocks=8, slots=3, gaps=None, seed=0, copier=PlainCopier):
        rng = random.Random(seed)
        sizes = [nbytes for group in layout.groups for nbytes in group.page_nbytes]
        gaps = gaps or [0] * len(sizes)
        strides = [nbytes + gap for nbytes, gap in zip(sizes, gaps, strict=True)]
        self.layout, self.part, self.rank = layout, layout.parts[part], rank
        self.starts, end = [], 7
        for stride in strides:
            self.starts.append(end)
            end += stride * blocks + 5
        self.pages = bytearray(rng.randbytes(end))
        self.slots = bytearray(rng.randbytes(slots * layout.frame_nbytes))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        runs = [
            PageRun(base + start, stride, nbytes)
            for start, stride, nbytes in zip(self.starts, strides, sizes, strict=True)
        ]
        self.kv_cache = PagedKVCache(tuple(runs), blocks, "cpu", rank, layout)
        self.copier = copier

    @functools.cached_property
    def mover(self):
        """With a thread of its own, until it is closed."""
        return HostMover(self.kv_cache, memoryview(self.slots), self.layout.frame_nbytes, self.copier)

    def bytes_of(self, pages, slots):
        """Index in the buffer and in the slots of every byte that a job moves."""
        for chunk, slot in zip(pages, slots, strict=True):
            place = slot * self.layout.frame_nbytes + self.part.shard_of(self.rank).offset
            for layer in self.part.shard_of(self.rank).layers:
                start, run = self.starts[layer.layer], self.kv_cache.layers[layer.layer]
                for block in chunk[layer.group]:
                    if block != NO_BLOCK:
                        page = start + block * run.stride
                        yield from ((page + i, place + i) for i in range(run.nbytes))
                    place += run.nbytes

    def ended(self):
        return [(job, ok) for job, ok, *_ in self.mover.finished()]

    def state(self):
        return bytes(self.pages), bytes(self.slots)

    def after_store(self, pages, slots):
        expected = bytearray(self.slots)
        for page, place in self.bytes_of(pages, slots):
            expected[place] = self.pages[page]
        return bytes(self.pages), bytes(expected)

    def after_load(self, slots, pages):
        expected = bytearray(self.pages)
        for page, place in self.bytes_of(pages, slots):
            expected[page] = self.slots[place]
        return bytes(expected), bytes(self.slots)


@pytest.fixture
def runtime():
    runtime = World(LAYOUT)
    yield runtime
    runtime.mover.close()


@pytest.fixture
def gate(monkeypatch):
    """Copies of other threads wait until it is set."""
    gate = threading.Event()
    memmove, here = ctypes.memmove, threading.get_ident()
    monkeypatch.setattr(
        module.ctypes, "memmove", lambda *args: (threading.get_ident() == here or gate.wait(HANG)) and memmove(*args)
    )
    yield gate
    gate.set()


@st.composite
def layouts(draw):
    """Of one group or two, whose blocks may have other lengths, and which may be needed at other places."""
    sizes = st.lists(st.sampled_from([1, 16, 40]), min_size=1, max_size=4)
    groups = [
        make_group(
            draw(sizes),
            name=f"group {number}",
            block_tokens=draw(st.sampled_from([8, 16])),
            **draw(st.sampled_from(KINDS)),
        )
        for number in range(draw(st.integers(1, 2)))
    ]
    return ChunkLayout(groups, 16 * draw(st.integers(1, 5)), draw(st.integers(1, 3)))


@st.composite
def jobs(draw):
    layout = draw(layouts())
    layers = sum(len(group.page_nbytes) for group in layout.groups)
    runtime = World(
        layout,
        part=draw(st.integers(0, len(layout.parts) - 1)),
        rank=draw(st.integers(0, layout.ranks - 1)),
        blocks=draw(st.integers(30, 35)),
        gaps=draw(st.lists(st.sampled_from([0, 0, 1, 24]), min_size=layers, max_size=layers)),
        seed=draw(st.integers(0, 9)),
        copier=draw(st.sampled_from([PlainCopier, Copier])),
    )
    slots = draw(st.lists(st.integers(0, 2), unique=True, max_size=3))
    pages = [[blocks_of(draw, runtime, number, count) for count in runtime.part.blocks] for number in range(len(slots))]
    return runtime, pages, slots


def blocks_of(draw, runtime, number, count):
    """Block ids of one group of a chunk, no other chunk's: in order, so that runs are long, or not; some not wanted."""
    ids = list(range(runtime.kv_cache.blocks))[number * count :][:count]
    ids = draw(st.one_of(st.just(ids), st.permutations(ids)))
    wanted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return [block if want else NO_BLOCK for block, want in zip(ids, wanted, strict=True)]


@pytest.mark.parametrize("copier", [PlainCopier, Copier])
def test_each_group_of_a_part_has_blocks_of_its_own(copier):
    groups = [make_group((48, 96), name=name, block_tokens=16) for name in ("one", "other")]
    runtime = World(ChunkLayout(groups, 32), copier=copier)
    pages = [[[0, 1], [5, 3]]]
    expected = runtime.after_store(pages, [2])
    runtime.mover.store(1, pages, [2])
    runtime.mover.wait([1])
    assert runtime.state() == expected
    expected = runtime.after_load([0], pages)
    runtime.mover.load(2, [0], pages)
    runtime.mover.wait([2])
    assert runtime.state() == expected
    runtime.mover.close()


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_store(job):
    runtime, pages, slots = job
    expected = runtime.after_store(pages, slots)
    runtime.mover.store(1, pages, slots)
    runtime.mover.wait([1])
    runtime.mover.close()
    assert runtime.state() == expected
    ((ended, ok, checksums, _),) = runtime.mover.finished()
    assert (ended, ok) == (1, True)
    shard = runtime.part.shard_of(runtime.rank)
    begins = [slot * runtime.layout.frame_nbytes + shard.offset for slot in slots]
    expected_sums = [zlib.crc32(runtime.slots[begin : begin + shard.nbytes]) for begin in begins]
    assert list(checksums) in ([], expected_sums), "what lies in a shard, holes and all"


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_load(job):
    runtime, pages, slots = job
    expected = runtime.after_load(slots, pages)
    runtime.mover.load(1, slots, pages)
    runtime.mover.wait([1])
    runtime.mover.close()
    assert runtime.state() == expected
    assert runtime.ended() == [(1, True)]


def test_consecutive_blocks_are_one_copy(runtime, monkeypatch):
    copies = []
    monkeypatch.setattr(module.ctypes, "memmove", lambda *args: copies.append(args[2]))
    runtime.mover.store(1, [[[2, 3, 4, 0]]], [0])
    runtime.mover.wait([1])
    assert copies == [3 * 48, 48, 3 * 96, 96]


def test_each_job_is_reported_once(runtime):
    for job in range(5):
        runtime.mover.store(job, [[[job] * 4]], [0])
    runtime.mover.wait(range(5))
    assert runtime.ended() == [(job, True) for job in range(5)]
    assert runtime.ended() == []
    runtime.mover.wait([0, 17])


def test_a_job_that_fails_is_reported(runtime, monkeypatch):
    def fail(*args):
        raise OSError("no")

    monkeypatch.setattr(module.ctypes, "memmove", fail)
    runtime.mover.store(1, [[[0] * 4]], [0])
    runtime.mover.wait([1])
    assert runtime.ended() == [(1, False)]


def test_close_reports_what_it_dropped(runtime, gate):
    chunk = [[0, 1, 2, 3]]
    runtime.mover.load(1, [0], [chunk])
    runtime.mover.load(2, [1], [chunk])
    threading.Timer(0.05, gate.set).start()
    runtime.mover.close()
    runtime.mover.wait([1, 2])
    assert {job for job, _ in runtime.ended()} == {1, 2}
    for begin in (lambda: runtime.mover.store(3, [chunk], [0]), lambda: runtime.mover.load(3, [0], [chunk])):
        with pytest.raises(ContractError, match="^the mover is closed$"):
            begin()


def test_a_job_in_flight_is_not_begun_again(runtime, gate):
    runtime.mover.load(1, [0], [[[0, 1, 2, 3]]])
    for begin in (
        lambda: runtime.mover.store(1, [[[0] * 4]], [0]),
        lambda: runtime.mover.load(1, [0], [[[0] * 4]]),
    ):
        with pytest.raises(ContractError, match="^job 1 has not ended$"):
            begin()


def test_a_store_does_not_wait_for_loads(runtime, gate):
    chunk = [[0, 1, 2, 3]]
    runtime.mover.load(1, [0], [chunk])
    expected = runtime.after_store([chunk], [1])
    runtime.mover.store(2, [chunk], [1])
    assert runtime.ended() == [(2, True)]
    assert runtime.state() == expected
    gate.set()


def test_the_caller_may_change_its_lists(runtime, gate):
    chunk = [[0, 1, 2, 3]]
    expected = runtime.after_load([0], [chunk])
    runtime.mover.load(1, [0], [chunk])
    chunk[0][:] = [7, 7, 7, 7]
    gate.set()
    runtime.mover.wait([1])
    assert runtime.state() == expected


@pytest.mark.parametrize(
    "pages, slots, why",
    [
        ([[[0, 1, 2, 8]]], [0], r"block ids [0, 1, 2, 8] are not all NO_BLOCK or one of 8"),
        ([[[0, 1, 2, -2]]], [0], r"block ids [0, 1, 2, -2] are not all NO_BLOCK or one of 8"),
        ([[[0, 1, 2, 1 << 70]]], [0], f"block ids [0, 1, 2, {1 << 70}] are not all NO_BLOCK or one of 8"),
        ([[[0, 1, 2]]], [0], "3 block ids for a chunk of 4 (group 0)"),
        ([[[0, 1, 2, 3], []]], [0], "block ids of 2 groups for a layout of 1"),
        ([[]], [0], "block ids of 0 groups for a layout of 1"),
        ([[[0, 1, 2, 3]]], [3], "slot 3 is not one of 3"),
        ([[[0, 1, 2, 3]]], [-1], "slot -1 is not one of 3"),
        ([[[0, 1, 2, 3]]], [0, 1], "expected pages of 2 chunks, got 1"),
    ],
)
def test_wrong_numbers_touch_no_memory(runtime, pages, slots, why):
    before = runtime.state()
    for begin in (lambda: runtime.mover.store(1, pages, slots), lambda: runtime.mover.load(1, slots, pages)):
        with pytest.raises(ContractError) as caught:
            begin()
        assert str(caught.value) == why
    runtime.mover.wait([1])
    assert runtime.state() == before
    assert runtime.ended() == []


@pytest.mark.parametrize(
    "change, error, why",
    [
        ({"device": "cuda:0"}, BackendError, "no mover for device 'cuda:0'; the host mover supports only cpu"),
        ({"rank": 1}, ContractError, "rank 1 is not one of 1 ranks"),
        ({"layers": (PageRun(0, 48, 48),)}, ContractError, "expected pages of [48, 96] bytes, got [48]"),
        (
            {"layers": (PageRun(0, 47, 48), PageRun(0, 96, 96))},
            ContractError,
            "pages of a layer overlap: a stride is less than its nbytes",
        ),
        ({"layout": attrs.evolve(LAYOUT, tokens=99 * 16)}, ContractError, "expected slots of 20480 bytes, got 8192"),
    ],
)
def test_a_kv_cache_that_does_not_fit_its_layout_is_refused(runtime, change, error, why):
    with pytest.raises(error) as caught:
        HostMover(attrs.evolve(runtime.kv_cache, **change), memoryview(runtime.slots), LAYOUT.frame_nbytes)
    assert str(caught.value) == why


def test_the_memory_lives_until_close(runtime):
    memory = mmap.mmap(-1, LAYOUT.frame_nbytes)
    mover = HostMover(runtime.kv_cache, memory, LAYOUT.frame_nbytes)
    with pytest.raises(BufferError):
        memory.close()
    mover.close()
    mover.close()
    memory.close()
