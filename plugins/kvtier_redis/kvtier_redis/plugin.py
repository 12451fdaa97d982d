"""Offers the store tier `redis`: frames that many engines share, on Redis or Valkey."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_redis.config import RedisConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [RedisConfig]
