"""The eviction policies that the package offers."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import EvictionConfig
from kvtier_policies.arc import ArcConfig
from kvtier_policies.fifo import FifoConfig
from kvtier_policies.lfu import LfuConfig
from kvtier_policies.lru2 import Lru2Config
from kvtier_policies.mru import MruConfig
from kvtier_policies.s3fifo import S3FifoConfig
from kvtier_policies.tournament import TournamentConfig


@hookimpl
def kvtier_eviction_policies() -> list[type[EvictionConfig]]:
    return [ArcConfig, FifoConfig, LfuConfig, Lru2Config, MruConfig, S3FifoConfig, TournamentConfig]
