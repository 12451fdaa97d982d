"""Offers the arena `cpu`, in this node's memory."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import ArenaConfig
from kvtier_cpu.config import CpuConfig


@hookimpl
def kvtier_backends() -> list[type[ArenaConfig]]:
    return [CpuConfig]
