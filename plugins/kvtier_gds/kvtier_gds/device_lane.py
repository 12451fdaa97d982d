"""Slots in the memory of a worker's GPU, into which frames are read without passing through host memory.

The GPU computes the checksums of payloads, the host verifies headers, and a kernel copies from the slots to the pages.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Mover, PagedKVCache
from kvtier_core.storekit.files import bounce
from kvtier_core.transfer.own_shard import FrameRange, OwnShard
from kvtier_core.transfer.staged_reader import as_read
from kvtier_core.types import FRAME_HEADER_NBYTES, FrameRead, StoredFrame
from kvtier_core.work.io_pool import run_within
from kvtier_gds.device_reads import DeviceMemory, DeviceReads
from kvtier_gds.slab import Extent
from kvtier_gds.slab_files import SlabFiles

#: Of the slots: as much as a drive delivers in 10 ms; compared with that, the pauses between two reads are short.
_NBYTES = 64 << 20
#: Of the samples that compare the two ways of reading: as many as the slots hold.
_COMPARED_NBYTES = _NBYTES
_ROUNDS = 2  #: the best counts


class DeviceLane:
    """A `Lane` on the worker's GPU. Headers are read into the host's memory."""

    def __init__(self, files: SlabFiles, own: OwnShard, cache: PagedKVCache, timeout: float):
        """Raises BackendError if such a lane is impossible, or not ready within ``timeout`` seconds."""
        if not cache.device.startswith("cuda"):
            raise BackendError("the engine does not run on a GPU")
        self._files = files
        self._own = own
        self._timeout = timeout
        self._slot_nbytes = cache.layout.frame_nbytes
        self.slots = max(1, _NBYTES // self._slot_nbytes)
        from kvtier_core.transfer.cuda import device_slots  # imports torch

        self._device = device_slots.DeviceSlots(cache, self.slots)
        self._memory = DeviceMemory(self._device.ordinal, self._device.address, self.slots * self._slot_nbytes)
        self.mover: Mover = self._device.mover
        self._compared = ""
        outcome = run_within(lambda: DeviceReads(files.fds, self._memory), timeout)
        if outcome is None:
            files.leave_open()
            raise BackendError(f"the driver for reads into its GPU did not answer within {timeout:g}s")
        if outcome.error is not None:
            self.mover.close()
            raise BackendError(str(outcome.error)) from outcome.error
        self._reads: DeviceReads = outcome.value

    def read(self, frames: Sequence[StoredFrame]) -> list[FrameRead]:
        headers = self._read_headers([self._own.header(frame) for frame in frames])
        begins = range(FRAME_HEADER_NBYTES, self._memory.nbytes, self._slot_nbytes)
        extents = [Extent.of(self._own.range(frame)) for frame in frames]
        into = [self._memory.part(at, each.nbytes) for at, each in zip(begins, extents, strict=False)]
        counts = self._read_payloads(extents, into)
        checksums = self._device.checksums(0, len(frames), FRAME_HEADER_NBYTES, self._own.nbytes)
        return [self._own.examine(*each) for each in zip(frames, headers, counts, checksums, strict=True)]

    def compare(self, samples: Sequence[Extent]) -> None:
        """Raises BackendError if reads into the host's memory are faster. Too few frames are not measured."""
        if sum(extent.nbytes for extent in samples) < _COMPARED_NBYTES:
            return
        outcome = run_within(lambda: self._speeds(samples), self._timeout)
        if outcome is None:
            self._files.leave_open()
            raise BackendError(f"reads into its GPU and the host could not be compared within {self._timeout:g}s")
        on_gpu, in_host = outcome.value or (0.0, 0.0)
        self._compared = f"{on_gpu / 1e9:.1f} GB/s, against {in_host / 1e9:.1f} into the host's"
        if outcome.error is not None or on_gpu < in_host:
            why = outcome.error or f"slower: {self._compared}"
            self.close()
            raise BackendError(f"reads into its GPU are not used: {why}")

    def facts(self) -> Mapping[str, str]:
        return {"read into": f"the GPU's memory{self._compared and f' ({self._compared})'}"}

    def close(self) -> None:
        self._reads.close()  # it has the memory registered
        self.mover.close()

    def _read_headers(self, ranges: Sequence[FrameRange]) -> list[memoryview | BackendError]:
        memory = memoryview(mmap.mmap(-1, len(ranges) * FRAME_HEADER_NBYTES))
        begins = range(0, len(memory), FRAME_HEADER_NBYTES)
        into = [memory[at : at + each.nbytes] for at, each in zip(begins, ranges, strict=True)]
        return as_read(into, self._files.read(ranges, into))

    def _read_payloads(self, extents: Sequence[Extent], into: Sequence[DeviceMemory]) -> list[int | BackendError]:
        """As `SlabFiles.read_extents`, into the GPU's memory. The bytes are there when this returns."""
        outcomes = self._reads.read(extents, into)
        self._files.must_be_ours()
        return [
            self._read_aside(extent, outcome.error) if outcome.error else outcome.value
            for extent, outcome in zip(extents, outcomes, strict=True)
        ]

    def _read_aside(self, extent: Extent, error: BaseException) -> int | BackendError:
        """The outcome for a frame that could not be read into the GPU: that of a read into the host's memory.

        Raises BackendError if that reads all of it: then the frame is good, and the way into the GPU is not.
        """
        (count,) = self._files.read_extents([extent], [bounce(extent.nbytes)])
        if count == extent.nbytes:
            raise BackendError(f"KvikIO cannot read what the host can: {error}") from error
        return count

    def _speeds(self, samples: Sequence[Extent]) -> tuple[float, float]:
        """Bytes per second into the GPU's memory and into the host's, measured in turn."""
        room = min(_COMPARED_NBYTES, self._memory.nbytes)
        ends = [0, *accumulate(each.nbytes for each in samples)]
        ends = [end for end in ends if end <= room]
        extents = samples[: len(ends) - 1]
        host = memoryview(mmap.mmap(-1, ends[-1]))
        places = list(pairwise(ends))
        on_gpu = [self._memory.part(begin, end - begin) for begin, end in places]
        in_host = [host[begin:end] for begin, end in places]
        seconds = [
            (_seconds(self._read_payloads, extents, on_gpu), _seconds(self._files.read_extents, extents, in_host))
            for _ in range(_ROUNDS)
        ]
        to_gpu, to_host = (ends[-1] / min(each) for each in zip(*seconds, strict=True))
        return to_gpu, to_host


def _seconds(read: Callable[..., Sequence[int | BackendError]], extents: Sequence[Extent], into: Sequence) -> float:
    begun = time.monotonic()
    counts = read(extents, into)
    if list(counts) != [extent.nbytes for extent in extents]:
        raise BackendError("existing frames cannot be read")
    return time.monotonic() - begun
