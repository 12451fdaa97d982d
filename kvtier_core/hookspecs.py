"""The hooks with which plugins register their Config classes. A plugin is an entry point in the group `GROUP`:

    [project.entry-points."kvtier.v1"]
    mine = "kvtier_mine.plugin"

and in that module, for example::

    from kvtier_core.hookspecs import hookimpl

    @hookimpl
    def kvtier_backends():
        return [MineConfig]

The module and its Configs import only the standard library and the dependencies of kvtier. Each hook returns a list of
Config classes. If two plugins use the same name, YAML must name the plugin too, as `kvtier plugins` shows it:
``type: disk@kvtier-disk:disk``.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from kvtier_core.interfaces import (
    ArenaConfig,
    BackendConfig,
    EvictionConfig,
    ObserverConfig,
    SerializerConfig,
    TokenDatabaseConfig,
)

#: The major version of the plugin interface is part of the group's name.
GROUP = "kvtier.v1"
#: Keys of a tier that belong to the core: no Config of a tier has a field of such a name. A key that the core got later
#: is not among them: where a Config has a field of its name, the tier has that one, and the core's default.
TIER_KEYS = "capacity encrypt eviction inflight seal_key serializer store_after threads timeout type"

hookspec = pluggy.HookspecMarker("kvtier")
hookimpl = pluggy.HookimplMarker("kvtier")


@hookspec
def kvtier_backends() -> Iterable[type[ArenaConfig | BackendConfig]]:
    """The arenas and store tiers that ``tiers[].type`` may name in YAML."""


@hookspec
def kvtier_eviction_policies() -> Iterable[type[EvictionConfig]]:
    """The Configs that ``tiers[].eviction`` may name, by `EvictionConfig.type` or one of its ``aliases``."""


@hookspec
def kvtier_token_databases() -> Iterable[type[TokenDatabaseConfig]]:
    """The Configs that ``token_database`` may name."""


@hookspec
def kvtier_serializers() -> Iterable[type[SerializerConfig]]:
    """The Configs that ``tiers[].serializer`` may name."""


@hookspec
def kvtier_observers() -> Iterable[type[ObserverConfig]]:
    """The Configs that ``observers[].type`` may name."""
