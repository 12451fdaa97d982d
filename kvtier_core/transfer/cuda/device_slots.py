"""Slots in a device's memory: frames are read into them, and checksums and copies to the pages are made there."""

from __future__ import annotations

import contextlib
import functools
from itertools import chain
from typing import Any

import attrs
import torch

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import PagedKVCache
from kvtier_core.layouts import Part
from kvtier_core.transfer.cuda.autotune import Choice
from kvtier_core.transfer.cuda.checksums import ROW, StoreChecksums, SumsMemory
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.library import Device, Direction, Method, load, new_stream
from kvtier_core.transfer.cuda.mover import ArenaSlots, DeviceMover
from kvtier_core.transfer.page_lists import check_cache, layers_of


@attrs.define
class _OnDevice:
    """Memory of the device, which need not be page-locked."""

    base: int
    end: int
    stride: int = 0

    def facts(self) -> dict[str, str]:
        return {}


class DeviceSlots:
    """``count`` slots on the device of ``cache``. All methods but `checksums` are called on the engine's thread.

    Raises BackendError if kvtier's CUDA library has no kernels for the device, the engine left too little memory, or
    shards are packed.
    """

    def __init__(self, cache: PagedKVCache, count: int, *, device: Device | None = None, engine: Any = torch.cuda):
        if cache.layout.packed:
            raise BackendError("frames cannot be unpacked in the GPU's memory yet")
        nbytes = cache.layout.frame_nbytes
        check_cache(cache, nbytes)
        on = torch.device(cache.device)
        self._device = device = device or load().device(on.index or 0)
        if not device.abilities.kernels:
            raise BackendError(f"the GPU has no kernels: {device.no_kernels}")
        with contextlib.ExitStack() as undo:
            address = device.allocate(count * nbytes)
            undo.callback(device.free, address)
            self.ordinal = on.index or 0  #: of the GPU in this process
            self.address = address  #: of the first slot; the others follow
            self._nbytes = nbytes
            self._sums = SumsMemory(device)
            undo.callback(self._sums.close)
            self._new_stream = functools.partial(new_stream, engine, on)
            self._idle: list[Any] = []  # streams for checksums, one for each thread that computes them
            slots = ArenaSlots(address, count, nbytes, _OnDevice(address, address + count * nbytes))
            copiers = [self._copier(cache, part, slots, undo) for part in cache.layout.parts]
            stores, loads = (Direction(self._new_stream(), self._new_stream()) for _ in range(2))
            self.mover = DeviceMover(cache, slots, copiers, engine, stores, loads, undo.pop_all().close)

    def checksums(self, first: int, count: int, offset: int, nbytes: int) -> tuple[int, ...]:
        """The CRC-32 of ``nbytes`` from ``offset`` on in each of ``count`` slots from ``first`` on.

        Waits for the device. Any thread may call. Raises BackendError.
        """
        rows = (range(first, first + count)[at : at + ROW] for at in range(0, count, ROW))
        return tuple(chain.from_iterable(self._row(row.start, len(row), offset, nbytes) for row in rows))

    def _row(self, first: int, count: int, offset: int, nbytes: int) -> tuple[int, ...]:
        """As `checksums`, of at most `ROW` slots."""
        sums = self._sums.take(count)
        if sums is None:
            raise BackendError("no memory left for checksums")
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = self._new_stream()
        address = self.address + first * self._nbytes + offset
        self._device.checksums(address, nbytes, sums, stream, self._nbytes)
        stream.synchronize()
        checksums = sums.read()
        # Not after a failure: the device may still write there.
        self._sums.give_back(sums)
        self._idle.append(stream)
        return checksums

    def _copier(self, cache: PagedKVCache, part: Part, slots: ArenaSlots, undo: contextlib.ExitStack) -> Copier:
        shards = slots.address + part.shard_of(cache.rank).offset
        native = self._device.part(list(layers_of(cache, part)), shards, slots.nbytes, slots.locked.base, 0)
        undo.callback(native.close)
        name = ", ".join(cache.layout.groups[group].name for group in part.groups)
        none = StoreChecksums(name, None, shards, 0, slots.nbytes, "the slots lie on the device")
        return Copier(name, native, Choice(Method.KERNEL), Choice(Method.KERNEL), none)
