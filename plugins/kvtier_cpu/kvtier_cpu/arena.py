"""Numbered slots in one segment of shared memory."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import AllocatorBackend, Mover, OpenContext, PagedKVCache
from kvtier_core.transfer import cuda
from kvtier_core.transfer.host_mover import HostMover
from kvtier_core.types import Nbytes
from kvtier_cpu.config import CpuConfig
from kvtier_cpu.segment import Address, Segment, reach


class CpuArena(AllocatorBackend):
    def __init__(self, config: CpuConfig, ctx: OpenContext):
        self.slot_nbytes = ctx.layout.frame_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        if not self.slots:
            raise BackendError(
                f"cpu: capacity {ctx.capacity} has no room for a chunk of {Nbytes(self.slot_nbytes)}", retryable=False
            )
        self._config = config
        self._segment = Segment(self.slots * self.slot_nbytes, config.huge_pages)

    def view(self, slot: int) -> memoryview:
        return self._segment.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return json.dumps({**self._segment.address._asdict(), "slot_nbytes": self.slot_nbytes})

    def facts(self) -> Mapping[str, str]:
        return {"huge_pages": f"{self._config.huge_pages} -> {self._segment.pages}"}

    def close(self) -> None:
        self._segment.close()


def attach(handle: str, table: PagedKVCache) -> Mover:
    fields = json.loads(handle)
    slot_nbytes = fields.pop("slot_nbytes")
    memory = reach(Address(**fields))
    if table.device == "cpu":
        return HostMover(table, memory, slot_nbytes)
    return cuda.attach(table, memory, slot_nbytes)
