"""Numbered slots in one segment of shared memory."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import AllocatorBackend, Mover, OpenContext, PagedKVCache
from kvtier_core.transfer.movers import open_mover
from kvtier_core.types import Nbytes
from kvtier_cpu.placement import choose
from kvtier_cpu.segment import Address, Segment, reach


class CpuArena(AllocatorBackend):
    """As many slots as fit into the capacity; all of their memory is allocated when the arena is opened."""

    def __init__(self, ctx: OpenContext, huge_pages: str, numa: str):
        """``huge_pages`` is "auto", "on" or "off", ``numa`` "auto" or "off".

        Raises BackendError if the memory is not available.
        """
        self.slot_nbytes = ctx.slot_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        if not self.slots:
            chunk = Nbytes(self.slot_nbytes)
            raise BackendError(f"cpu: capacity {ctx.capacity} is smaller than one chunk ({chunk}); increase it")
        placement = choose(numa, ctx, self.slots)
        self.kept = ctx.keep is not None
        self._segment = Segment(placement, huge_pages, ctx.keep, checking=ctx.checking)
        self._facts = {
            "huge_pages": f"{huge_pages} -> {self._segment.pages}",
            "numa": f"{numa} -> {placement.effective}",
        }

    def view(self, slot: int) -> memoryview:
        return self._segment.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return json.dumps({**self._segment.address._asdict(), "slot_nbytes": self.slot_nbytes})

    @property
    def descriptor(self) -> int:
        return self._segment.address.fd

    def facts(self) -> Mapping[str, str]:
        return self._facts

    def close(self) -> None:
        self._segment.close()


def attach(handle: str, cache: PagedKVCache) -> Mover:
    """A mover between the engine's pages and the slots of the arena with this `CpuArena.handle`.

    Raises BackendError when the arena cannot be reached, or the device has no mover.
    """
    fields = json.loads(handle)
    slot_nbytes = fields.pop("slot_nbytes")
    on_gpu = cache.device.startswith("cuda")
    memory = reach(Address(**fields), populate=not on_gpu)  # for a GPU, page-locking maps them, in the background
    return open_mover(cache, memory, slot_nbytes)
