"""Keeps the KV cache of LLM engines in an ordered stack of tiers, each a plugin, and gives it back."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "BackendError": "errors",
    "ChunkKey": "types",
    "ChunkLayout": "types",
    "ConfigError": "errors",
    "ContractError": "errors",
    "Event": "types",
    "EventKind": "types",
    "KvtierError": "errors",
    "Namespace": "types",
    "Nbytes": "types",
    "OpenContext": "interfaces",
    "PluginError": "errors",
    "Presence": "types",
    "Problem": "errors",
    "Registry": "config.registry",
    "Seconds": "types",
    "Slot": "types",
    "StackConfig": "config.model",
    "StorageManager": "stack.manager",
    "Usage": "types",
    "load_config": "config.model",
    "open_stack": "config.model",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that importing one module loads no other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
