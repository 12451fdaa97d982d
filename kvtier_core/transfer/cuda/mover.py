"""The jobs of a mover whose pages lie on a device: two streams, one a direction, ordered by events. No thread waits.

    engine's stream   … forward ──● store() ……… forward ………………… fence() ○ forward (overwrites the pages)
    stores' stream                └─○ gather ────────────────────────●─┘
    loads' stream                                  └─○ scatter ──● finished() says so, then the engine computes on it

● an event is recorded, ○ a stream waits for it. The host only asks, in `finished`, whether an event has come to pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import NO_BLOCK, JobResult, Mover, PagedKVCache, PageList
from kvtier_core.transfer.cuda.autotune import Autotune, ScratchAutotune
from kvtier_core.transfer.cuda.copiers import Copier, NativeCopier, TorchCopier
from kvtier_core.transfer.cuda.host_registration import Lock, cuda_lock
from kvtier_core.transfer.cuda.library import Library, load
from kvtier_core.transfer.io_pool import run
from kvtier_core.transfer.page_lists import check_table, checked

_POLL = 5e-5  # seconds


@attrs.frozen
class _Job:
    done: Any  #: an event behind the copies
    ok: bool  #: were all of them enqueued?
    read: frozenset[int]  #: blocks that a store reads


class DeviceMover(Mover):
    """``streams`` is torch's module for the device. Every method on the thread that enqueues the engine's work.

    Addresses are raw, so a job is refused with a ContractError before any of it is copied, or it is right. A job with
    a slot that is not page-locked yet is reported as failed, which is a miss: its copy would hold up the host.
    """

    def __init__(self, table: PagedKVCache, slots: int, copier: Copier, streams: Any, lock: Lock, keep: object = None):
        self._table = table
        self._slots = slots
        self._copier = copier
        self._streams = streams
        self._lock = lock
        self._keep = keep  # the memory of the slots
        self._device = torch.device(table.device)
        self._stores, self._loads = streams.Stream(self._device), streams.Stream(self._device)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobResult] = []
        self._closed = False

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        rows, slots = self._checked(job, pages, slots)
        self._begin(job, self._stores, self._copier.gather, rows, slots, read=_blocks(rows))

    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        rows, slots = self._checked(job, pages, slots)
        written = _blocks(rows)
        for other in self._jobs.values():
            if not other.read.isdisjoint(written):
                self._loads.wait_event(other.done)
        self._begin(job, self._loads, self._copier.scatter, rows, slots, read=frozenset())

    def finished(self) -> Sequence[JobResult]:
        for job, begun in list(self._jobs.items()):
            outcome = run(begun.done.query)
            if outcome.error is not None or outcome.value:
                del self._jobs[job]
                self._ended.append(JobResult(job, ok=begun.ok and outcome.error is None))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        events = [self._jobs[job].done for job in jobs if job in self._jobs]
        while not all(run(event.query).value is not False for event in events) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def fence(self, jobs: Collection[int]) -> None:
        engine = self._streams.current_stream(self._device)
        for job in jobs:
            if job in self._jobs:
                engine.wait_event(self._jobs[job].done)

    def facts(self) -> Mapping[str, str]:
        return {**self._copier.facts(), **self._lock.facts()}

    def close(self) -> None:
        if self._closed:
            return
        self.wait(list(self._jobs))
        self._ended = list(self.finished())
        self._closed = True
        self._copier.close()
        self._lock.close()
        self._keep = None

    def _begin(
        self,
        job: int,
        stream: Any,
        copy: Callable[[Sequence[Sequence[int]], Sequence[int], Any], None],
        rows: Sequence[Sequence[int]],
        slots: Sequence[int],
        read: frozenset[int],
    ) -> None:
        if not self._lock.covers(slots):
            self._ended.append(JobResult(job, ok=False))
            return
        stream.wait_event(self._now(self._streams.current_stream(self._device)))
        outcome = run(lambda: copy(rows, slots, stream))
        # What failed may have begun: it has ended when the stream is behind it.
        self._jobs[job] = _Job(self._now(stream), outcome.error is None, read)

    def _now(self, stream: Any) -> Any:
        """An event that comes to pass when the stream has done what it was given so far."""
        event = self._streams.Event()
        event.record(stream)
        return event

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._closed:
            raise ContractError("the mover is closed")
        return checked(self._table, self._slots, pages, slots)


def open_mover(
    table: PagedKVCache,
    memory: mmap.mmap | memoryview,
    slot_nbytes: int,
    *,
    library: Library | str | None = None,
    autotune: Autotune | None = None,
) -> DeviceMover:
    """With our own kernels where they were built and run here, else with torch's operators.

    A ``library`` that is a reason why there is none, or a ``autotune`` whose outcome is known, decides that beforehand.
    """
    device = torch.device(table.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"no mover for device {table.device!r}: torch finds no such device here", retryable=False)
    check_table(table, slot_nbytes)
    slots = len(memory) // slot_nbytes
    keep = ctypes.c_char.from_buffer(memory)  # forbids to close an mmap while the mover may copy
    address = ctypes.addressof(keep)
    shards = address + table.layout.shard_offset(table.rank)
    with contextlib.ExitStack() as undo:
        lock = cuda_lock(address, slots, slot_nbytes, device)
        undo.callback(lock.close)
        library = library or load()
        copier: Copier
        if isinstance(library, str):
            copier = TorchCopier(torch.cuda, table, shards, slots, slot_nbytes, library)
        else:
            copier = NativeCopier(library, autotune or ScratchAutotune(library, device), table, shards, slot_nbytes)
        undo.callback(copier.close)
        mover = DeviceMover(table, slots, copier, torch.cuda, lock, keep)
        undo.pop_all()
    return mover


def _blocks(rows: Sequence[Sequence[int]]) -> frozenset[int]:
    return frozenset(block for row in rows for block in row if block != NO_BLOCK)
