"""What copies and page-locking do to an engine that shares the GPU: launches, graphs, and the tokens it waits for."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu_copies import Bench
from benchmarks.measure import GIB, Table, progress
from kvtier_core.transfer.cuda.host_registration import HostRegistration, Pieces
from kvtier_core.transfer.cuda.library import load
from kvtier_core.types import Nbytes

LOCKED = 8 * GIB
#: The shortest are 16 384, as many as an arena of 512 GiB has.
PIECES = [LOCKED >> 14, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20]
TOKEN_NBYTES = 4096
TOKENS = 2000
_LOCKED_WITHIN = 30.0  # seconds
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap


def tables() -> Iterator[Table]:
    yield _page_locking()
    yield _tokens()


def _page_locking() -> Table:
    """Seconds a GiB, and what launches and graphs take meanwhile."""
    rows: list[list[object]] = [["none", "-", "-", *_quantiles(_launches(_for_a_second))]]
    for piece_nbytes in PIECES:
        progress(f"page-locking in pieces of {Nbytes(piece_nbytes)}")
        locking = _Locking(piece_nbytes)
        samples = _launches(locking.begin)
        locking.registration.close().join()
        rows.append([Nbytes(piece_nbytes), f"{locking.seconds:.3f}", Nbytes(locking.taken), *_quantiles(samples)])
    return Table(
        title="GPU: page-locking an arena",
        says=f"{Nbytes(LOCKED)} that are in memory, by a thread that pauses after each piece as long as it took; GPU "
        "memory that it costs; and meanwhile the µs of a launch and of the replay of a graph, on the engine's thread.",
        header=("pieces", "s/GiB", "GPU memory", "launch p50", "p99", "max", "replay p50", "p99", "max"),
        rows=rows,
    )


class _Locking:
    """The page-locking of an arena's memory, from `begin` on."""

    registration: HostRegistration
    seconds = 0.0  #: a GiB
    taken = 0  #: bytes of GPU memory

    def __init__(self, piece_nbytes: int):
        self._piece_nbytes = piece_nbytes
        self._memory = mmap.mmap(-1, LOCKED)
        self._memory.madvise(_MADV_POPULATE_WRITE)  # an arena's memory is there
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def begin(self) -> Callable[[], bool]:
        self._free, self._begun = torch.cuda.mem_get_info()[0], time.perf_counter()
        device = load().device(0)
        pieces = Pieces(self._address, LOCKED, self._piece_nbytes, self._piece_nbytes)
        self.registration = HostRegistration(pieces, device.lock, device.unlock)
        return self._over

    def _over(self) -> bool:
        seconds = time.perf_counter() - self._begun
        if self.registration.end < self._address + LOCKED:
            if seconds > _LOCKED_WITHIN:
                raise RuntimeError(f"page-locked: {self.registration.facts()['page-locked']}")
            return False
        self.seconds = seconds / (LOCKED / GIB)
        self.taken = self._free - torch.cuda.mem_get_info()[0]
        return True


def _for_a_second() -> Callable[[], bool]:
    end = time.perf_counter() + 1.0
    return lambda: time.perf_counter() >= end


def _launches(begin: Callable[[], Callable[[], bool]]) -> tuple[list[float], list[float]]:
    """Seconds of launches, and of replays of a graph, from the call of ``begin`` until what it returns is true."""
    number = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # before: page-locking meanwhile would spoil the capture
        for _ in range(20):
            number += 1
    samples: tuple[list[float], list[float]] = ([], [])
    works = (number.zero_, graph.replay)
    over = begin()
    while not over():
        for work, seconds in zip(works, samples, strict=True):
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    return samples


def _quantiles(samples: Sequence[Sequence[float]]) -> list[str]:
    cells = []
    for seconds in samples:
        ordered = sorted(seconds)
        picked = (ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1])
        cells += [f"{each * 1e6:.0f}" for each in picked]
    return cells


def _tokens() -> Table:
    """A token's copy to the host on a third stream, beside a store of 1 GiB."""
    rows: list[list[object]] = []
    for page_nbytes in (8 << 10, 64 << 10, 2 << 20):
        progress(f"tokens beside a store of pages of {Nbytes(page_nbytes)}")
        bench = Bench(page_nbytes, GIB)
        cells: list[object] = []
        for method in (None, "memcpy", "direct", "staged"):
            seconds = _copies_beside(bench, method)
            cells.append(
                f"{statistics.median(seconds) * 1e6:.0f} / {sorted(seconds)[len(seconds) * 99 // 100] * 1e6:.0f}"
            )
        rows.append([Nbytes(page_nbytes), *cells])
        bench.close()
    return Table(
        title="GPU: a token's way to the host during a store",
        says=f"{Nbytes(TOKEN_NBYTES)} on a stream of its own, while stores of {Nbytes(GIB)} follow each other: µs from "
        "call to last byte, median / p99. 'memcpy' is one pinned cudaMemcpyAsync instead of a store.",
        header=("pages", "nothing", "memcpy", "direct", "staged"),
        rows=rows,
    )


def _copies_beside(bench: Bench, method: str | None) -> list[float]:
    token = torch.zeros(TOKEN_NBYTES, dtype=torch.uint8, device="cuda")
    host = torch.zeros(TOKEN_NBYTES, dtype=torch.uint8, pin_memory=True)
    stream, over, seconds = torch.cuda.Stream(), threading.Event(), []

    def tokens() -> None:
        with torch.cuda.stream(stream):
            for _ in range(TOKENS):
                begin = time.perf_counter()
                host.copy_(token, non_blocking=True)
                stream.synchronize()
                seconds.append(time.perf_counter() - begin)
        over.set()

    thread = threading.Thread(target=tokens)
    thread.start()
    while not over.is_set():
        if method is None:
            time.sleep(0.001)
        elif method == "memcpy":
            bench.memcpy("store")
        else:
            bench.move(method, "store")
    thread.join()
    return seconds
