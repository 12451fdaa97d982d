"""The device of a worker: its memory, its streams, and the forward that is enqueued on the engine's."""

from __future__ import annotations

import abc
import functools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from device_engine import content
from device_engine.content import Forward, as_signed
from device_engine.late_cuda import LateCuda
from device_engine.memory import CudaMemory, HostMemory, Memory
from device_engine.setup import Setup
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Mover, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.library import Direction, Method, Sums
from kvtier_core.transfer.cuda.mover import DeviceMover
from kvtier_core.transfer.cuda.opening import open_mover
from kvtier_cpu.config import CpuConfig
from kvtier_cpu.segment import Address, reach


@attrs.frozen
class Enqueued:
    """A step that the host has enqueued."""

    done: Any  #: an event behind it
    wrong: torch.Tensor  #: in the host's memory, when it is done: wrong tokens so far

    def wait(self) -> int:
        """Let the host wait for the device. Returns how many tokens were wrong so far."""
        self.done.synchronize()
        return int(self.wrong)


class Device(abc.ABC):
    """Of one rank. ``streams`` is torch's module, or what stands for it."""

    def __init__(self, setup: Setup, rank: int, streams: Any, device: str):
        self.streams = streams
        self._setup, self._rank, self._name = setup, rank, device
        self.caches, self._memory = [], []
        pages = [setup.block_tokens * words for words in setup.token_words]
        for together in [pages] if setup.block_major else [[page] for page in pages]:
            shape = (setup.blocks, sum(together))
            if setup.sleeps:
                self._memory.append(self._unmappable(8 * shape[0] * shape[1]))
                whole = self._memory[-1].tensor.view(torch.int64).view(shape)
            else:
                whole = torch.zeros(shape, dtype=torch.int64, device=device)
            self.caches += whole.split(together, dim=1)
        self._wrong = torch.zeros(1, dtype=torch.int64, device=device)

    def pages(self, layout: ChunkLayout) -> PagedKVCache:
        """Where the pages lie, for the worker side."""
        runs = tuple(PageRun(each.data_ptr(), each.stride(0) * 8, each.shape[1] * 8) for each in self.caches)
        return PagedKVCache(runs, self._setup.blocks, self._name, self._rank, layout)

    def sleep(self) -> None:
        """Give the pages' memory back."""
        for memory in self._memory:
            memory.unmap()

    def wake(self) -> None:
        """Other memory at the same addresses."""
        for memory in self._memory:
            memory.map_elsewhere()

    @abc.abstractmethod
    def arena(self, kind: type[DeviceMover], fails: Callable[[], bool]) -> CpuConfig:
        """The arena's settings for a worker with this device, whose mover is of this kind."""

    @abc.abstractmethod
    def zero(self, blocks: Sequence[int]) -> None:
        """Enqueue a kernel that zeroes blocks."""

    @abc.abstractmethod
    def launch(self, forward: Forward) -> Enqueued:
        """Enqueue a step."""

    def idle(self) -> bool:
        """The host has nothing to compute. True if the device has done something meanwhile, without a clock."""
        return False

    def attached(self) -> None:
        """The arena was attached, and is being page-locked."""

    @abc.abstractmethod
    def _unmappable(self, nbytes: int) -> Memory: ...

    def _tables(self, forward: Forward) -> Iterator[list[int]]:
        yield list(forward.reads)
        yield as_signed(forward.read_histories, self._rank)
        yield list(forward.writes)
        yield as_signed(forward.write_histories, self._rank)


class SimulatedDevice(Device):
    """Pages in the host's memory, and kvtier's own library over a driver whose streams do their work late."""

    def __init__(self, setup: Setup, rank: int, libraries: Sequence[Path]):
        self._cuda = LateCuda(setup.seed * 64 + rank, libraries)
        super().__init__(setup, rank, self._cuda, "cpu")

    def arena(self, kind: type[DeviceMover], fails: Callable[[], bool]) -> CpuConfig:
        return _SimulatedArena(kind=kind, fails=fails, cuda=self._cuda, staged=self._setup.staged)

    def zero(self, blocks: Sequence[int]) -> None:
        self._cuda.engine.run(lambda: [cache.index_fill_(0, torch.tensor(blocks), 0) for cache in self.caches] and None)

    def launch(self, forward: Forward) -> Enqueued:
        tables = [torch.tensor(each, dtype=torch.int64) for each in self._tables(forward)]
        told = torch.ones(1, dtype=torch.int64)  # wrong, unless the work gets to its end

        def work() -> None:
            content.forward(self.caches, self._setup.block_tokens, self._wrong, *tables)
            told.copy_(self._wrong)

        self._cuda.engine.run(work)
        done = self._cuda.Event()
        done.record(self._cuda.engine)
        self._cuda.pass_time()
        return Enqueued(done, told)

    def idle(self) -> bool:
        for _ in range(4):
            self._cuda.pass_time()
        return True

    def sleep(self) -> None:
        self._cuda.engine.synchronize()
        super().sleep()

    def _unmappable(self, nbytes: int) -> Memory:
        return HostMemory(nbytes)


