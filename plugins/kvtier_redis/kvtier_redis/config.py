"""The config of a Redis tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext, Stored
from kvtier_core.types import Nbytes
from kvtier_redis.settings import RedisSettings


@attrs.frozen
class RedisConfig(RedisSettings, BackendConfig):
    """Frames in Redis or Valkey, 6.2 or newer: shared by all engines that name the same server and prefix."""

    type: ClassVar[str] = "redis"
    shared: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_redis.backend import RedisBackend

        return RedisBackend(self, ctx)

    def walk(self) -> AbstractContextManager[Iterator[Stored]]:
        from kvtier_redis.walk import everything

        return everything(self)

    def recount(self, capacity: Nbytes) -> None:
        from kvtier_redis.walk import recount

        recount(self)
