"""Memory of a worker into which frames of a store are read, and verified before a mover copies them to the pages.

It is the host's, or that of the worker's GPU, which then also computes the checksums: there the bytes of a frame reach
the pages without passing through the host.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from kvtier_core.engine.own_shard import OwnShard
from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.interfaces import Landing, Mover, PagedKVCache
from kvtier_core.stack.batches import as_many, leading
from kvtier_core.stack.outcomes import FrameRead, ReadStatus
from kvtier_core.transfer import cuda
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.transfer.io_pool import run_within
from kvtier_core.types import FRAME_HEADER_NBYTES, Extent, StoredFrame

#: Of the frames of a `Landing.samples` that are read to compare.
_COMPARED_NBYTES = 64 << 20
_ROUNDS = 2  #: the best counts


class LandedMemory(Protocol):
    """Slots side by side, each for the header and this rank's shard of a frame; see `OwnShard`."""

    mover: Mover  #: copies from them to the pages

    def read(self, frames: Sequence[StoredFrame], first: int) -> list[FrameRead]:
        """On a thread: read frames into the slots from ``first`` on, and verify them.

        Raises BackendError if the store as a whole cannot be read, or the device fails.
        """

    def facts(self) -> Mapping[str, str]:
        """Where frames are read to, in plain words."""

    def close(self) -> None:
        """Release the memory and the mover. No read is under way."""


def open_memory(landing: Landing, own: OwnShard, cache: PagedKVCache, slots: int, timeout: float) -> LandedMemory:
    """On the GPU if files can be read into its memory, else in the host's. ``cache`` is that of the slots.

    A read or a driver that does not answer for ``timeout`` seconds has failed. Raises BackendError if the pages cannot
    be reached, or if workers are not to read by themselves; then the landing is closed, unless a call to it hangs.
    """
    try:
        return _on_gpu_or_in_host(landing, own, cache, slots, timeout)
    except _Hangs:
        raise
    except BaseException:
        landing.close()
        raise


def _on_gpu_or_in_host(
    landing: Landing, own: OwnShard, cache: PagedKVCache, slots: int, timeout: float
) -> LandedMemory:
    try:
        memory = _OnGPU(landing, own, cache, slots, timeout)
    except BackendError as error:
        if landing.device_only:
            raise
        return _InHost(landing, own, cache, slots, str(error))
    if landing.device_only:
        memory.compare()
    return memory


class _Hangs(BackendError):
    """A call that did not return: memory and files that it may still use are neither freed nor closed."""


class _InHost:
    """A `LandedMemory` of the host."""

    def __init__(self, landing: Landing, own: OwnShard, cache: PagedKVCache, slots: int, why: str):
        """``why`` it is not the GPU's."""
        self._landing = landing
        self._own = own
        self._why = why
        self._slot_nbytes = cache.layout.frame_nbytes
        self._memory = memoryview(mmap.mmap(-1, slots * self._slot_nbytes))
        attach = cuda.attach if cache.device.startswith("cuda") else HostMover
        self.mover: Mover = attach(cache, self._memory, self._slot_nbytes)

    def read(self, frames: Sequence[StoredFrame], first: int) -> list[FrameRead]:
        begins = range(first * self._slot_nbytes, (first + len(frames)) * self._slot_nbytes, self._slot_nbytes)
        extents = [*map(self._own.header, frames), *map(self._own.extent, frames)]
        starts = [*begins, *(begin + FRAME_HEADER_NBYTES for begin in begins)]
        into = [self._memory[at : at + extent.nbytes] for at, extent in zip(starts, extents, strict=True)]
        counts = as_many(self._landing.read(extents, into), extents)
        headers = _as_read(into[: len(frames)], counts[: len(frames)])
        shards = [self._memory[at : at + self._own.nbytes] for at in starts[len(frames) :]]
        return _examined(self._own, frames, headers, counts[len(frames) :], map(crc32, shards))

    def facts(self) -> Mapping[str, str]:
        return {"read into": f"the host's memory ({self._why})"}

    def close(self) -> None:
        self.mover.close()


