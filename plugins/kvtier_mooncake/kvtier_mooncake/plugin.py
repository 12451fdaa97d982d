"""Offers the store tier `mooncake`: frames that many engines share, in the memory of a cluster."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_mooncake.config import MooncakeConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [MooncakeConfig]
