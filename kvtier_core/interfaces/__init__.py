"""The interfaces that a plugin implements.

    to write                                   implement
    a tier that stores frames (disk, remote)   BackendConfig, Backend; for further abilities the
                                               protocols Supports…, and DirectReader
    a tier of memory that a device reaches     ArenaConfig, AllocatorBackend, Mover; for `kvtier serve`
                                               SupportsSharing, SupportsKeeping
    an eviction policy                         EvictionConfig, EvictionPolicy
    an encoding of stored payloads             SerializerConfig, Serializer
    other names for chunks                     TokenDatabaseConfig, TokenDatabase
    a log, metrics                             ObserverConfig, Observer

A Config opens each of them: a frozen attrs class that names itself in ``type`` and whose fields are the keys that users
may write in YAML. The module of a Config imports nothing heavy; its ``open`` does. `kvtier_core.hookspecs` describes
how to register it, and `kvtier_testing` has the tests that every implementation must pass.

The owner's thread is the one that calls the stack; with vLLM it is the scheduler's. Calls on it must be short, because
the engine waits for them. Keys are opaque bytes. No method changes its arguments, other than buffers to fill.
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
    SupportsKeeping,
    SupportsSharing,
)
from kvtier_core.interfaces.context import KeyChanges, Medium, OpenContext, StoredFrames
from kvtier_core.interfaces.direct_reader import DirectLoad, DirectReader
from kvtier_core.interfaces.eviction import MAX_POLICY_STATE_NBYTES, EvictionConfig, EvictionPolicy, SupportsSparing
from kvtier_core.interfaces.observer import Observer, ObserverConfig
from kvtier_core.interfaces.serializer import Serializer, SerializerConfig
from kvtier_core.interfaces.store_tier import (
    Backend,
    BackendConfig,
    Stored,
    SupportsDirectReads,
    SupportsListing,
    SupportsNamespaces,
    SupportsTrial,
    SupportsWalk,
)
from kvtier_core.interfaces.token_database import TokenDatabase, TokenDatabaseConfig

__all__ = [
    "MAX_POLICY_STATE_NBYTES",
    "NO_BLOCK",
    "AllocatorBackend",
    "ArenaConfig",
    "Backend",
    "BackendConfig",
    "DirectLoad",
    "DirectReader",
    "EvictionConfig",
    "EvictionPolicy",
    "JobResult",
    "KeyChanges",
    "Medium",
    "Mover",
    "Observer",
    "ObserverConfig",
    "OpenContext",
    "PageList",
    "PageRun",
    "PagedKVCache",
    "Serializer",
    "SerializerConfig",
    "Stored",
    "StoredFrames",
    "SupportsDirectReads",
    "SupportsKeeping",
    "SupportsListing",
    "SupportsNamespaces",
    "SupportsSharing",
    "SupportsSparing",
    "SupportsTrial",
    "SupportsWalk",
    "TokenDatabase",
    "TokenDatabaseConfig",
]
