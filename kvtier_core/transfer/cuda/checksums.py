"""Checksums of stores, computed on the device: where they go, and whether they are to be believed."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.transfer.cuda.library import Device, Sums
from kvtier_core.transfer.io_pool import run

#: Jobs that have checksums at a time, and chunks of such a job: 256 KiB, on the device and page-locked.
_ROWS, ROW = 64, 1024
_WORD = 4

logger = logging.getLogger("kvtier")


class SumsMemory:
    """Memory for the checksums of jobs under way. Raises BackendError if the device has none."""

    def __init__(self, device: Device):
        self._device = device
        self._memory = mmap.mmap(-1, _ROWS * ROW * _WORD)
        self._keep = ctypes.c_char.from_buffer(self._memory)
        self._told = ctypes.addressof(self._keep)
        self._on_device = device.allocate(len(self._memory))
        try:
            device.lock(self._told, len(self._memory))
        except BackendError:
            device.free(self._on_device)
            raise
        self._free = list(range(_ROWS))

    def take(self, count: int) -> Sums | None:
        """Places for so many checksums, until they are given back; None if there are none."""
        if count > ROW or not self._free:
            return None
        begin = self._free.pop() * ROW * _WORD
        return Sums(self._on_device + begin, self._told + begin, count)

    def give_back(self, sums: Sums) -> None:
        """The device has done with what `take` returned."""
        self._free.append((sums.told - self._told) // (ROW * _WORD))

    def close(self) -> None:
        """Free it. Called once, after all jobs have ended."""
        run(lambda: self._device.unlock(self._told))  # of a device that is gone nothing need be freed
        run(lambda: self._device.free(self._on_device))


class StoreChecksums:
    """The checksums of the stores of one part, called ``name``: of this rank's shard in each slot.

    ``shard`` is the address of that in slot 0. Those of the first store, which is that of the self-test, are compared
    with what has arrived. If they differ no store has any, and sealing reads the frame. ``why_not``: why there
    are none from the beginning.
    """

    def __init__(self, name: str, memory: SumsMemory | None, shard: int, nbytes: int, slot_nbytes: int, why_not: str):
        self._name = name
        self._memory = memory
        self._shard, self._nbytes, self._slot_nbytes = shard, nbytes, slot_nbytes
        self._why_not = why_not
        self._compared = False

    def begin(self, slots: Sequence[int]) -> PendingChecksums | None:
        """For a staged store of whole chunks in these slots; None if its checksums are not to be computed."""
        sums = self._memory.take(len(slots)) if self._memory and slots and not self._why_not else None
        return sums and PendingChecksums(self, sums, slots)

    def end(self, sums: Sums, slots: Sequence[int], *, ok: bool) -> Sequence[int]:
        """The checksums of a job that the device has done; none if it failed, or if they are not to be believed."""
        told = sums.read()
        self._memory.give_back(sums)
        if not ok or self._why_not:
            return ()
        if not self._compared:
            self._compared = True
            if (arrived := self._in_slot(slots[0])) != told[0]:
                self._why_not = f"the device computes {told[0]:#x} and the host {arrived:#x}"
                logger.warning("kvtier: checksums of %s: %s; the host computes them", self._name, self._why_not)
                return ()
        return told

    @property
    def fact(self) -> str:
        """Where they are computed, in plain words."""
        return f"on the host ({self._why_not})" if self._why_not else "on the device"

    def _in_slot(self, slot: int) -> int:
        shard = (ctypes.c_char * self._nbytes).from_address(self._shard + slot * self._slot_nbytes)
        return crc32(memoryview(shard).cast("B"))


@attrs.frozen
class PendingChecksums:
    """Those of a job under way."""

    _of: StoreChecksums
    sums: Sums  #: where they go
    _slots: Sequence[int]

    def end(self, *, ok: bool) -> Sequence[int]:
        """See `StoreChecksums.end`."""
        return self._of.end(self.sums, self._slots, ok=ok)
