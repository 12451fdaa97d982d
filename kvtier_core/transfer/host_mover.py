"""Copies pages to slots and back where both lie in host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Collection, Sequence

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import JobResult, Mover, PagedKVCache, PageList
from kvtier_core.transfer.copier import Copier, PlainCopier
from kvtier_core.transfer.io_pool import IOPool, Outcome, run
from kvtier_core.transfer.page_lists import check_table, checked, layers_of

_FOREVER = 1e6  # seconds


class HostMover(Mover):
    """``memory`` holds slots of ``slot_nbytes`` side by side, and lives as long as the mover.

    Stores are copied at once, so that the engine comes after them, and they not behind loads. Loads are copied by a
    thread, while other requests compute. Addresses are raw, so a job is refused with a ContractError before
    any of it is copied, or it is right.
    """

    def __init__(
        self,
        table: PagedKVCache,
        memory: mmap.mmap | memoryview,
        slot_nbytes: int,
        copier: type[PlainCopier] = Copier,
    ):
        if table.device != "cpu":
            raise BackendError(
                f"no mover for device {table.device!r}; the host mover reaches only cpu", retryable=False
            )
        check_table(table, slot_nbytes)
        self._table = table
        self._slots = len(memory) // slot_nbytes
        # The export forbids to close an mmap while the mover may copy.
        self._memory: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        shard = ctypes.addressof(self._memory) + table.layout.shard_offset(table.rank)
        self._copier = copier(list(layers_of(table)), table.layout.blocks, shard, slot_nbytes)
        self._pool = IOPool("mover")
        self._jobs: set[int] = set()
        self._ended: list[JobResult] = []

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        rows, slots = self._checked(job, pages, slots)
        self._jobs.add(job)
        self._end(job, run(lambda: self._copier.gather(rows, slots)))

    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        rows, slots = self._checked(job, pages, slots)
        self._pool.submit_load(lambda: self._copier.scatter(rows, slots), lambda outcome: self._end(job, outcome))
        self._jobs.add(job)

    def finished(self) -> Sequence[JobResult]:
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
        self._ended += [JobResult(job, ok=False) for job in sorted(self._jobs)]
        self._jobs.clear()
        self._memory = None

    def _end(self, job: int, outcome: Outcome) -> None:
        self._jobs.remove(job)
        self._ended.append(JobResult(job, ok=outcome.error is None, checksums=outcome.value or ()))

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Rows of blocks and their slots, as the plain ints that addresses are computed from."""
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._memory is None:
            raise ContractError("the mover is closed")
        return checked(self._table, self._slots, pages, slots)
