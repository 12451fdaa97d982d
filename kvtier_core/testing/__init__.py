"""The conformance kit: how you prove that your plugin keeps the laws.

Subclass the suite of its kind, say what is under test, and let pytest collect it::

    class TestMyBackend(BackendLaws):
        persistent = True

        def config(self, folder):
            return MyConfig(path=folder)
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

for _module in (
    "arena_memory", "arenas", "attached", "backend_calls", "backend_frames", "backends", "histories", "laws",
    "policies", "serializers", "shared_backends", "token_databases",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

_ROOMS = {
    "ArenaLaws": "arenas",
    "BackendLaws": "backends",
    "Fault": "faults",
    "FaultyBackend": "faults",
    "Laws": "laws",
    "PolicyLaws": "policies",
    "SerializerLaws": "serializers",
    "SharedBackendLaws": "shared_backends",
    "TokenDatabaseLaws": "token_databases",
    "always": "faults",
    "every": "faults",
    "laws_of": "laws",
    "now_and_then": "faults",
}
__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:
    """Imported when asked for: the laws of arenas need no hypothesis."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
