"""Copies pages to slots and back where both lie in host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Collection, Iterator, Sequence
from operator import index

from kvtier_core.copier import Copier, Layer, PlainCopier
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import HOLE, Ended, Mover, PageList, PageTable
from kvtier_core.workers import IOPool, Outcome, run

_FOREVER = 1e6  # seconds


class HostMover(Mover):
    """``memory`` holds slots of ``slot_nbytes`` side by side, and lives as long as the mover.

    Stores are copied at once: the engine waits for them anyway, and must not wait behind loads. Loads are copied
    by a thread, while other requests compute. Addresses are raw, so a job is refused with a ContractError before
    any of it is copied, or it is right.
    """

    def __init__(
        self,
        table: PageTable,
        memory: mmap.mmap | memoryview,
        slot_nbytes: int,
        copier: type[PlainCopier] = Copier,
    ):
        _check(table, slot_nbytes)
        self._table = table
        self._slots = len(memory) // slot_nbytes
        # The export forbids to close an mmap while the mover may copy.
        self._memory: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        shard = ctypes.addressof(self._memory) + table.layout.shard_offset(table.rank)
        self._copier = copier(list(_layers(table)), table.layout.blocks, shard, slot_nbytes)
        self._pool = IOPool("mover")
        self._jobs: set[int] = set()
        self._ended: list[Ended] = []

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        rows, slots = self._checked(job, pages, slots)
        self._jobs.add(job)
        self._end(job, run(lambda: self._copier.gather(rows, slots)))

    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        rows, slots = self._checked(job, pages, slots)
        self._pool.submit_load(lambda: self._copier.scatter(rows, slots), lambda outcome: self._end(job, outcome))
        self._jobs.add(job)

    def finished(self) -> Sequence[Ended]:
        self._pool.step()
        ended, self._ended = self._ended, []
        return ended

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
        self._ended += [Ended(job, ok=False) for job in sorted(self._jobs)]
        self._jobs.clear()
        self._memory = None

    def _end(self, job: int, outcome: Outcome) -> None:
        self._jobs.remove(job)
        self._ended.append(Ended(job, ok=outcome.error is None, sums=outcome.value or ()))

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Rows of blocks and their slots, as the plain ints that addresses are computed from."""
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._memory is None:
            raise ContractError("the mover is closed")
        if len(pages) != len(slots):
            raise ContractError(f"{len(pages)} chunks of pages for {len(slots)} slots")
        rows, slots = [list(map(index, row)) for row in pages], list(map(index, slots))
        for row, slot in zip(rows, slots, strict=True):
            if not 0 <= slot < self._slots:
                raise ContractError(f"slot {slot} is not one of {self._slots}")
            if len(row) != self._table.layout.blocks:
                raise ContractError(f"{len(row)} block ids for a chunk of {self._table.layout.blocks}")
            if min(row) < HOLE or max(row) >= self._table.blocks:
                raise ContractError(f"block ids {row} are not all HOLE or one of {self._table.blocks}")
        return rows, slots


def _layers(table: PageTable) -> Iterator[Layer]:
    offset = 0
    for layer in table.layers:
        yield layer.base, layer.stride, layer.nbytes, offset
        offset += layer.nbytes * table.layout.blocks


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
