"""Loads of frames that a worker reads by itself: from a store's files to memory of its own, verified, then to pages.

The memory has slots as an arena has, and a mover copies from them. Nobody else writes to it, so what was verified there
is what reaches the pages; what does not verify reaches none.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import attrs

from kvtier_core.engine.landed_memory import open_memory
from kvtier_core.engine.own_shard import OwnShard
from kvtier_core.interfaces import JobResult, Landing, Mover, PagedKVCache, PageList
from kvtier_core.stack.batches import in_groups
from kvtier_core.stack.outcomes import FrameRead, ReadStatus
from kvtier_core.transfer.io_pool import IOPool, Outcome, run
from kvtier_core.types import ChunkKey, StoredFrame

#: Of a worker's memory that frames pass through.
_STAGING_NBYTES = 256 << 20
#: Pieces of jobs that may be in that memory at a time: being read, verified and copied.
_PIECES = 8
_THREADS = 2  #: while one verifies, another one reads
#: Seconds for which `LandedLoads.wait` sleeps at a time.
_POLL = 1e-3


class _Piece(NamedTuple):
    """Frames of a job that are read by one call."""

    job: int
    frames: Sequence[StoredFrame]
    pages: PageList


@attrs.define
class _Job:
    """A job under way."""

    left: int  #: pieces that have not ended
    ok: bool = True


class LandedLoads:
    """The loads of one worker from one store tier. Every method is called on the thread that calls its movers."""

    def __init__(self, landing: Landing, cache: PagedKVCache, timeout: float):
        """A read that takes longer than ``timeout`` seconds has failed, and so has all that waits behind it.

        Raises BackendError if workers are not to read these files, see `landed_memory.open_memory`.
        """
        self._landing = landing
        self._timeout = timeout
        own = OwnShard.of(cache.layout, cache.rank)
        slots = max(2, _STAGING_NBYTES // own.layout.frame_nbytes)  # while one is copied another one is read
        pieces = min(_PIECES, slots)
        self._most = slots // pieces  # in a piece
        self._free = [piece * self._most for piece in range(pieces)]  # the first slots of those without a piece
        self._slot_nbytes = own.layout.frame_nbytes
        self._memory = open_memory(landing, own, own.slots_of(cache), slots, timeout)
        self._pool = IOPool("landing", _THREADS)
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Piece] = deque()
        self._reading: dict[int, _Piece] = {}  # by number
        self._copying: dict[int, tuple[_Piece, int]] = {}  # by job of the mover, with the first slot
        self._last = 0
        self._unread: dict[int, dict[ChunkKey, FrameRead]] = {}  # by job
        self._results: list[JobResult] = []

    @property
    def mover(self) -> Mover:
        """Copies from the memory to the pages."""
        return self._memory.mover

    def facts(self) -> Mapping[str, str]:
        """Where frames are read to, in plain words."""
        return {**self._landing.facts(), **self._memory.facts()}

    def load(self, job: int, frames: Sequence[StoredFrame], pages: PageList) -> None:
        """Begin to load these frames into pages; see `Mover.load`."""
        pieces = []
        for group in in_groups(list(zip(frames, pages, strict=True)), lambda _: self._slot_nbytes):
            for at in range(0, len(group), self._most):
                these, their_pages = zip(*group[at : at + self._most], strict=True)
                pieces.append(_Piece(job, these, their_pages))
        self._jobs[job] = _Job(len(pieces))
        self._waiting += pieces
        self._start()

    def finished(self) -> Sequence[JobResult]:
        """Jobs that ended since the last call."""
        self._step()
        results, self._results = self._results, []
        return results

    def take_unread(self, job: int) -> Mapping[ChunkKey, FrameRead]:
        """The frames of a job that ended which could not be used, and why."""
        return self._unread.pop(job, {})

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        self._step()
        while not self._jobs.keys().isdisjoint(jobs) and (left := deadline - time.monotonic()) > 0:
            if self._copying:
                self.mover.wait(self._copying.keys(), min(left, _POLL))
            else:
                self._pool.wait(min(left, _POLL))
            self._step()

    def close(self) -> None:
        """Close the files and the mover. Jobs under way are not reported."""
        idle = self._pool.close(self._timeout)
        self.mover.wait(self._copying.keys())
        if idle:  # else a thread still reads into the memory
            self._landing.close()
            self._memory.close()

    def _step(self) -> None:
        self._pool.step()
        if self._pool.longest() > self._timeout:
            self._give_up()
        for number, ok, *_ in self.mover.finished():
            piece, first = self._copying.pop(number)
            self._free.append(first)
            self._end(piece, ok=ok)
        self._start()

    def _start(self) -> None:
        """Begin the reads for which there is memory."""
        while self._waiting and self._free:
            piece = self._waiting.popleft()
            if not self._jobs[piece.job].ok:  # its request computes them all
                self._end(piece, ok=False)
                continue
            first = self._free.pop()
            self._last += 1
            self._reading[self._last] = piece
            self._pool.submit_load(
                lambda piece=piece, first=first: self._memory.read(piece.frames, first),
                lambda outcome, number=self._last, first=first: self._arrived(number, first, outcome),
            )

    def _arrived(self, number: int, first: int, outcome: Outcome) -> None:
        piece = self._reading.pop(number, None)
        if piece is None:  # it was given up
            self._free.append(first)
            return
        if outcome.error is None:
            reads = outcome.value
        else:
            why = f"{type(outcome.error).__name__}: {outcome.error}"
            reads = [FrameRead(ReadStatus.IO_ERROR, why)] * len(piece.frames)
        unread = {
            frame.key: read
            for frame, read in zip(piece.frames, reads, strict=True)
            if read.status is not ReadStatus.VERIFIED
        }
        slots = range(first, first + len(piece.frames))
        if not unread and run(lambda: self.mover.load(number, slots, piece.pages)).error is None:
            self._copying[number] = piece, first
            return
        self._free.append(first)
        self._end(piece, ok=False, unread=unread)

    def _give_up(self) -> None:
        """A read hangs: what it reads has failed, and all that waits behind it. Its slots are free when it returns."""
        hanging, self._reading = self._reading, {}
        waiting, self._waiting = self._waiting, deque()
        for piece in (*hanging.values(), *waiting):
            why = f"a read took longer than {self._timeout:g}s"
            unread = {frame.key: FrameRead(ReadStatus.IO_ERROR, why) for frame in piece.frames}
            self._end(piece, ok=False, unread=unread)

    def _end(self, piece: _Piece, *, ok: bool, unread: Mapping[ChunkKey, FrameRead] | None = None) -> None:
        job = self._jobs[piece.job]
        job.left -= 1
        job.ok = job.ok and ok
        if unread:
            self._unread.setdefault(piece.job, {}).update(unread)
        if not job.left:
            del self._jobs[piece.job]
            self._results.append(JobResult(piece.job, job.ok))
