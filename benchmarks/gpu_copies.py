"""Pages in a GPU's memory to slots and back, against one pinned cudaMemcpyAsync of the same bytes."""

from __future__ import annotations

import functools
import itertools
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.measure import Case, Table, interleaved, progress
from kvtier_core.interfaces import Mover, PagedKVCache, PageRun
from kvtier_core.testing.samples import make_layout
from kvtier_core.transfer.cuda.autotune import DMA, KERNEL, decided
from kvtier_core.transfer.cuda.library import load
from kvtier_core.transfer.cuda.mover import open_mover
from kvtier_core.types import Nbytes

ROUNDS, REPEATS = 7, 3
PAGES = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20]
LAYERS, BLOCKS = 8, 4
NBYTES = 64 << 20  # of a job, whatever its pages
MATRIX = 8192
METHODS = {"torch": "torch's operators", KERNEL: "kernel", DMA: "copy engine", "chosen": "as chosen"}


def tables() -> Iterator[Table]:
    device = torch.cuda.get_device_properties(0)
    progress(f"{device.name}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    if isinstance(problem := load(), str):
        raise RuntimeError(problem)
    benches = [_Bench(nbytes) for nbytes in PAGES]
    for direction in ("store", "load"):
        for busy in (False, True):
            yield _speeds(benches, direction, busy)
    yield _losses(benches)
    for bench in benches:
        bench.close()


def _speeds(benches: Sequence[_Bench], direction: str, busy: bool) -> Table:
    rows: list[list[object]] = []
    matrices = _Matrices(busy)
    for bench in benches:
        progress(f"{direction}, pages of {Nbytes(bench.page_nbytes)}{', matrices meanwhile' if busy else ''}")
        cases = [Case("memcpy", functools.partial(bench.memcpy, direction), before=matrices.more)]
        for each in METHODS:
            cases.append(Case(each, functools.partial(bench.move, each, direction), before=matrices.more))
        times = interleaved(cases, ROUNDS, REPEATS)
        torch.cuda.synchronize()
        speed = bench.nbytes / times.median("memcpy") / 1e9
        ratios = [times.ratio("memcpy", each) for each in METHODS]
        host = statistics.median(bench.host[direction])
        rows.append([Nbytes(bench.page_nbytes), f"{speed:.1f}", *ratios, f"{host * 1e6:.0f}", bench.chosen])
    return Table(
        title=f"GPU: {direction}{', while matrices are multiplied' if busy else ''}",
        says=f"{Nbytes(NBYTES)} a job in {LAYERS} layers of {BLOCKS} pages a chunk, random blocks, from call to "
        "last byte. The ratio is speed to that of one pinned cudaMemcpyAsync in the same round: median "
        f"(min to max) of {ROUNDS} rounds, each the best of {REPEATS}. µs: what the call takes of the engine's thread.",
        header=("pages", "memcpy GB/s", *METHODS.values(), "call, µs", "chosen"),
        rows=rows,
    )


def _losses(benches: Sequence[_Bench]) -> Table:
    """How much longer the same matrices take during continuous copies."""
    rows: list[list[object]] = []
    matrices = _Matrices()
    for bench in benches:
        progress(f"matrices beside copies of pages of {Nbytes(bench.page_nbytes)}")
        cases = [Case("alone", matrices.run)]
        for direction, method in itertools.product(("store", "load"), (KERNEL, DMA)):
            copy = functools.partial(bench.move, method, direction)
            cases.append(Case(f"{direction} {method}", functools.partial(matrices.run, copy)))
        times = interleaved(cases, ROUNDS)
        rows.append([Nbytes(bench.page_nbytes), *(times.ratio(case.name, "alone") for case in cases[1:])])
    return Table(
        title="GPU: what a matrix multiplication loses",
        says=f"{_Matrices.BATCH} of {MATRIX}² bfloat16, beside copies without a pause. The ratio is time to that "
        f"of the same matrices alone: median (min to max) of {ROUNDS} rounds.",
        header=("pages", "store, kernel", "store, copy engine", "load, kernel", "load, copy engine"),
        rows=rows,
    )


class _Bench:
    """One paged buffer, one arena, and a mover for each method."""

    def __init__(self, page_nbytes: int):
        self.page_nbytes = page_nbytes
        layout = make_layout((page_nbytes,) * LAYERS, BLOCKS)
        self.chunks = NBYTES // layout.payload_nbytes
        self.nbytes = self.chunks * layout.payload_nbytes
        blocks = self.chunks * BLOCKS
        self.pages = torch.zeros((LAYERS, blocks, page_nbytes), dtype=torch.uint8, device="cuda:0").random_()
        self.plain = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda:0")
        self.pinned = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        runs = tuple(PageRun(layer.data_ptr(), page_nbytes, page_nbytes) for layer in self.pages)
        self.kv_cache = PagedKVCache(runs, blocks, "cuda:0", 0, layout)
        self.slots = mmap.mmap(-1, self.chunks * layout.frame_nbytes)
        drawn = random.Random(0).sample(range(blocks), blocks)
        self.block_ids = [[drawn[first : first + BLOCKS]] for first in range(0, blocks, BLOCKS)]
        self.movers = {method: self._mover(method) for method in METHODS}
        self.chosen = "; ".join(self.movers["chosen"].facts().values())
        self.jobs = itertools.count()
        self.host: dict[str, list[float]] = {"store": [], "load": []}  # seconds, of the calls as chosen

    def memcpy(self, direction: str) -> None:
        to, from_ = (self.pinned, self.plain) if direction == "store" else (self.plain, self.pinned)
        to.copy_(from_, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def move(self, method: str, direction: str) -> None:
        mover, job, slots = self.movers[method], next(self.jobs), range(self.chunks)
        begin = time.perf_counter()
        if direction == "store":
            mover.store(job, self.block_ids, slots)
        else:
            mover.load(job, slots, self.block_ids)
        if method == "chosen":
            self.host[direction].append(time.perf_counter() - begin)
        while not (ended := mover.finished()):
            pass
        if not ended[0].ok:
            raise RuntimeError(f"the {direction} failed")

    def close(self) -> None:
        for mover in self.movers.values():
            mover.close()

    def _mover(self, method: str) -> Mover:
        nbytes = self.kv_cache.layout.frame_nbytes
        if method == "torch":
            return open_mover(self.kv_cache, self.slots, nbytes, library="asked for")
        return open_mover(
            self.kv_cache, self.slots, nbytes, autotune=decided(method) if method in (KERNEL, DMA) else None
        )


class _Matrices:
    """A stream that always has something to multiply, if it is ``busy`` at all."""

    BATCH = 40

    def __init__(self, busy: bool = True):
        self._busy = busy
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(MATRIX, MATRIX, device="cuda:0", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._matrix)
        self._event = torch.cuda.Event()

    def more(self) -> None:
        """Enqueue a batch, unless there is still one."""
        if self._busy and self._event.query():
            with torch.cuda.stream(self._stream):
                for _ in range(self.BATCH):
                    torch.matmul(self._matrix, self._matrix, out=self._out)
                self._event.record(self._stream)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """A batch, from its call to its end."""
        self.more()
        while not self._event.query():
            meanwhile()
