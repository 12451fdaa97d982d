"""The core's own plugin: what it offers, through the same hooks as all others."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.builtin.zstd import ZstdConfig
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import (
    ArenaConfig,
    BackendConfig,
    EvictionConfig,
    SerializerConfig,
    TokenDatabaseConfig,
)
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig


@hookimpl
def kvtier_backends() -> Iterable[type[ArenaConfig | BackendConfig]]:
    return [HeapConfig]


@hookimpl
def kvtier_eviction_policies() -> Iterable[type[EvictionConfig]]:
    return [GittinsConfig, LruConfig]


@hookimpl
def kvtier_token_databases() -> Iterable[type[TokenDatabaseConfig]]:
    return [ChainedConfig]


@hookimpl
def kvtier_serializers() -> Iterable[type[SerializerConfig]]:
    return [PackedConfig, RawConfig, ZstdConfig]
