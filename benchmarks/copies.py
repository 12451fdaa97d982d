"""Chunks between the engine's pages and the arena, against memcpy; and the checksum that guards them below it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.measure import GIB, Case, Table, interleaved, progress, sized
from kvtier_core import native
from kvtier_core.frames.format import seal, verify
from kvtier_core.interfaces import Mover, OpenContext, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_cpu.config import CpuConfig
from kvtier_testing.samples import make_layout

ROUNDS, REPEATS = sized((15, 5), (1, 1))
LAYERS = 32
CHUNKS = sized(16, 2)  # each copy takes the next place, and so do the pages it copies: nothing is in a cache by chance
KEY = ChunkKey(bytes(32))
MEMCPY = "memcpy, plain memory to plain memory"


@attrs.frozen
class Shape:
    page_nbytes: int
    blocks: int

    @property
    def layout(self) -> ChunkLayout:
        return make_layout((self.page_nbytes,) * LAYERS, self.blocks)


SHAPES = (Shape(64 << 10, 16), Shape(16 << 10, 64))


def tables(folder: Path) -> Iterator[Table]:
    for shape in SHAPES:
        progress(f"copies: pages of {Nbytes(shape.page_nbytes)}, {ROUNDS} rounds")
        yield _table(shape)


def _table(shape: Shape) -> Table:
    bench = _Bench(shape)
    times = interleaved(bench.cases(), ROUNDS, REPEATS)
    bench.close()
    nbytes = shape.layout.payload_nbytes
    return Table(
        title=f"Copies: {Nbytes(nbytes)} chunks in pages of {Nbytes(shape.page_nbytes)}",
        says=f"{LAYERS} layers of {shape.blocks} pages a chunk; one chunk a job, through the mover. "
        f"{CHUNKS} places are used in turn. A store sums the chunk while it copies it, and a seal writes the header "
        f"with that sum. {native.describe().capitalize()}. The ratio is speed to that of one memcpy in the same round: "
        f"median (min to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("", "GiB/s", "of memcpy"),
        rows=[
            (name, f"{nbytes / times.median(name) / GIB:.1f}", "1" if name == MEMCPY else times.ratio(MEMCPY, name))
            for name in times.seconds
        ],
    )


class _Bench:
    def __init__(self, shape: Shape):
        self.shape = shape
        self.namespace = Namespace.of({"benchmark": "copies"})
        capacity, nbytes = Nbytes(CHUNKS * shape.layout.frame_nbytes), CHUNKS * shape.layout.payload_nbytes
        self.arena = CpuConfig().open(OpenContext(self.namespace, shape.layout, capacity))
        self.pages, self.plain = warm(nbytes), warm(nbytes)
        self.mover = CpuConfig().attach(self.arena.handle, paged(self.pages, shape, CHUNKS))
        self.jobs = itertools.count()

    def cases(self) -> list[Case]:
        nbytes, blocks = self.shape.layout.payload_nbytes, self.shape.blocks
        pages, plain = address(self.pages), address(self.plain)
        slots = [address(self.arena.view(slot)) + FRAME_HEADER_NBYTES for slot in range(CHUNKS)]
        consecutive = [range(chunk * blocks, (chunk + 1) * blocks) for chunk in range(CHUNKS)]
        shuffled = random.Random(0).sample(range(CHUNKS * blocks), CHUNKS * blocks)
        scattered = [[shuffled[place] for place in row] for row in consecutive]

        def memcpy(to: Callable[[int], int]) -> Callable[[], object]:
            return _in_turn(lambda chunk: ctypes.memmove(to(chunk), pages + chunk * nbytes, nbytes))

        return [
            Case(MEMCPY, memcpy(lambda chunk: plain + chunk * nbytes)),
            Case("memcpy, plain memory to slot", memcpy(lambda chunk: slots[chunk])),
            Case("store, consecutive blocks", _in_turn(lambda chunk: self.store(consecutive[chunk], chunk))),
            Case("store, random blocks", _in_turn(lambda chunk: self.store(scattered[chunk], chunk))),
            Case("load, consecutive blocks", _in_turn(lambda chunk: self.load(chunk, consecutive[chunk]))),
            Case("load, random blocks", _in_turn(lambda chunk: self.load(chunk, scattered[chunk]))),
            Case("store and seal", _in_turn(lambda chunk: self.store_and_seal(scattered[chunk], chunk))),
            Case("checksum alone, of a chunk that no mover summed", _in_turn(self.seal)),
            Case("check (at each read from below)", _in_turn(self.check), before=self.seal_all),
        ]

    def store(self, row: Sequence[int], slot: int) -> Sequence[int]:
        job = next(self.jobs)
        self.mover.store(job, [[row]], [slot])
        return end(self.mover, job)

    def store_and_seal(self, row: Sequence[int], slot: int) -> None:
        summed = next(iter(self.store(row, slot)), None)
        seal(self.arena.view(slot), self.namespace, KEY, self.shape.layout.payload_nbytes, payload_checksum=summed)

    def load(self, slot: int, row: Sequence[int]) -> None:
        job = next(self.jobs)
        self.mover.load(job, [slot], [[row]])
        end(self.mover, job)

    def seal(self, slot: int) -> None:
        seal(self.arena.view(slot), self.namespace, KEY, self.shape.layout.payload_nbytes)

    def seal_all(self) -> None:
        for slot in range(CHUNKS):
            self.seal(slot)

    def check(self, slot: int) -> None:
        error = verify(self.arena.view(slot), self.namespace, KEY)
        if error is not None:
            raise RuntimeError(f"the frame is {error.value}")

    def close(self) -> None:
        self.mover.close()
        self.arena.close()


def paged(memory: mmap.mmap, shape: Shape, chunks: int) -> PagedKVCache:
    """An engine's pages, layer by layer, for so many chunks."""
    page_nbytes, blocks, base = shape.page_nbytes, chunks * shape.blocks, address(memory)
    runs = (PageRun(base + layer * blocks * page_nbytes, page_nbytes, page_nbytes) for layer in range(LAYERS))
    return PagedKVCache(tuple(runs), blocks, "cpu", 0, shape.layout)


def end(mover: Mover, job: int) -> Sequence[int]:
    """Wait for a job; returns its checksums."""
    mover.wait([job])
    (ended,) = mover.finished()
    if not ended.ok:
        raise RuntimeError("the copy failed")
    return ended.checksums


def _in_turn(work: Callable[[int], object]) -> Callable[[], object]:
    chunks = itertools.cycle(range(CHUNKS))
    return lambda: work(next(chunks))


def warm(nbytes: int) -> mmap.mmap:
    """Memory that was written to."""
    memory = mmap.mmap(-1, nbytes)
    memory[:] = random.Random(0).randbytes(1 << 20) * (nbytes >> 20)
    return memory


def address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
