"""Stores the KV cache of LLM engines in an ordered stack of tiers, each a plugin, and loads it again."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Type checkers and editors read these; `__getattr__` imports them.
# ruff: noqa: F401
if TYPE_CHECKING:
    from kvtier_core.config.load import load_config
    from kvtier_core.config.model import StackConfig
    from kvtier_core.config.open import open_stack
    from kvtier_core.config.registry import Registry
    from kvtier_core.errors import BackendError, ConfigError, ContractError, KvtierError, Problem
    from kvtier_core.interfaces import OpenContext
    from kvtier_core.layouts import ChunkLayout
    from kvtier_core.stack.manager import StorageManager
    from kvtier_core.types import ChunkKey, Event, EventKind, Namespace, Nbytes, Seconds, Slot, Usage

_NAMES_IN = {
    "config.load": "load_config",
    "config.model": "StackConfig",
    "config.open": "open_stack",
    "config.registry": "Registry",
    "errors": "BackendError ConfigError ContractError KvtierError Problem",
    "interfaces": "OpenContext",
    "layouts": "ChunkLayout",
    "stack.manager": "StorageManager",
    "types": "ChunkKey Event EventKind Namespace Nbytes Seconds Slot Usage",
}
_HOMES = {name: module for module, names in _NAMES_IN.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing one module loads no other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
