"""Copies pages to slots and back where both lie in host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Collection, Iterator, Sequence
from operator import index

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import HOLE, Mover, PageList, PageTable
from kvtier_core.workers import IOPool, Outcome, run

_FOREVER = 1e6  # seconds

_Piece = tuple[int, int, int]  # address of pages, address in a slot, bytes


class HostMover(Mover):
    """``memory`` holds slots of ``slot_nbytes`` side by side, and lives as long as the mover.

    Stores are copied at once: the engine waits for them anyway, and must not wait behind loads. Loads are copied
    by a thread, while other requests compute. Addresses are raw, so a job is refused with a ContractError before
    any of it is copied, or it is right.
    """

    def __init__(self, table: PageTable, memory: mmap.mmap | memoryview, slot_nbytes: int):
        _check(table, slot_nbytes)
        self._blocks = table.blocks
        self._row = table.layout.blocks
        self._slots = len(memory) // slot_nbytes
        self._slot_nbytes = slot_nbytes
        # The export forbids to close an mmap while the mover may copy.
        self._memory: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        self._shard = ctypes.addressof(self._memory) + table.layout.shard_offset(table.rank)
        self._layers = _by_shape(table)
        self._pool = IOPool("mover")
        self._jobs: set[int] = set()
        self._finished: list[tuple[int, bool]] = []

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        pairs = self._checked(job, pages, slots)
        self._jobs.add(job)
        self._end(job, run(lambda: _gather(self._pieces(pairs))))

    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        pairs = self._checked(job, pages, slots)
        self._pool.submit_load(lambda: _scatter(self._pieces(pairs)), lambda outcome: self._end(job, outcome))
        self._jobs.add(job)

    def finished(self) -> Sequence[tuple[int, bool]]:
        self._pool.step()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        self._pool.step()
        while not self._jobs.isdisjoint(jobs) and (left := deadline - time.monotonic()) > 0:
            self._pool.wait(min(left, _FOREVER))
            self._pool.step()

    def close(self) -> None:
        """Jobs that have not begun are reported as failed."""
        self._pool.close(_FOREVER)
        self._pool.step()
        self._finished += [(job, False) for job in sorted(self._jobs)]
        self._jobs.clear()
        self._memory = None

    def _end(self, job: int, outcome: Outcome) -> None:
        self._jobs.remove(job)
        self._finished.append((job, outcome.error is None))

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> list[tuple[list[int], int]]:
        """Each row of blocks and its slot, as the plain ints that addresses are computed from."""
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._memory is None:
            raise ContractError("the mover is closed")
        if len(pages) != len(slots):
            raise ContractError(f"{len(pages)} chunks of pages for {len(slots)} slots")
        pairs = [(list(map(index, row)), index(slot)) for row, slot in zip(pages, slots, strict=True)]
        for row, slot in pairs:
            if not 0 <= slot < self._slots:
                raise ContractError(f"slot {slot} is not one of {self._slots}")
            if len(row) != self._row:
                raise ContractError(f"{len(row)} block ids for a chunk of {self._row}")
            if min(row) < HOLE or max(row) >= self._blocks:
                raise ContractError(f"block ids {row} are not all HOLE or one of {self._blocks}")
        return pairs

    def _pieces(self, pairs: list[tuple[list[int], int]]) -> Iterator[_Piece]:
        for row, slot in pairs:
            shard = self._shard + slot * self._slot_nbytes
            runs = _runs(row)
            singles = [(place, block, 1) for place, block in enumerate(row) if block != HOLE]
            for (stride, nbytes), layers in self._layers.items():
                spans = [
                    (block * stride, place * nbytes, count * nbytes)
                    for place, block, count in (runs if stride == nbytes else singles)
                ]
                for base, offset in layers:
                    begin = shard + offset
                    for page, place, length in spans:
                        yield base + page, begin + place, length


def _gather(pieces: Iterator[_Piece]) -> None:
    for page, place, nbytes in pieces:
        ctypes.memmove(place, page, nbytes)


def _scatter(pieces: Iterator[_Piece]) -> None:
    for page, place, nbytes in pieces:
        ctypes.memmove(page, place, nbytes)


def _runs(row: list[int]) -> list[tuple[int, int, int]]:
    """Place in the chunk, first block and length of each run of consecutive blocks."""
    runs: list[tuple[int, int, int]] = []
    for place, block in enumerate(row):
        if block == HOLE:
            continue
        if runs:
            begin, first, count = runs[-1]
            if (place, block) == (begin + count, first + count):
                runs[-1] = (begin, first, count + 1)
                continue
        runs.append((place, block, 1))
    return runs


def _by_shape(table: PageTable) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Address and offset in the shard of each layer, under stride and bytes of its pages: spans are shared."""
    shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    offset = 0
    for layer in table.layers:
        shapes.setdefault((layer.stride, layer.nbytes), []).append((layer.base, offset))
        offset += layer.nbytes * table.layout.blocks
    return shapes


def _check(table: PageTable, slot_nbytes: int) -> None:
    layout = table.layout
    if table.device != "cpu":
        raise BackendError(f"no mover for device {table.device!r}; the host mover reaches only cpu", retryable=False)
    if tuple(run.nbytes for run in table.layers) != layout.page_nbytes:
        raise ContractError(f"pages of {[run.nbytes for run in table.layers]} bytes for {list(layout.page_nbytes)}")
    if any(run.stride < run.nbytes for run in table.layers):
        raise ContractError("pages of a layer overlap: a stride is less than its nbytes")
    if not 0 <= table.rank < layout.ranks:
        raise ContractError(f"rank {table.rank} is not one of {layout.ranks}")
    if slot_nbytes != layout.frame_nbytes:
        raise ContractError(f"slots of {slot_nbytes} bytes for frames of {layout.frame_nbytes}")
