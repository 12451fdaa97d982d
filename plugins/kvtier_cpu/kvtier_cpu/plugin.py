"""Offers this node's memory to kvtier."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_cpu.config import CpuConfig


@hookimpl
def kvtier_backends():
    return [CpuConfig]
