"""Jobs of a mover whose pages lie on a device: one stream for each direction, ordered by events. No thread waits.

    engine's stream   … forward ──● store() ……… forward ………………… fence() ○ forward (overwrites the pages)
    stores' stream                └─○ gather ────────────────────────●─┘
    loads' stream                                  └─○ scatter ──● finished() says so, then the engine computes on it

● an event is recorded, ○ a stream waits for it. The host only asks, in `finished`, whether an event has occurred.
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
from kvtier_core.transfer.cuda.host_registration import Registration, register_with_cuda
from kvtier_core.transfer.cuda.library import Library, load
from kvtier_core.transfer.io_pool import run
from kvtier_core.transfer.page_lists import CheckedJob, check_cache, check_job

_POLL = 5e-5  # seconds


@attrs.frozen
class _Job:
    done: Any  #: an event behind the copies
    ok: bool  #: were all of them enqueued?
    read: frozenset[int]  #: blocks that a store reads


class DeviceMover(Mover):
    """Copies between pages of ``cache`` and ``slots`` slots through ``copiers``, one for each part of
    a chunk. See `open_mover`.

    ``streams`` is torch's module for the device; ``keep`` an object that keeps the slots' memory, held until `close`.
    Every method is called on the thread that enqueues the engine's work, and only `wait` and `close` wait for the
    device. Addresses are raw: a job with a wrong block id or slot raises ContractError before any of it is copied. A
    job with a slot that is not page-locked yet is reported as failed, because its copy would block the host.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        slots: int,
        copiers: Sequence[Copier],
        streams: Any,
        registration: Registration,
        keep: object = None,
    ):
        self._cache = cache
        self._slots = slots
        self._copiers = copiers
        self._streams = streams
        self._registration = registration
        self._keep = keep
        self._device = torch.device(cache.device)
        self._stores, self._loads = streams.Stream(self._device), streams.Stream(self._device)
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._closed = False

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        checked = self._checked(job, pages, slots)
        gather = self._copiers[checked.part.number].gather
        self._begin(job, self._stores, gather, checked, read=_blocks(checked.rows))

    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        checked = self._checked(job, pages, slots)
        written = _blocks(checked.rows)
        for other in self._jobs.values():
            if not other.read.isdisjoint(written):
                self._loads.wait_event(other.done)
        scatter = self._copiers[checked.part.number].scatter
        self._begin(job, self._loads, scatter, checked, read=frozenset())

    def finished(self) -> Sequence[JobResult]:
        for job, begun in list(self._jobs.items()):
            outcome = run(begun.done.query)
            if outcome.error is not None or outcome.value:
                del self._jobs[job]
                self._results.append(JobResult(job, ok=begun.ok and outcome.error is None))
        results, self._results = self._results, []
        return results

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
        facts: dict[str, str] = {}
        for copier in self._copiers:
            facts.update(copier.facts())
        return {**facts, **self._registration.facts()}

    def close(self) -> None:
        if self._closed:
            return
        self.wait(list(self._jobs))
        self._results = list(self.finished())
        self._closed = True
        for copier in self._copiers:
            copier.close()
        self._registration.close()
        self._keep = None

    def _begin(
        self,
        job: int,
        stream: Any,
        copy: Callable[[Sequence[Sequence[int]], Sequence[int], Any], None],
        checked: CheckedJob,
        read: frozenset[int],
    ) -> None:
        if not self._registration.covers(checked.slots):
            self._results.append(JobResult(job, ok=False))
            return
        stream.wait_event(self._now(self._streams.current_stream(self._device)))
        outcome = run(lambda: copy(checked.rows, checked.slots, stream))
        # A failed job may have enqueued some copies: it has ended when the stream has completed them.
        self._jobs[job] = _Job(self._now(stream), outcome.error is None, read)

    def _now(self, stream: Any) -> Any:
        """An event that occurs when the stream has done everything enqueued on it so far."""
        event = self._streams.Event()
        event.record(stream)
        return event

    def _checked(self, job: int, pages: PageList, slots: Sequence[int]) -> CheckedJob:
        if job in self._jobs:
            raise ContractError(f"job {job} has not ended")
        if self._closed:
            raise ContractError("the mover is closed")
        return check_job(self._cache, self._slots, pages, slots)


def open_mover(
    cache: PagedKVCache,
    memory: mmap.mmap | memoryview,
    slot_nbytes: int,
    *,
    library: Library | str | None = None,
    autotune: Autotune | None = None,
) -> DeviceMover:
    """A mover for an engine on a CUDA device, with kvtier's own library if that works, else torch's operators.

    ``memory`` holds the arena's slots of ``slot_nbytes`` side by side; they are page-locked in the background.
    ``library``: the one to use, or a reason to use none; by default what `load` finds. ``autotune``: see `choose`.
    Raises BackendError and ContractError, see `attach`.
    """
    device = torch.device(cache.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"no mover for device {cache.device!r}: torch finds no such device here")
    check_cache(cache, slot_nbytes)
    slots = len(memory) // slot_nbytes
    keep = ctypes.c_char.from_buffer(memory)  # an mmap cannot be closed while its buffer is exported
    address = ctypes.addressof(keep)
    with contextlib.ExitStack() as undo:
        registration = register_with_cuda(address, slots, slot_nbytes, device)
        undo.callback(registration.close)
        library = library or load()
        if not isinstance(library, str):
            autotune = autotune or ScratchAutotune(library, device)
        copiers: list[Copier] = []
        for part in cache.layout.parts:
            shards = address + part.shard_of(cache.rank).offset
            if isinstance(library, str):
                copiers.append(TorchCopier(torch.cuda, cache, part, shards, slots, slot_nbytes, library))
            else:
                copiers.append(NativeCopier(library, autotune, cache, part, shards, slot_nbytes))
            undo.callback(copiers[-1].close)
        mover = DeviceMover(cache, slots, copiers, torch.cuda, registration, keep)
        undo.pop_all()
    return mover


def _blocks(rows: Sequence[Sequence[int]]) -> frozenset[int]:
    """The blocks of all groups together: a load may then wait for another group's store, which only costs time."""
    return frozenset(block for row in rows for block in row if block != NO_BLOCK)
