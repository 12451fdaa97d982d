"""Copies pages to slots and back where both are in host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Collection, Sequence

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import JobResult, Mover, PagedKVCache, PageList
from kvtier_core.transfer.copier import Copier, PlainCopier
from kvtier_core.transfer.page_lists import CheckedJob, check_cache, check_job, layers_of
from kvtier_core.work.io_pool import IOPool, Outcome, run

_FOREVER = 1e6  # seconds


class HostMover(Mover):
    """A mover for an arena in host memory and an engine on the CPU.

    ``memory`` holds the arena's slots of ``slot_nbytes`` contiguously. The mover keeps it open until `close`.

    `store` returns when its pages are copied, so it never waits behind loads, and `fence` has nothing to wait for. A
    thread copies loads while other requests compute. Addresses are raw: a job with a wrong block id or slot raises
    ContractError before any of it is copied.

    Raises BackendError for a device other than ``cpu``, ContractError if ``cache`` does not fit its layout.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        memory: mmap.mmap | memoryview,
        slot_nbytes: int,
        copier: type[PlainCopier] = Copier,
    ):
        if cache.device != "cpu":
            raise BackendError(f"no mover for device {cache.device!r}; the host mover supports only cpu")
        check_cache(cache, slot_nbytes)
        self._cache = cache
        self._slots = len(memory) // slot_nbytes
        # An mmap cannot be closed while its buffer is exported.
        self._memory: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(self._memory)
        self._copiers = []
        for part in cache.layout.parts:
            shard = part.shard_of(cache.rank)
            packed_nbytes = shard.nbytes if shard.packed else 0
            layers = list(layers_of(cache, part))
            self._copiers.append(copier(layers, base + shard.offset, slot_nbytes, packed_nbytes))
        self._pool = IOPool("mover")
        self._jobs: set[int] = set()
        self._results: list[JobResult] = []

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        checked = self._checked(job, pages, slots)
        self._jobs.add(job)
        self._end(job, run(lambda: self._copiers[checked.part.number].gather(checked.rows, checked.slots)))

    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        checked = self._checked(job, pages, slots)
        copier = self._copiers[checked.part.number]
        self._pool.submit_load(
            lambda: copier.scatter(checked.rows, checked.slots), lambda outcome: self._end(job, outcome)
        )
        self._jobs.add(job)

    def finished(self) -> Sequence[JobResult]:
        self._pool.step()
        results, self._results = self._results, []
        return results

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        self._pool.step()
        while not self._jobs.isdisjoint(jobs) and (left := deadline - time.monotonic()) > 0:
            self._pool.wait(min(left, _FOREVER))
            self._pool.step()

    def close(self) -> None:
        """Close the mover. Jobs that have not begun are reported as failed."""
        self._pool.close(_FOREVER)
        self._pool.step()
        self._results += [JobResult(job, ok=False) for job in sorted(self._jobs)]
        self._jobs.clear()
        self._memory = None

    def _end(self, job: int, outcome: Outcome) -> None:
        self._jobs.remove(job)
        checksums = outcome.value if isinstance(outcome.value, Sequence) else ()
        filled = [place for place, checksum in enumerate(checksums) if checksum is not None]
        ok = outcome.error is None and outcome.value is not False and len(filled) == len(checksums)
        self._results.append(JobResult(job, ok, checksums if ok else (), () if ok else filled))

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> CheckedJob:
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._memory is None:
            raise ContractError("the mover is closed")
        return check_job(self._cache, self._slots, pages, slots)
