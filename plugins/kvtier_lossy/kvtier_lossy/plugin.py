"""Offers the lossy serializers: `fp8`, `int8`, `kivi` and `cachegen`."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import SerializerConfig
from kvtier_lossy.config import CachegenConfig, Fp8Config, Int8Config, KiviConfig


@hookimpl
def kvtier_serializers() -> list[type[SerializerConfig]]:
    return [Fp8Config, Int8Config, KiviConfig, CachegenConfig]
