"""The stores of a file's tiers, as commands that list their frames see them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvtier_core.config.load import load_config
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Stored, SupportsWalk


def store_tier(file: str, name: str) -> StoreTierConfig:
    """The store tier of this name. Raises ConfigError, and BackendError if the file has none."""
    tiers = {tier.name: tier for tier in load_config(file, Registry.discover()).stores}
    if name not in tiers:
        raise BackendError(f"{file} has no tier {name!r} below its arenas; it has: {', '.join(tiers) or 'none'}")
    return tiers[name]


def walk(tier: StoreTierConfig) -> contextlib.AbstractContextManager[Iterator[Stored]]:
    """Everything in the store of a tier; see `SupportsWalk`. Raises BackendError."""
    if not isinstance(tier.config, SupportsWalk):
        raise BackendError(f"a tier of type {tier.config.type} cannot list its frames")
    return tier.config.walk()
