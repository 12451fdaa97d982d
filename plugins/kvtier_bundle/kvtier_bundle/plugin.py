"""Offers the store tier `bundle`: the frames in a file that `kvtier export` wrote."""

from __future__ import annotations

from kvtier_bundle.config import BundleConfig
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [BundleConfig]
