"""Offers the store tier `disk`: files on a local disk, or in a folder that engines share."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_disk.config import DiskConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [DiskConfig]
