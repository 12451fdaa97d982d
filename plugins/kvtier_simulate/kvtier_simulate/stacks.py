"""Builds the stacks that a command line asks for, from its short notation of capacities and policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import attrs

from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig, WritesConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.scalars import Unavailable
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import EvictionConfig
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import Nbytes
from kvtier_simulate.dry_run import NullArenaConfig, NullBackendConfig
from kvtier_simulate.traces import Trace

#: Names of the tiers if no file gives them.
_NAMES = ("cpu", "disk", "remote")
_KIND = "eviction policy"
Packing = Literal["auto", "off"]


def read_capacities(text: str, trace: Trace, layout: ChunkLayout) -> tuple[Nbytes, ...]:
    """The capacity of each tier: `200GiB`, or `10%` of the trace's distinct chunks; `1%+10%` is two tiers.

    Raises ConfigError.
    """
    sizes = text.split("+")
    if len(sizes) > len(_NAMES):
        raise _wrong("--capacity", text, f"{len(sizes)} tiers; at most {len(_NAMES)} are possible without a file")
    return tuple(read_size(size.strip(), trace, layout) for size in sizes)


def read_size(text: str, trace: Trace, layout: ChunkLayout, option: str = "--capacity") -> Nbytes:
    """The capacity of one tier; a share is at least one chunk. Raises ConfigError, which names ``option``."""
    if share := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text):
        if not float(share[1]):
            raise _wrong(option, text, "a share must be more than 0%", "write 5%, for example")
        chunks = int(float(share[1]) * trace.distinct / 100)
        return Nbytes(max(1, chunks) * layout.frame_nbytes)
    try:
        return Nbytes.parse(text)
    except ValueError as error:
        raise _wrong(option, text, f"{error}; or a share of the trace's chunks, such as 5%") from error


def read_policies(text: str, tiers: int, registry: Registry) -> tuple[EvictionConfig, ...]:
    """The policy of each tier: `lru` is for all, `gittins+lru` names one for each. Raises ConfigError."""
    names = [name.strip() for name in text.split("+")]
    if len(names) not in (1, tiers):
        raise _wrong("--policy", text, f"{len(names)} policies for {_tiers(tiers)}")
    return tuple(_open_policy(name, registry) for name in (names if len(names) == tiers else names * tiers))


def _open_policy(name: str, registry: Registry) -> EvictionConfig:
    found = registry.choose(_KIND, name)
    if isinstance(found, Unavailable):
        raise _wrong("--policy", name, found.why, found.hint)
    try:
        config: EvictionConfig = found()
    except TypeError as error:
        raise _wrong("--policy", name, "it needs settings", "write them in a --config") from error
    return config


def all_policies(registry: Registry) -> list[str]:
    """The names of installed policies that need no settings."""
    names = sorted({offer.name for offer in registry.offers() if offer.kind == _KIND})
    return [name for name in names if _needs_nothing(registry.choose(_KIND, name))]


def _needs_nothing(config: type | Unavailable) -> bool:
    return isinstance(config, type) and all(
        field.default is not attrs.NOTHING for field in attrs.fields(config) if field.init
    )


def stack_of(
    capacities: Sequence[Nbytes],
    policies: Sequence[EvictionConfig],
    chunk_tokens: int,
    *,
    packing: Packing = "off",
    per_day: Nbytes | None = None,
) -> StackConfig:
    """An arena and store tiers below it, with these capacities and policies, for a dry run.

    ``per_day``: bytes that may be written to each store tier; None: no limit.
    """
    writes = None if per_day is None else WritesConfig(per_day)
    arena = ArenaTierConfig(_NAMES[0], NullArenaConfig(), capacities[0], policies[0], packing=packing)
    below = zip(_NAMES[1:], capacities[1:], policies[1:], strict=False)
    tiers = [
        StoreTierConfig(name, NullBackendConfig(), capacity, policy, writes=writes) for name, capacity, policy in below
    ]
    return StackConfig((arena, *tiers), chunk_tokens)


def with_policies(config: StackConfig, policies: Sequence[EvictionConfig]) -> StackConfig:
    """The same stack with another policy in each tier."""
    pairs = zip(config.tiers, policies, strict=True)
    return attrs.evolve(config, tiers=tuple(attrs.evolve(tier, eviction=policy) for tier, policy in pairs))


def _tiers(count: int) -> str:
    return "one tier" if count == 1 else f"{count} tiers"


def _wrong(option: str, text: str, why: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem(option, text, why, hint)])
