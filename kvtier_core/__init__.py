"""Keeps the KV cache of LLM engines in an ordered stack of tiers, each a plugin, and gives it back."""

from kvtier_core.config import StackConfig, load_config, open_stack
from kvtier_core.errors import BackendError, ConfigError, ContractError, KvtierError, PluginError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.manager import StorageManager
from kvtier_core.plugins import Registry
from kvtier_core.types import (
    ChunkKey,
    ChunkLayout,
    Event,
    EventKind,
    Namespace,
    Nbytes,
    Presence,
    Seconds,
    Slot,
    Usage,
)

__all__ = [
    "BackendError",
    "ChunkKey",
    "ChunkLayout",
    "ConfigError",
    "ContractError",
    "Event",
    "EventKind",
    "KvtierError",
    "Namespace",
    "Nbytes",
    "OpenContext",
    "PluginError",
    "Presence",
    "Problem",
    "Registry",
    "Seconds",
    "Slot",
    "StackConfig",
    "StorageManager",
    "Usage",
    "load_config",
    "open_stack",
]
