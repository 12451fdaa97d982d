"""The settings of an arena in memory."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Medium, Mover, OpenContext, PagedKVCache


@attrs.frozen
class CpuConfig(ArenaConfig):
    """Slots in memory that the engine's processes share."""

    type: ClassVar[str] = "cpu"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    packs: ClassVar[tuple[str, ...]] = devices
    medium: ClassVar[Medium] = Medium.HOST

    huge_pages: Literal["auto", "on", "off"] = "auto"  #: "on": the arena does not open without them

    numa: Literal["auto", "off"] = "auto"  #: "auto" takes each rank's part of a slot from memory near its device

    def open(self, ctx: OpenContext) -> AllocatorBackend:
        from kvtier_cpu.arena import CpuArena

        return CpuArena(ctx, self.huge_pages, self.numa)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        from kvtier_cpu.arena import attach

        return attach(handle, cache)
