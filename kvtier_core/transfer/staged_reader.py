"""A `DirectReader` for any store that can read a range of a frame into memory.

A worker has a few lanes, each with a thread, slots that nothing else writes to, and a mover from these to the pages. A
lane takes some frames of a job at a time: it reads them into its slots, verifies them, copies them to the pages and
waits for the copy. Meanwhile other lanes read. This needs no steps of the engine.
"""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.interfaces import DirectLoad, DirectReader, Mover, PagedKVCache, PageList
from kvtier_core.transfer.movers import open_mover
from kvtier_core.transfer.own_shard import FrameRange, OwnShard
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, FrameRead, ReadStatus, StoredFrame
from kvtier_core.work.io_pool import IOPool, Outcome

#: Slots of a lane in host memory: few enough bytes to stay in the CPU's cache, enough to be worth a call.
_HOST_LANE_NBYTES = 4 << 20
_HOST_LANES = 2  #: one reads while the other verifies
#: Seconds for which `StagedReader.wait` sleeps at a time.
_POLL = 1e-3


class FrameSource(Protocol):
    """A worker's access to a store. Called on several threads at the same time."""

    def read(self, ranges: Sequence[FrameRange], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        """Read ``ranges[i]`` into ``into[i]``, which has the same length and is aligned to `FRAME_ALIGNMENT`.

        Returns for each the number of bytes read, fewer only if the store has no more, or the BackendError that
        prevents reading only this frame. Raises BackendError if the store as a whole cannot be read. Keeps no view.
        """

    def facts(self) -> Mapping[str, str]:
        """Effective values of settings that may differ from the requested ones."""

    def close(self) -> None:
        """Release everything. May be called twice; no read is under way."""


class Lane(Protocol):
    """Contiguous slots, each for the header and this rank's shard of a frame; see `OwnShard`."""

    slots: int
    mover: Mover  #: copies from them to the pages; only the lane's thread calls it, except for `mark`

    def read(self, frames: Sequence[StoredFrame]) -> list[FrameRead]:
        """On the lane's thread: read frames into the leading slots, and verify them.

        Raises BackendError if the store as a whole cannot be read, or the device fails.
        """

    def facts(self) -> Mapping[str, str]:
        """The memory that frames are read into, in plain words."""

    def close(self) -> None:
        """Release the memory and the mover. No read is under way."""


class HostLane:
    """A `Lane` in the host's memory."""

    def __init__(self, source: FrameSource, own: OwnShard, cache: PagedKVCache, why: str = ""):
        """``cache`` has the layout of the slots; ``why`` states why they are not in the GPU's memory."""
        self._source = source
        self._own = own
        self._why = why
        self._slot_nbytes = cache.layout.frame_nbytes
        self.slots = max(1, _HOST_LANE_NBYTES // self._slot_nbytes)
        self._memory = memoryview(mmap.mmap(-1, self.slots * self._slot_nbytes))
        self.mover = open_mover(cache, self._memory, self._slot_nbytes)

    def read(self, frames: Sequence[StoredFrame]) -> list[FrameRead]:
        begins = range(0, len(frames) * self._slot_nbytes, self._slot_nbytes)
        ranges = [*map(self._own.header, frames), *map(self._own.range, frames)]
        starts = [*begins, *(begin + FRAME_HEADER_NBYTES for begin in begins)]
        into = [self._memory[at : at + each.nbytes] for at, each in zip(starts, ranges, strict=True)]
        counts = self._source.read(ranges, into)
        headers = as_read(into[: len(frames)], counts[: len(frames)])
        shards = [self._memory[at : at + self._own.nbytes] for at in starts[len(frames) :]]
        found = zip(frames, headers, counts[len(frames) :], map(crc32, shards), strict=True)
        return [self._own.examine(*each) for each in found]

    def facts(self) -> Mapping[str, str]:
        return {"read into": f"the host's memory{self._why and f' ({self._why})'}"}

    def close(self) -> None:
        self.mover.close()


def host_lanes(source: FrameSource, own: OwnShard, cache: PagedKVCache, why: str = "") -> list[Lane]:
    """Lanes in host memory; for a GPU one, because each needs buffers on the device to copy through."""
    count = 1 if cache.device.startswith("cuda") else _HOST_LANES
    return [HostLane(source, own, cache, why) for _ in range(count)]


def as_read(into: Sequence[memoryview], counts: Sequence[int | BackendError]) -> list[memoryview | BackendError]:
    """The bytes read of each range, or the error."""
    return [
        count if isinstance(count, BackendError) else view[:count] for view, count in zip(into, counts, strict=True)
    ]


@attrs.define
class _Job:
    """A job under way."""

    left: int  #: pieces that have not ended
    ok: bool = True
    unread: dict[ChunkKey, FrameRead] = attrs.field(factory=dict)


@attrs.frozen
class _Piece:
    """Frames of a job that a lane loads together."""

    number: int
    job: int
    frames: Sequence[StoredFrame]
    pages: PageList
    after: object


class StagedReader(DirectReader):
    """Reads frames of ``source`` through lanes."""

    def __init__(
        self,
        source: FrameSource,
        cache: PagedKVCache,
        timeout: float,
        open_lanes: Callable[[FrameSource, OwnShard, PagedKVCache], Sequence[Lane]] = host_lanes,
    ):
        """A read that takes longer than ``timeout`` seconds fails, and so do all reads that wait behind it.

        Raises BackendError if the pages cannot be reached, or if ``open_lanes`` does; the source is then closed.
        """
        self._source = source
        self._timeout = timeout
        own = OwnShard.of(cache.layout, cache.rank)
        try:
            self._lanes = open_lanes(source, own, attrs.evolve(cache, layout=own.layout, rank=own.rank))
        except BaseException:
            source.close()
            raise
        self.movers = [lane.mover for lane in self._lanes]
        self._pools = [IOPool("direct-reads") for _ in self._lanes]
        self._turns = itertools.cycle(zip(self._lanes, self._pools, strict=True))
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._pieces: dict[int, _Piece] = {}  # that have not ended, by number
        # Pieces whose pages are not touched yet. A lane takes its piece from here before it copies, and `_give_up`
        # takes all of them when a read hangs. No piece is taken twice, because popping a key is atomic.
        self._unclaimed: dict[int, _Piece] = {}
        self._ended: list[DirectLoad] = []

    def facts(self) -> Mapping[str, str]:
        return {**self._source.facts(), **self._lanes[0].facts()}

    def mark(self) -> object:
        return self.movers[0].mark()

    def load(self, job: int, frames: Sequence[StoredFrame], pages: PageList, after: object = None) -> None:
        after = after or self.mark()
        step = min(lane.slots for lane in self._lanes)
        starts = range(0, len(frames), step)
        begun = self._jobs[job] = _Job(len(starts))
        for at in starts:
            piece = _Piece(next(self._numbers), job, frames[at : at + step], pages[at : at + step], after)
            self._pieces[piece.number] = self._unclaimed[piece.number] = piece
            lane, pool = next(self._turns)
            pool.submit_load(partial(self._carry_out, piece, begun, lane), partial(self._arrived, piece))

    def finished(self) -> Sequence[DirectLoad]:
        self._step()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        deadline = time.monotonic() + timeout
        self._step()
        while not self._jobs.keys().isdisjoint(jobs) and (left := deadline - time.monotonic()) > 0:
            busy = next(pool for pool in self._pools if pool.jobs)
            busy.wait(min(left, _POLL))
            self._step()

    def close(self) -> None:
        idle = [pool.close(self._timeout) for pool in self._pools]
        if all(idle):  # otherwise a thread still reads into the memory
            for lane in self._lanes:
                lane.close()
            self._source.close()

    def _carry_out(self, piece: _Piece, job: _Job, lane: Lane) -> tuple[list[FrameRead], bool]:
        """On the lane's thread: the outcome of each read, and whether the pages were filled."""
        if not job.ok:  # the engine computes all of its pages
            return [], False
        reads = lane.read(piece.frames)
        if any(read.status is not ReadStatus.VERIFIED for read in reads):
            return reads, False
        if self._unclaimed.pop(piece.number, None) is None:  # the engine was told that it failed
            return [], False
        lane.mover.load(piece.number, range(len(piece.frames)), piece.pages, piece.after)
        lane.mover.wait([piece.number])
        return reads, all(result.ok for result in lane.mover.finished())

    def _step(self) -> None:
        for pool in self._pools:
            pool.step()
        if max(pool.longest() for pool in self._pools) > self._timeout:
            self._give_up()

    def _arrived(self, piece: _Piece, outcome: Outcome) -> None:
        if piece.number not in self._pieces:  # it was given up
            return
        self._unclaimed.pop(piece.number, None)
        reads, filled = outcome.value or ([], False)
        if outcome.error is not None:
            why = f"{type(outcome.error).__name__}: {outcome.error}"
            reads = [FrameRead(ReadStatus.IO_ERROR, why)] * len(piece.frames)
        unread = {
            frame.key: read
            for frame, read in zip(piece.frames, reads, strict=False)
            if read.status is not ReadStatus.VERIFIED
        }
        self._end(piece, ok=filled, unread=unread)

    def _give_up(self) -> None:
        """A read hangs: it fails, and so do all waiting ones. Its slots are reused once it returns."""
        why = FrameRead(ReadStatus.IO_ERROR, f"a read took longer than {self._timeout:g}s")
        for piece in list(self._pieces.values()):
            if self._unclaimed.pop(piece.number, None) is not None:
                self._end(piece, ok=False, unread={frame.key: why for frame in piece.frames})

    def _end(self, piece: _Piece, *, ok: bool, unread: Mapping[ChunkKey, FrameRead]) -> None:
        del self._pieces[piece.number]
        job = self._jobs[piece.job]
        job.left -= 1
        job.ok = job.ok and ok
        job.unread.update(unread)
        if not job.left:
            del self._jobs[piece.job]
            self._ended.append(DirectLoad(piece.job, job.ok, job.unread))
