"""An arena for tests and examples: memory that only the process that opened it can reach."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from typing import ClassVar
from weakref import WeakValueDictionary

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Medium, Mover, OpenContext, PagedKVCache
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import Nbytes

_OPEN: WeakValueDictionary[str, Heap] = WeakValueDictionary()


@attrs.frozen
class HeapConfig(ArenaConfig):
    """Slots in the memory of one process."""

    type: ClassVar[str] = "heap"
    packs: ClassVar[tuple[str, ...]] = ("cpu",)
    medium: ClassVar[Medium] = Medium.HOST

    def open(self, ctx: OpenContext) -> Heap:
        return Heap(ctx)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        heap = _OPEN.get(handle)
        if heap is None or json.loads(handle)["pid"] != os.getpid():
            raise BackendError(f"heap {handle} is not open in process {os.getpid()}")
        return HostMover(cache, heap.memory, heap.slot_nbytes)


class Heap(AllocatorBackend):
    """Anonymous memory, with as many slots as fit into the capacity."""

    def __init__(self, ctx: OpenContext):
        self.slot_nbytes = ctx.slot_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        if not self.slots:
            chunk = Nbytes(self.slot_nbytes)
            raise BackendError(f"heap: capacity {ctx.capacity} is smaller than one chunk ({chunk}); increase it")
        try:
            self.memory = memoryview(mmap.mmap(-1, self.slots * self.slot_nbytes))
        except OSError as error:
            raise BackendError(f"heap: cannot allocate {ctx.capacity} of memory: {error.strerror}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._handle = json.dumps({"pid": os.getpid(), "address": address, "slots": self.slots})
        _OPEN[self._handle] = self

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return self._handle

    def close(self) -> None:
        """The memory itself is freed with its last view or mover."""
        _OPEN.pop(self._handle, None)
        self.memory = memoryview(b"")