class CudaDevice(Device):
    """A GPU as vLLM uses one: a stream that is not the default one, and a CUDA graph for each size of a batch."""

    _SIZES = (256, 1024, 4096, 16384)

    def __init__(self, setup: Setup, rank: int):
        torch.cuda.set_device(setup.device)
        torch.cuda.set_stream(torch.cuda.Stream())
        super().__init__(setup, rank, torch.cuda, setup.device)
        self._static = [torch.zeros(self._SIZES[-1], dtype=torch.int64, device=setup.device) for _ in range(4)]
        self._matrix = torch.randn(4096, 4096, device=setup.device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._matrix)
        self._forward(self._SIZES[0])  # whatever torch makes at the first call must not be made inside a graph
        torch.cuda.synchronize()
        self._graphs = {size: self._captured(size) for size in self._SIZES}

    def arena(self, kind: type[DeviceMover], fails: Callable[[], bool]) -> CpuConfig:
        return _CudaArena(kind=kind, fails=fails)

    def attached(self) -> None:
        """Capture the graphs anew: with a large arena the thread that locks it is at work now."""
        self._graphs = {size: self._captured(size) for size in self._SIZES}

    def zero(self, blocks: Sequence[int]) -> None:
        places = self._on_device(blocks)
        for cache in self.caches:
            cache.index_fill_(0, places, 0)

    def launch(self, forward: Forward) -> Enqueued:
        tables = list(self._tables(forward))
        size = next(size for size in self._SIZES if size >= max(map(len, tables)))
        for static, table in zip(self._static, tables, strict=True):
            static[:size].copy_(self._on_device(table + [0] * (size - len(table))))
        self._graphs[size].replay()
        told = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        told.copy_(self._wrong, non_blocking=True)
        return Enqueued(torch.cuda.current_stream().record_event(), told)

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward(size)
        return graph

    def _forward(self, size: int) -> None:
        for _ in range(self._setup.busy):
            torch.matmul(self._matrix, self._matrix, out=self._product)
        tables = (static[:size] for static in self._static)
        content.forward(self.caches, self._setup.block_tokens, self._wrong, *tables)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        # Not from pageable memory: torch would wait for the device, and the host could not run ahead of it.
        host = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        return host.to(self._name, non_blocking=True)

    def _unmappable(self, nbytes: int) -> Memory:
        return CudaMemory(nbytes, torch.cuda.current_device())


@attrs.frozen
class _CudaArena(CpuConfig):
    """The arena and the mover that serve; copies may be made to fail, and a bug may be planted."""

    kind: type[DeviceMover] = attrs.field(kw_only=True)
    fails: Callable[[], bool] = attrs.field(kw_only=True)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        mover = self._mover(handle, cache)
        mover.__class__ = self.kind
        mover._copiers = [FailingCopier(copier, self.fails) for copier in mover._copiers]
        return mover

    def _mover(self, handle: str, cache: PagedKVCache) -> DeviceMover:
        return super().attach(handle, cache)


@attrs.frozen
class _SimulatedArena(_CudaArena):
    """The same with the driver of the tests; each direction goes a way of its own."""

    cuda: LateCuda = attrs.field(kw_only=True)
    staged: bool = attrs.field(kw_only=True)

    def _mover(self, handle: str, cache: PagedKVCache) -> DeviceMover:
        fields = json.loads(handle)
        slot_nbytes = fields.pop("slot_nbytes")
        ways = {to_slots: decided(self.cuda.rng.choice(list(Method))) for to_slots in (True, False)}
        if self.staged:
            ways[True] = decided(Method.STAGED)
        return open_mover(
            attrs.evolve(cache, device="cuda:0"),
            reach(Address(**fields), populate=False),
            slot_nbytes,
            device=self.cuda.device(),
            engine=self.cuda,
            autotune=lambda layers, possible, to_slots: ways[to_slots](layers, possible, to_slots),
            # So little that jobs go in several slices.
            half_nbytes=4 * max(run.nbytes for run in cache.layers),
        )


class FailingCopier:
    """Copies some of the chunks of a job and raises, when ``fails`` is true."""

    def __init__(self, copier: Copier, fails: Callable[[], bool]):
        self._copier, self._fails = copier, fails
        self.facts = copier.facts
        self.checksums = copier.checksums
        self.failed = False  #: did the last call raise?

    def gather(self, rows: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        self._some(functools.partial(self._copier.gather, sums=sums), rows, slots, through)

    def scatter(self, rows: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        self._some(functools.partial(self._copier.scatter, sums=sums), rows, slots, through)

    def _some(self, copy: Callable[..., None], rows: array[int], slots: array[int], through: Direction) -> None:
        self.failed = self._fails()
        count = (len(slots) + 1) // 2 if self.failed else len(slots)
        copy(rows[: count * (len(rows) // len(slots))], slots[:count], through)
        if self.failed:
            raise BackendError("this copy was to fail")
