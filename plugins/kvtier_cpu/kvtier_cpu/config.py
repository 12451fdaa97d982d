"""What a user may say about a tier in memory."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Medium, Mover, OpenContext, PagedKVCache


@attrs.frozen
class CpuConfig(ArenaConfig):
    """Slots in memory that the engine's processes share."""

    type: ClassVar[str] = "cpu"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    medium: ClassVar[Medium] = Medium.HOST

    huge_pages: Literal["auto", "on", "off"] = "auto"  #: "on" refuses to open without them

    def open(self, ctx: OpenContext) -> AllocatorBackend:
        from kvtier_cpu.arena import CpuArena

        return CpuArena(self, ctx)

    def attach(self, handle: str, table: PagedKVCache) -> Mover:
        from kvtier_cpu.arena import attach

        return attach(handle, table)
