"""Pages in a GPU's memory to slots and back, against one pinned cudaMemcpyAsync of the same bytes."""

from __future__ import annotations

import functools
import itertools
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterator

import attrs
import torch

from benchmarks.measure import Case, Table, interleaved, progress
from kvtier_core.interfaces import Mover, PagedKVCache, PageRun
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.library import Method
from kvtier_core.transfer.cuda.opening import open_mover
from kvtier_core.types import Nbytes
from kvtier_testing.samples import make_layout

ROUNDS, REPEATS = 5, 3
PAGES = [2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20]
JOBS = [16, 256, 4096, 50_000]  # pages
LAYERS, BLOCKS = 8, 4
NBYTES = 256 << 20  # of a job, whatever its pages
MATRIX = 8192
_LOCKED_WITHIN = 60.0  # seconds
METHODS = ("direct", "staged", "kernel", "chosen")


def tables() -> Iterator[Table]:
    """How fast the copies are, and what they cost the engine."""
    for direction in ("store", "load"):
        for busy in (False, True):
            yield _speeds(direction, busy)
    yield _both_ways()
    for page_nbytes in (8 << 10, 64 << 10):
        yield _by_count(page_nbytes)
    yield _losses()


def _speeds(direction: str, busy: bool) -> Table:
    rows: list[list[object]] = []
    matrices = Matrices(busy)
    for page_nbytes in PAGES:
        progress(f"{direction}, pages of {Nbytes(page_nbytes)}{', matrices meanwhile' if busy else ''}")
        bench = Bench(page_nbytes, NBYTES)
        times = interleaved(_cases(bench, direction, matrices.more), ROUNDS, REPEATS)
        torch.cuda.synchronize()
        speed = bench.nbytes / times.median("memcpy") / 1e9
        ratios = [times.ratio("memcpy", each) if each in times.seconds else "-" for each in METHODS]
        call = f"{statistics.median(bench.calls[direction]) * 1e6:.0f}"
        chosen = next(fact for name, fact in bench.movers["chosen"].facts().items() if name.startswith(direction))
        rows.append([Nbytes(page_nbytes), f"{speed:.1f}", *ratios, call, chosen])
        bench.close()
    return Table(
        title=f"GPU: {direction}{', while matrices are multiplied' if busy else ''}",
        says=f"{Nbytes(NBYTES)} a job in {LAYERS} layers of {BLOCKS} pages a chunk, random blocks, from call to "
        "last byte. The ratio is speed to that of one pinned cudaMemcpyAsync in the same round: median "
        f"(min to max) of {ROUNDS} rounds, each the best of {REPEATS}. µs: what the call takes of the engine's thread, "
        "as chosen. At the end what was measured when the arena was attached.",
        header=("pages", "memcpy GB/s", *METHODS, "call, µs", "chosen"),
        rows=rows,
    )


def _cases(bench: Bench, direction: str, before: Callable[[], None]) -> list[Case]:
    cases = [Case("memcpy", functools.partial(bench.memcpy, direction), before=before)]
    for each in METHODS:
        if direction == "load" or each != "kernel":  # no kernel writes to the host
            cases.append(Case(each, functools.partial(bench.move, each, direction), before=before))
    return cases


def _both_ways() -> Table:
    """A store and a load at once, to two pinned copies at once."""
    rows: list[list[object]] = []
    for page_nbytes in PAGES:
        progress(f"both directions, pages of {Nbytes(page_nbytes)}")
        bench = Bench(page_nbytes, NBYTES)
        cases = [Case("memcpy", bench.memcpy_both_ways)]
        cases += [Case(each, functools.partial(bench.move_both_ways, each)) for each in METHODS]
        times = interleaved(cases, ROUNDS, REPEATS)
        speed = 2 * bench.nbytes / times.median("memcpy") / 1e9
        rows.append([Nbytes(page_nbytes), f"{speed:.1f}", *(times.ratio("memcpy", each) for each in METHODS)])
        bench.close()
    return Table(
        title="GPU: a store and a load at once",
        says=f"{Nbytes(NBYTES)} each way. The ratio is speed to that of two pinned cudaMemcpyAsync at once. With "
        "'kernel' the store is direct.",
        header=("pages", "memcpy GB/s", *METHODS),
        rows=rows,
    )


def _by_count(page_nbytes: int) -> Table:
    """Short jobs and long ones: where submitting costs more than copying."""
    rows: list[list[object]] = []
    for count in JOBS:
        progress(f"jobs of {count} pages of {Nbytes(page_nbytes)}")
        bench = Bench(page_nbytes, count * page_nbytes)
        for direction in ("store", "load"):
            times = interleaved(_cases(bench, direction, lambda: None), ROUNDS, REPEATS)
            ratios = [times.ratio("memcpy", each) if each in times.seconds else "-" for each in METHODS]
            call = f"{statistics.median(bench.calls[direction]) * 1e6:.0f}"
            rows.append([f"{direction}, {count}", f"{times.median('memcpy') * 1e6:.0f}", *ratios, call])
        bench.close()
    return Table(
        title=f"GPU: jobs of some pages of {Nbytes(page_nbytes)}",
        says="As above, by pages in a job.",
        header=("job", "memcpy, µs", *METHODS, "call, µs"),
        rows=rows,
    )


