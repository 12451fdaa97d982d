"""The whole extension surface. Offer plugins through the entry point group `GROUP`.

    [project.entry-points."kvtier.v1"]
    mine = "kvtier_mine.plugin"

and in that module, for instance::

    @hookimpl
    def kvtier_backends():
        return [MineConfig]

The module, and the configs it names, import nothing outside the dependencies of kvtier itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pluggy

from kvtier_core.interfaces import (
    ArenaConfig,
    BackendConfig,
    EvictionConfig,
    SerializerConfig,
    TokenDatabaseConfig,
)
from kvtier_core.types import Event

#: The major version of the plugin interface is part of the group's name.
GROUP = "kvtier.v1"

hookspec = pluggy.HookspecMarker("kvtier")
hookimpl = pluggy.HookimplMarker("kvtier")


@hookspec
def kvtier_backends() -> Iterable[type[ArenaConfig | BackendConfig]]:
    """Tiers, both kinds: their names share one namespace, ``tiers[].type`` in YAML."""


@hookspec
def kvtier_eviction_policies() -> Iterable[type[EvictionConfig]]:
    """What ``tiers[].eviction`` may name."""


@hookspec
def kvtier_token_databases() -> Iterable[type[TokenDatabaseConfig]]:
    """What ``token_database`` may name."""


@hookspec
def kvtier_serializers() -> Iterable[type[SerializerConfig]]:
    """What ``tiers[].serializer`` may name."""


@hookspec
def kvtier_observe(events: Sequence[Event]) -> None:
    """Called on the owner's thread after each step that had events. Must not block."""
