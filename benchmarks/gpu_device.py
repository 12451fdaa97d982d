"""The GPU itself, as `gpu_sections` measures it: what only runs where there is one."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu_sections import MOST_NBYTES, TOKEN_NBYTES, Copied, Locking
from kvtier_core.interfaces import Mover, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout
from kvtier_core.testing.samples import make_layout
from kvtier_core.transfer.cuda.autotune import DMA, KERNEL, decided
from kvtier_core.transfer.cuda.mover import open_mover

#: Every path that the code offers, and what makes a mover take it.
PATHS = {path: decided(path) for path in (DMA, KERNEL)}
LAYERS, BLOCKS = 4, 4  # pages of a chunk: 16
_DEVICE = "cuda:0"
_PATIENCE = 30.0  # seconds until slots are page-locked
_LAUNCHES = 2000
_TOKEN_PAGE = 64 << 10


class Gpu:
    """The first GPU. See `gpu_sections.Device`."""

    paths: Sequence[str] = tuple(PATHS)

    def facts(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(0)
        driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return {
            "device": f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB",
            "driver": driver,
            "toolkit": _said("nvcc", "--version").splitlines()[-1],
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
            "kernel": platform.release(),
            "page size": f"{os.sysconf('SC_PAGE_SIZE')} bytes",
            "cores": str(os.cpu_count()),
            "python": platform.python_version(),
        }

    @contextlib.contextmanager
    def bench(self, page_nbytes: int, count: int) -> Iterator[GpuBench]:
        bench = GpuBench(page_nbytes, count)
        try:
            yield bench
        finally:
            bench.close()

    def locking(self, gib: int) -> Locking:
        layout = make_layout((1 << 20,) * LAYERS, BLOCKS)
        slots = (gib << 30) // layout.frame_nbytes
        memory, pages = _Memory(slots * layout.frame_nbytes), _Pages(layout, BLOCKS)
        number = torch.zeros(1, device=_DEVICE)
        graph = torch.cuda.CUDAGraph()
        number.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            number.add_(1)
        calls: tuple[Callable[[], object], ...] = (lambda: number.add_(1), graph.replay)
        before = [[_seconds(call) for _ in range(_LAUNCHES)] for call in calls]
        meanwhile: list[list[float]] = [[], []]
        begin = time.perf_counter()
        mover = open_mover(pages.cache(), memory.mapped(), layout.frame_nbytes, autotune=next(iter(PATHS.values())))
        for job in itertools.count(1):
            mover.store(job, [[list(range(BLOCKS))]], [slots - 1])
            if _ended(mover):
                break
            if time.perf_counter() - begin > _PATIENCE:
                raise TimeoutError(f"the last slot is not page-locked after {_PATIENCE:.0f} s")
            for _ in range(50):
                for call, seen in zip(calls, meanwhile, strict=True):
                    seen.append(_seconds(call))
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        mover.close()
        if not meanwhile[0]:
            meanwhile = [each[-1:] for each in before]  # all was locked when the mover was there
        return Locking(seconds, (before[0], meanwhile[0]), (before[1], meanwhile[1]))

    def tokens(self, path: str | None) -> Sequence[float]:
        count = MOST_NBYTES // _TOKEN_PAGE
        with self.bench(_TOKEN_PAGE, count) as bench:
            stream = torch.cuda.Stream()
            ids = torch.zeros(TOKEN_NBYTES, dtype=torch.uint8, device=_DEVICE)
            there = torch.zeros(TOKEN_NBYTES, dtype=torch.uint8, pin_memory=True)

            def token() -> None:
                with torch.cuda.stream(stream):
                    there.copy_(ids, non_blocking=True)
                stream.synchronize()

            token()
            if path is None:
                return [_seconds(token) for _ in range(500)]
            bench.copy(path, "store", count)  # all slots are page-locked now
            seen: list[float] = []
            for _ in range(5):
                bench.copy(path, "store", count, meanwhile=lambda: seen.append(_seconds(token)))
            return seen


class GpuBench:
    """One paged buffer, one arena that each mover maps anew, and a mover for each path when it is used first."""

    def __init__(self, page_nbytes: int, count: int):
        self._layout = make_layout((page_nbytes,) * LAYERS, BLOCKS)
        self._page_nbytes = page_nbytes
        self._chunks = count // (LAYERS * BLOCKS)
        blocks = self._chunks * BLOCKS
        self._pages = _Pages(self._layout, blocks)
        self._memory = _Memory(self._chunks * self._layout.frame_nbytes)
        drawn = random.Random(0).sample(range(blocks), blocks)
        self._block_ids = [[drawn[first : first + BLOCKS]] for first in range(0, blocks, BLOCKS)]
        self._movers: dict[str, Mover] = {}
        self._jobs = itertools.count(1)
        nbytes = count * page_nbytes
        self._plain = torch.empty(nbytes, dtype=torch.uint8, device=_DEVICE)
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._streams = {"store": torch.cuda.Stream(), "load": torch.cuda.Stream()}

    def memcpy(self, direction: str, nbytes: int) -> float:
        torch.cuda.synchronize()
        if direction != "both":
            return _seconds(lambda: self._memcpys({direction: slice(0, nbytes)}))
        halves = {"store": slice(0, nbytes // 2), "load": slice(nbytes // 2, nbytes)}
        return _seconds(lambda: self._memcpys(halves))

    def copy(self, path: str, direction: str, count: int, meanwhile: Callable[[], object] = lambda: None) -> Copied:
        """``meanwhile`` is called until the job has ended."""
        mover, chunks = self._mover(path), count // (LAYERS * BLOCKS)
        slots = list(range(chunks))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if direction == "both":
            half = chunks // 2
            mover.store(next(self._jobs), self._block_ids[:half], slots[:half])
            mover.load(next(self._jobs), slots[half:], self._block_ids[half:chunks])
        elif direction == "store":
            mover.store(next(self._jobs), self._block_ids[:chunks], slots)
        else:
            mover.load(next(self._jobs), slots, self._block_ids[:chunks])
        submit = time.perf_counter() - begin
        if not _ended(mover, 2 if direction == "both" else 1, meanwhile):
            raise RuntimeError("the copies failed")
        return Copied(time.perf_counter() - begin, submit)

    def close(self) -> None:
        for mover in self._movers.values():
            mover.close()

    def _memcpys(self, spans: dict[str, slice]) -> None:
        for direction, span in spans.items():
            to, from_ = (self._pinned, self._plain) if direction == "store" else (self._plain, self._pinned)
            with torch.cuda.stream(self._streams[direction]):
                to[span].copy_(from_[span], non_blocking=True)
        for direction in spans:
            self._streams[direction].synchronize()

    def _mover(self, path: str) -> Mover:
        if path not in self._movers:
            mover = open_mover(
                self._pages.cache(), self._memory.mapped(), self._layout.frame_nbytes, autotune=PATHS[path]
            )
            self._movers[path] = mover
            _wait_until_locked(mover, self._chunks - 1, self._block_ids[0], self._jobs)
        return self._movers[path]


class _Memory:
    """Slots that several movers use: each maps them at addresses of its own, for an address is page-locked once."""

    def __init__(self, nbytes: int):
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = os.memfd_create("gpu-check", os.MFD_CLOEXEC)
        os.truncate(self._file, self._nbytes)

    def mapped(self) -> mmap.mmap:
        memory = mmap.mmap(self._file, self._nbytes)
        memory[:: mmap.PAGESIZE]  # its pages are there, as an arena's are
        return memory

    def __del__(self) -> None:
        os.close(self._file)


class _Pages:
    """An engine's pages, layer by layer."""

    def __init__(self, layout: ChunkLayout, blocks: int):
        (group,) = layout.groups
        self._layout, self._blocks = layout, blocks
        self._layers = [
            torch.empty((blocks, nbytes), dtype=torch.uint8, device=_DEVICE).random_() for nbytes in group.page_nbytes
        ]

    def cache(self) -> PagedKVCache:
        runs = tuple(PageRun(each.data_ptr(), each.shape[1], each.shape[1]) for each in self._layers)
        return PagedKVCache(runs, self._blocks, _DEVICE, 0, self._layout)


def _ended(mover: Mover, jobs: int = 1, meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Wait for so many jobs. Were all of them copied?"""
    ok = True
    while jobs:
        meanwhile()
        for result in mover.finished():
            jobs -= 1
            ok &= result.ok
    return ok


def _wait_until_locked(mover: Mover, slot: int, block_ids: Sequence[Sequence[int]], jobs: Iterator[int]) -> None:
    """Until a job with the last slot succeeds: slots are page-locked from the first one on."""
    end = time.perf_counter() + _PATIENCE
    while True:
        mover.store(next(jobs), [block_ids], [slot])
        if _ended(mover):
            return
        if time.perf_counter() > end:
            raise TimeoutError(f"the slots are not page-locked after {_PATIENCE:.0f} s")
        time.sleep(0.01)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or "it said nothing"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
