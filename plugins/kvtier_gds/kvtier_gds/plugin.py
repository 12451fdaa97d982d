"""Offers the store tier `gds`: preallocated slabs on the NVMe drives of this machine."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_gds.config import GdsConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [GdsConfig]