def _losses() -> Table:
    """How much longer the same matrices take during continuous copies."""
    rows: list[list[object]] = []
    matrices = Matrices()
    kinds = [("store", "direct"), ("store", "staged"), ("load", "direct"), ("load", "staged"), ("load", "kernel")]
    for page_nbytes in PAGES:
        progress(f"matrices beside copies of pages of {Nbytes(page_nbytes)}")
        bench = Bench(page_nbytes, NBYTES)
        cases = [Case("alone", matrices.run)]
        for direction, method in kinds:
            copy = functools.partial(bench.move, method, direction)
            cases.append(Case(f"{direction} {method}", functools.partial(matrices.run, copy)))
        times = interleaved(cases, ROUNDS)
        rows.append([Nbytes(page_nbytes), *(times.ratio(case.name, "alone") for case in cases[1:])])
        bench.close()
    return Table(
        title="GPU: what a matrix multiplication loses",
        says=f"{Matrices.SAYS} The ratio is time to that of the same matrices alone: median (min to max) of {ROUNDS} "
        "rounds.",
        header=("pages", *(f"{direction}, {method}" for direction, method in kinds)),
        rows=rows,
    )


class Bench:
    """One paged buffer of numbers in bfloat16, one arena, and a mover for each method; ``packed`` has one alone."""

    def __init__(self, page_nbytes: int, nbytes: int, *, packed: bool = False):
        layout = attrs.evolve(make_layout((page_nbytes,) * LAYERS, BLOCKS), packed=packed)
        chunk_nbytes = LAYERS * BLOCKS * page_nbytes
        self.chunks = max(1, nbytes // chunk_nbytes)
        self.nbytes = self.chunks * chunk_nbytes
        blocks = 2 * self.chunks * BLOCKS
        numbers = torch.empty((LAYERS, blocks, page_nbytes // 2), dtype=torch.bfloat16, device="cuda:0").normal_()
        self.pages = numbers.view(torch.uint8)
        self.plain = torch.empty((2, self.nbytes), dtype=torch.uint8, device="cuda:0")
        self.pinned = torch.empty((2, self.nbytes), dtype=torch.uint8, pin_memory=True)
        self.aside = torch.cuda.Stream()
        runs = tuple(PageRun(layer.data_ptr(), page_nbytes, page_nbytes) for layer in self.pages)
        self.kv_cache = PagedKVCache(runs, blocks, "cuda:0", 0, layout)
        self.slots = mmap.mmap(-1, 2 * self.chunks * layout.frame_nbytes)
        drawn = random.Random(0).sample(range(blocks), blocks)
        chunks = [[drawn[first : first + BLOCKS]] for first in range(0, blocks, BLOCKS)]
        # Stores and loads have blocks and slots of their own.
        self.block_ids = {"store": chunks[: self.chunks], "load": chunks[self.chunks :]}
        self.places = {"store": range(self.chunks), "load": range(self.chunks, 2 * self.chunks)}
        self.movers = {method: self._mover(method) for method in (METHODS[-1:] if packed else METHODS)}
        self.jobs = itertools.count()
        self.calls: dict[str, list[float]] = {"store": [], "load": []}  # seconds, as chosen
        whole = Nbytes(len(self.slots))
        deadline = time.monotonic() + _LOCKED_WITHIN
        while (locked := self.movers["chosen"].facts()["page-locked"]) != f"{whole} -> {whole}":
            if time.monotonic() > deadline:
                raise RuntimeError(f"page-locked: {locked}")
            time.sleep(0.01)

    def fill(self) -> None:
        """Store what loads will find in their slots."""
        mover = self.movers["chosen"]
        mover.store(next(self.jobs), self.block_ids["load"], self.places["load"])
        self._end("chosen", 1)

    def memcpy(self, direction: str) -> None:
        self._memcpy(direction)
        torch.cuda.current_stream().synchronize()

    def memcpy_both_ways(self) -> None:
        self._memcpy("store")
        with torch.cuda.stream(self.aside):
            self._memcpy("load")
        self.aside.synchronize()
        torch.cuda.current_stream().synchronize()

    def move(self, method: str, direction: str) -> None:
        self._begin(method, direction)
        self._end(method, 1)

    def move_both_ways(self, method: str) -> None:
        self._begin(method, "store")
        self._begin(method, "load")
        self._end(method, 2)

    def close(self) -> None:
        for mover in self.movers.values():
            mover.close()

    def _memcpy(self, direction: str) -> None:
        number = int(direction == "load")
        to, from_ = (self.pinned, self.plain) if direction == "store" else (self.plain, self.pinned)
        to[number].copy_(from_[number], non_blocking=True)

    def _begin(self, method: str, direction: str) -> None:
        mover, job = self.movers[method], next(self.jobs)
        begin = time.perf_counter()
        if direction == "store":
            mover.store(job, self.block_ids[direction], self.places[direction])
        else:
            mover.load(job, self.places[direction], self.block_ids[direction])
        if method == "chosen":
            self.calls[direction].append(time.perf_counter() - begin)

    def _end(self, method: str, jobs: int) -> None:
        while jobs:
            for ended in self.movers[method].finished():
                jobs -= 1
                if not ended.ok:
                    raise RuntimeError("a job failed")

    def _mover(self, method: str) -> Mover:
        autotune = None if method == "chosen" else decided(Method[method.upper()])
        return open_mover(self.kv_cache, self.slots, self.kv_cache.layout.frame_nbytes, autotune=autotune)


class Matrices:
    """A stream that always has something to multiply, if it is ``busy`` at all."""

    BATCH = 40
    SAYS = f"{BATCH} of {MATRIX}² bfloat16, beside copies without a pause."

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
