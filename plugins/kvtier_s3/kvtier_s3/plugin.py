"""Offers the store tier `s3`: objects in a bucket."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_s3.config import S3Config


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [S3Config]
