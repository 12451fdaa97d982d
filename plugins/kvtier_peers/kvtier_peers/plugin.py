"""Offers the store tier `peers`: frames in the memory of other engines, on this machine and on others."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_peers.config import PeersConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [PeersConfig]
