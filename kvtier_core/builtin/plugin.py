"""The core's own plugin: what it offers, through the same hooks as all others."""

from __future__ import annotations

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.builtin.zstd import ZstdConfig
from kvtier_core.hookspecs import hookimpl
from kvtier_core.observers.jsonl import JsonLinesConfig
from kvtier_core.observers.opentelemetry import OpenTelemetryConfig
from kvtier_core.observers.prometheus import PrometheusConfig
from kvtier_core.policies.arc import ArcConfig
from kvtier_core.policies.fifo import FifoConfig
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lfu import LfuConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.policies.lru2 import Lru2Config
from kvtier_core.policies.mru import MruConfig
from kvtier_core.policies.s3fifo import S3FifoConfig
from kvtier_core.policies.tournament import TournamentConfig


@hookimpl
def kvtier_backends():
    return [HeapConfig]


@hookimpl
def kvtier_eviction_policies():
    return [
        ArcConfig,
        FifoConfig,
        GittinsConfig,
        LfuConfig,
        Lru2Config,
        LruConfig,
        MruConfig,
        S3FifoConfig,
        TournamentConfig,
    ]


@hookimpl
def kvtier_token_databases():
    return [ChainedConfig]


@hookimpl
def kvtier_serializers():
    return [PackedConfig, RawConfig, ZstdConfig]


@hookimpl
def kvtier_observers():
    return [JsonLinesConfig, OpenTelemetryConfig, PrometheusConfig]
