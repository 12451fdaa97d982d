"""Checksums of stores and flags of packed shards, computed on the device: their places, and their verification."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.transfer.cuda.library import Device, Sums
from kvtier_core.work.io_pool import run

#: Maximum of jobs with checksums at a time, and of chunks of one of them: 256 KiB, on the device and page-locked.
_ROWS, ROW = 64, 1024
#: Maximum of chunks of a store of packed shards, each of which has a checksum and a flag.
MOST_PACKED = ROW // 2
_WORD = 4

logger = logging.getLogger("kvtier")


class SumsMemory:
    """Memory for the checksums and flags of jobs under way. Raises BackendError if the device has none."""

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
        """Places for ``count`` words until they are given back; None if there are none."""
        if count > ROW or not self._free:
            return None
        begin = self._free.pop() * ROW * _WORD
        return Sums(self._on_device + begin, self._told + begin, count)

    def give_back(self, sums: Sums) -> None:
        """The device no longer uses these places."""
        self._free.append((sums.told - self._told) // (ROW * _WORD))

    def close(self) -> None:
        """Free it. Called once, after all jobs have ended."""
        run(lambda: self._device.unlock(self._told))  # if the device is gone, nothing need be freed
        run(lambda: self._device.free(self._on_device))


class Told(NamedTuple):
    """The device's report of a job."""

    checksums: Sequence[int] = ()  #: of this rank's shards; empty if they are not trusted
    #: Packed shards only: the chunks of a store that did not fit; for a load, not empty if a shard was not packed.
    flagged: Sequence[int] = ()


@attrs.define(eq=False)
class StoreChecksums:
    """The checksums of the stores of the part ``name``: of this rank's shard in each slot.

    ``shard`` is the address of the shard in slot 0. The checksums of the first store, that of the self-test, are
    compared with the bytes that arrived. If they differ, stores report none, and sealing reads the frame. ``why_not``
    states why there are none from the start. ``packed`` shards are not copied without memory for flags.
    """

    _name: str
    _memory: SumsMemory | None
    _shard: int
    _nbytes: int
    _slot_nbytes: int
    _why_not: str
    packed: bool = attrs.field(default=False, kw_only=True)
    _compared: bool = attrs.field(default=False, init=False)

    def begin(self, slots: Sequence[int]) -> PendingChecksums | None:
        """For a staged store into these slots, of whole chunks unless they are packed; None if it reports nothing."""
        if not (self._memory and slots) or (self._why_not and not self.packed):
            return None
        sums = self._memory.take(2 * len(slots) if self.packed else len(slots))
        return PendingChecksums(self, self._memory, sums, slots) if sums else None

    def begin_load(self) -> PendingChecksums | None:
        """For a load of packed shards; None if there is no memory for its flag."""
        if not self._memory or not (sums := self._memory.take(1)):
            return None
        return PendingChecksums(self, self._memory, sums, ())

    def told(self, words: Sequence[int], slots: Sequence[int]) -> Told:
        """The report of a job, from what the device wrote."""
        flags = words[len(slots) :]
        flagged = [number for number, flag in enumerate(flags) if flag]
        return Told(self._believed(words[: len(slots)], slots), flagged)

    def _believed(self, told: Sequence[int], slots: Sequence[int]) -> Sequence[int]:
        if self._why_not:
            return ()
        if told and not self._compared:
            self._compared = True
            if (arrived := self._in_slot(slots[0])) != told[0]:
                self._why_not = f"the device computes {told[0]:#x} and the host {arrived:#x}"
                logger.warning("kvtier: checksums of %s: %s; the host computes them", self._name, self._why_not)
                return ()
        return told

    @property
    def fact(self) -> str:
        """The place where checksums are computed, in plain words."""
        return f"on the host ({self._why_not})" if self._why_not else "on the device"

    def _in_slot(self, slot: int) -> int:
        shard = (ctypes.c_char * self._nbytes).from_address(self._shard + slot * self._slot_nbytes)
        return crc32(memoryview(shard).cast("B"))


@attrs.frozen
class PendingChecksums:
    """The checksums and flags of a job under way."""

    _of: StoreChecksums
    _memory: SumsMemory
    sums: Sums  #: the places that the device writes to
    _slots: Sequence[int]  #: whose checksums are reported

    def end(self, *, ok: bool) -> Told:
        """The report of a job that the device has finished; empty if it failed."""
        words = self.sums.read()
        self._memory.give_back(self.sums)
        return self._of.told(words, self._slots) if ok else Told()
