"""Why a tier cannot be opened on this machine, as far as that shows without opening anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import Medium
from kvtier_core.storekit.folder import folders, nearest
from kvtier_core.types import EnvSecret


def unsuitable(config: StackConfig, number: int) -> Iterator[Problem]:
    """Each problem of the tier with this number."""
    tier, path = config.tiers[number], config.path_of(number)
    used = {
        os.path.realpath(folder): config.path_of(other)
        for other in range(number)
        for folder in _on_disk(config.tiers[other])
    }
    for folder in _on_disk(tier):
        if not (there := nearest(folder)).is_dir():
            yield config.problem(path, f"{there} is not a folder", "name one")
        if other_path := used.get(os.path.realpath(folder)):
            yield config.problem(path, f"{folder} is also the folder of {other_path}", "give each its own path")
        used[os.path.realpath(folder)] = path
    if isinstance(tier, StoreTierConfig) and tier.config.read_only and tier.writes:
        yield config.problem(f"{path}.writes", "nothing is written to this tier", "remove it")
    if isinstance(tier, StoreTierConfig) and (tier.config.read_only or tier.config.of_peers) and not tier.config.shared:
        yield config.problem(path, "its plugin only reads it, yet calls it private", "report that to its authors")
    yield from unset_secrets(config, tier, path)


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError if there are any."""
    if found := list(problems):
        raise ConfigError(found)


def unset_secrets(config: StackConfig, settings: Any, path: str) -> Iterator[Problem]:
    """A problem for each secret that these settings name and the environment does not have."""
    for where, secret in _secrets(settings, path):
        if not os.environ.get(secret.variable):
            why = f"the environment variable {secret.variable} is not set"
            yield config.problem(where, why, "set it for the engine")


def _on_disk(tier: ArenaTierConfig | StoreTierConfig) -> list[Path]:
    return folders(tier) if tier.config.medium is Medium.DISK else []


def _secrets(settings: Any, path: str) -> Iterator[tuple[str, EnvSecret]]:
    """The path of each secret, and the secret."""
    if isinstance(settings, EnvSecret):
        yield path, settings
    elif attrs.has(type(settings)):
        for field in attrs.fields(type(settings)):
            own = isinstance(settings, ArenaTierConfig | StoreTierConfig) and field.name == "config"
            yield from _secrets(getattr(settings, field.name), path if own else f"{path}.{field.alias}")
    elif isinstance(settings, tuple):
        for number, each in enumerate(settings):
            yield from _secrets(each, f"{path}[{number}]")