class _OnGPU:
    """A `LandedMemory` of the worker's GPU. Headers are read into the host's memory."""

    def __init__(self, landing: Landing, own: OwnShard, cache: PagedKVCache, slots: int, timeout: float):
        """Raises BackendError if that cannot be, or is not there within ``timeout`` seconds."""
        if not cache.device.startswith("cuda"):
            raise BackendError("the engine does not run on a GPU")
        self._landing = landing
        self._own = own
        self._timeout = timeout
        self._slot_nbytes = cache.layout.frame_nbytes
        self._slots = cuda.open_device_slots(cache, slots)
        self.mover: Mover = self._slots.mover
        self._compared = ""
        outcome = run_within(lambda: landing.reach_device(self._slots.memory), timeout)
        if outcome is None:
            raise _Hangs(f"the driver that reads files into it did not answer for {timeout:g}s")
        if outcome.error is not None:
            self.close()
            raise BackendError(str(outcome.error)) from outcome.error

    def read(self, frames: Sequence[StoredFrame], first: int) -> list[FrameRead]:
        headers = _read_headers(self._landing, [self._own.header(frame) for frame in frames])
        begins = range(first * self._slot_nbytes + FRAME_HEADER_NBYTES, self._slots.memory.nbytes, self._slot_nbytes)
        extents = [self._own.extent(frame) for frame in frames]
        into = [self._slots.memory.part(at, each.nbytes) for at, each in zip(begins, extents, strict=False)]
        counts = as_many(self._landing.read_to_device(extents, into), frames)
        checksums = self._slots.checksums(first, len(frames), FRAME_HEADER_NBYTES, self._own.nbytes)
        return _examined(self._own, frames, headers, counts, checksums)

    def compare(self) -> None:
        """Raises BackendError if reads into the host's memory are faster. Of too few frames nothing is measured."""
        if sum(extent.nbytes for extent in self._landing.samples) < _COMPARED_NBYTES:
            return
        outcome = run_within(self._speeds, self._timeout)
        if outcome is None:
            raise _Hangs(f"reads into its GPU and the host could not be compared within {self._timeout:g}s")
        on_gpu, in_host = outcome.value or (0.0, 0.0)
        self._compared = f"{on_gpu / 1e9:.1f} GB/s, and {in_host / 1e9:.1f} into the host's"
        if outcome.error is not None or on_gpu < in_host:
            why = outcome.error or f"slower: {self._compared}"
            self._landing.close()  # it knows the memory
            self.close()
            raise BackendError(f"reads into its GPU are not used: {why}")

    def facts(self) -> Mapping[str, str]:
        return {"read into": f"the GPU's memory{self._compared and f' ({self._compared})'}"}

    def close(self) -> None:
        self.mover.close()

    def _speeds(self) -> tuple[float, float]:
        """Bytes a second into the memory of the GPU and of the host, in turn."""
        extents = leading(self._landing.samples, min(_COMPARED_NBYTES, self._slots.memory.nbytes), _nbytes_of)
        ends = list(accumulate(map(_nbytes_of, extents), initial=0))
        host = memoryview(mmap.mmap(-1, ends[-1]))
        places = list(pairwise(ends))
        on_gpu = [self._slots.memory.part(begin, end - begin) for begin, end in places]
        in_host = [host[begin:end] for begin, end in places]
        seconds = [
            (_seconds(self._landing.read_to_device, extents, on_gpu), _seconds(self._landing.read, extents, in_host))
            for _ in range(_ROUNDS)
        ]
        to_gpu, to_host = (ends[-1] / min(each) for each in zip(*seconds, strict=True))
        return to_gpu, to_host


def _read_headers(landing: Landing, extents: Sequence[Extent]) -> list[memoryview | BackendError]:
    memory = memoryview(mmap.mmap(-1, len(extents) * FRAME_HEADER_NBYTES))
    begins = range(0, len(memory), FRAME_HEADER_NBYTES)
    into = [memory[at : at + extent.nbytes] for at, extent in zip(begins, extents, strict=True)]
    return _as_read(into, landing.read(extents, into))


def _as_read(into: Sequence[memoryview], counts: Sequence[int | BackendError]) -> list[memoryview | BackendError]:
    return [
        count if isinstance(count, BackendError) else view[:count] for view, count in zip(into, counts, strict=True)
    ]


def _examined(
    own: OwnShard,
    frames: Sequence[StoredFrame],
    headers: Sequence[memoryview | BackendError],
    counts: Sequence[int | BackendError],
    checksums: Iterable[int],
) -> list[FrameRead]:
    """What became of each frame, from its header, the bytes read of its shard, and their checksum."""
    return [
        FrameRead(ReadStatus.CORRUPT, str(error))
        if (error := next((each for each in (header, count) if isinstance(each, BackendError)), None))
        else own.examine(frame, header, count, checksum)
        for frame, header, count, checksum in zip(frames, headers, counts, checksums, strict=True)
    ]


def _nbytes_of(extent: Extent) -> int:
    return extent.nbytes


def _seconds(read: Callable[..., Sequence[int | BackendError]], extents: Sequence[Extent], into: Sequence) -> float:
    begun = time.monotonic()
    counts = read(extents, into)
    if list(counts) != [extent.nbytes for extent in extents]:
        raise BackendError("frames that exist cannot be read")
    return time.monotonic() - begun
