"""An observer that serves metrics for Prometheus at its own address."""

from __future__ import annotations

import pathlib
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext

_PORTS = [attrs.validators.ge(0), attrs.validators.le(65535)]


def _either(config: PrometheusConfig, field: attrs.Attribute, socket: pathlib.Path | None) -> None:
    if socket is not None and (config.port or config.host != "127.0.0.1"):
        raise ValueError("'socket' excludes 'host' and 'port'; write one or the other")


@attrs.frozen
class PrometheusConfig(ObserverConfig):
    """The keys of ``type: prometheus``. No password protects the address."""

    type: ClassVar[str] = "prometheus"
    host: str = "127.0.0.1"  #: an address of this machine
    port: int = attrs.field(
        default=0, validator=_PORTS
    )  #: 0: any free port. Data parallel replicas take the ports after it
    #: A Unix socket instead, for its owner alone. Each data parallel replica has one: ``PATH.0``, ``PATH.1`` …
    socket: pathlib.Path | None = attrs.field(default=None, validator=_either)

    def open(self, ctx: OpenContext) -> Observer:
        """Begin to serve. Raises BackendError."""
        try:
            from kvtier_observers.endpoint import Endpoint
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'kvtier[prometheus]'") from error
        try:
            return Endpoint(ctx.replica, self._address(ctx), trial=ctx.checking)
        except OSError as error:
            raise BackendError(f"cannot serve metrics: {error}; choose another port or socket") from error

    def _address(self, ctx: OpenContext) -> tuple[str, int] | pathlib.Path:
        """The address at which this replica serves."""
        if self.socket is None:
            return self.host, self.port and self.port + ctx.replica
        return self.socket if ctx.replicas == 1 else pathlib.Path(f"{self.socket}.{ctx.replica}")
