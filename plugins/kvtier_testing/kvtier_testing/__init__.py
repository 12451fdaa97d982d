"""The conformance kit: tests that show whether a plugin keeps the promises of its interface.

Each kind of plugin has a suite, whose tests are called laws. Subclass the suite, return your config, and let pytest
collect the class::

    class TestMyBackend(BackendLaws):
        persistent = True

        def config(self, folder):
            return MyConfig(path=folder)

==========================  ===========================================================================
`ArenaLaws`                 an `ArenaConfig`, its memory and its mover
`BackendLaws`               a `BackendConfig` whose store belongs to one engine at a time
`SharedBackendLaws`         a `BackendConfig` whose store several processes use at once (`shared = True`)
`ObserverLaws`              an `ObserverConfig`
`PolicyLaws`                an `EvictionConfig`
`SerializerLaws`            a `SerializerConfig`
`TokenDatabaseLaws`         a `TokenDatabaseConfig`
==========================  ===========================================================================

A law that fails says what is promised and what it saw. A law cannot be overridden; one that your plugin cannot keep is
excused, with a reason, and is then reported as skipped::

        excused = {"test_scan_finds_what_survived": "the store has no listing"}

Some laws need help to see a fault, for example a frame that cannot be read (`BackendLaws.spoil`), and are skipped
without it. What a process holds is read from Linux's /proc; elsewhere the laws about leaks are skipped.

`Proxy` stands between a tier and its real server, and delays, stalls, drops, truncates or garbles what passes.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ArenaLaws": "laws.arenas",
    "BackendLaws": "laws.backends",
    "Laws": "laws.base",
    "ObserverLaws": "laws.observers",
    "PolicyLaws": "laws.policies",
    "Proxy": "network",
    "SerializerLaws": "laws.serializers",
    "SharedBackendLaws": "laws.shared_backends",
    "TokenDatabaseLaws": "laws.token_databases",
    "Way": "network",
    "laws_of": "laws.base",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Imported when asked for: the laws of arenas need no hypothesis, and commands no pytest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
