"""An arena in memory of this node, which the engine's workers map by its path in /proc."""

from __future__ import annotations

import mmap
import os
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Medium, Mover, OpenContext, PagedKVCache
from kvtier_core.transfer.host_mover import HostMover


@attrs.frozen
class ExampleArenaConfig(ArenaConfig):
    type: ClassVar[str] = "example-arena"  # what users write in YAML; further fields would be further keys
    medium: ClassVar[Medium] = Medium.HOST

    def open(self, ctx: OpenContext) -> AllocatorBackend:
        return ExampleArena(ctx)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        try:
            with open(handle, "r+b") as file:
                return HostMover(cache, mmap.mmap(file.fileno(), 0), cache.layout.frame_nbytes)
        except OSError as error:
            raise BackendError(f"example-arena: cannot reach {handle}: {error.strerror}") from error


class ExampleArena(AllocatorBackend):
    def __init__(self, ctx: OpenContext) -> None:
        self.slot_nbytes = ctx.slot_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        self._file = os.fdopen(os.memfd_create("kvtier-example-arena"), "r+b")
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.slots * self.slot_nbytes)
            self._memory = memoryview(mmap.mmap(self._file.fileno(), 0))
        except OSError as error:
            self._file.close()
            raise BackendError(f"example-arena: no memory for {self.slots} slots: {error.strerror}") from error

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def close(self) -> None:
        self._memory = memoryview(b"")  # the memory itself is freed with its last view or mover
        self._file.close()


@hookimpl
def kvtier_backends() -> list[type[ArenaConfig]]:
    return [ExampleArenaConfig]
