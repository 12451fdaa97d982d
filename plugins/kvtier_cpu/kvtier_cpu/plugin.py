"""Offers the arena `cpu`, in this node's memory."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_cpu.config import CpuConfig


@hookimpl
def kvtier_backends():
    return [CpuConfig]
