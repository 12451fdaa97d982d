"""python -m benchmarks.gpu_submission: what a long job takes of the engine's thread before a GPU does anything.

Over the driver of the tests, which here takes every call and does nothing: what a real one takes for its calls is not
in the figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from benchmarks.measure import Table
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.transfer.cuda.autotune import Choice
from kvtier_core.transfer.cuda.checksums import StoreChecksums
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.library import Direction, Method
from kvtier_core.transfer.cuda.mover import ArenaSlots, DeviceMover
from kvtier_core.transfer.cuda.opening import HALF_NBYTES
from kvtier_core.transfer.page_lists import layers_of
from kvtier_testing.samples import make_layout

BLOCKS, ROUNDS = 10_000, 15
#: Bytes of a page, layers, blocks of a chunk.
SHAPES = {
    "Llama-3.1-8B, a block a chunk": (64 << 10, 32, 1),
    "Llama-3.1-8B, 16 blocks a chunk": (64 << 10, 32, 16),
    "Llama-3.1-70B, one of 8 ranks": (8 << 10, 80, 16),
}
#: Addresses of memory that nothing ever touches.
_PAGES, _SLOTS = 1 << 40, 1 << 45


def table() -> Table:
    """Of each shape and way, the time of `Mover.store` or `Mover.load`."""
    rows = []
    for name, shape in SHAPES.items():
        cells = []
        for to_slots, method in [(True, Method.DIRECT), (True, Method.STAGED), *((False, each) for each in Method)]:
            cells.append(f"{_seconds(shape, to_slots, method) * 1e3:.1f}")
        rows.append([name, *cells])
    return Table(
        title="GPU: submitting a long job",
        says=f"A job of {BLOCKS} random blocks. ms of CPU of the thread that calls, median of {ROUNDS}, without what "
        "the driver takes.",
        header=("pages", "store, direct", "store, staged", "load, direct", "load, staged", "load, kernel"),
        rows=rows,
    )


class _Locked:
    """All memory is page-locked."""

    base, stride, end = _SLOTS, HALF_NBYTES, 1 << 60

    def facts(self) -> dict[str, str]:
        return {}


def _seconds(shape: tuple[int, int, int], to_slots: bool, method: Method) -> float:
    from fake_cuda import FakeCuda

    page_nbytes, layers, blocks = shape
    layout = make_layout((page_nbytes,) * layers, blocks)
    chunks = BLOCKS // blocks
    runs = tuple(PageRun(_PAGES + number * BLOCKS * page_nbytes, page_nbytes, page_nbytes) for number in range(layers))
    cache = PagedKVCache(runs, BLOCKS, "cuda:0", 0, layout)
    cuda = FakeCuda()
    cuda.c.fake_discard()
    device = cuda.device()
    device.lock(_SLOTS, chunks * layout.frame_nbytes)
    stores, loads = (Direction(cuda.Stream(), cuda.Stream(), device.staging(HALF_NBYTES)) for _ in range(2))
    (part,) = layout.parts
    shards = _SLOTS + part.shard_of(0).offset
    native = device.part(list(layers_of(cache, part)), shards, layout.frame_nbytes, _SLOTS, HALF_NBYTES)
    none = StoreChecksums("pages", None, shards, 0, layout.frame_nbytes, "not measured")
    copier = Copier("pages", native, Choice(method), Choice(method), none)
    slots = ArenaSlots(_SLOTS, chunks, layout.frame_nbytes, _Locked())
    mover = DeviceMover(cache, slots, [copier], cuda, stores, loads)
    ids = cuda.rng.sample(range(BLOCKS), BLOCKS)
    pages = [[ids[first : first + blocks]] for first in range(0, BLOCKS, blocks)]
    seconds = []
    for job in range(ROUNDS):
        begin = time.thread_time()
        if to_slots:
            mover.store(job, pages, range(chunks))
        else:
            mover.load(job, range(chunks), pages)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    print(table())
