"""What a plugin implements. Each heavy thing has a light, frozen Config that opens it.

A Config is an attrs class that names itself in ``type`` and whose fields are the keys a user may write
in YAML. It imports nothing heavy; its ``open`` does. See `kvtier_core.hookspecs` for how to offer it.
"""

from kvtier_core.interfaces.arena import (
    NO_BLOCK,
    AllocatorBackend,
    ArenaConfig,
    JobResult,
    Mover,
    PagedKVCache,
    PageList,
    PageRun,
)
from kvtier_core.interfaces.context import Medium, OpenContext
from kvtier_core.interfaces.eviction import MAX_POLICY_STATE_NBYTES, EvictionConfig, EvictionPolicy
from kvtier_core.interfaces.serializer import Serializer, SerializerConfig
from kvtier_core.interfaces.store_tier import Backend, BackendConfig, Stored
from kvtier_core.interfaces.token_database import TokenDatabase, TokenDatabaseConfig

__all__ = [
    "MAX_POLICY_STATE_NBYTES",
    "NO_BLOCK",
    "AllocatorBackend",
    "ArenaConfig",
    "Backend",
    "BackendConfig",
    "EvictionConfig",
    "EvictionPolicy",
    "JobResult",
    "Medium",
    "Mover",
    "OpenContext",
    "PageList",
    "PageRun",
    "PagedKVCache",
    "Serializer",
    "SerializerConfig",
    "Stored",
    "TokenDatabase",
    "TokenDatabaseConfig",
]
