"""The settings of a Mooncake tier."""

from __future__ import annotations

import re
from typing import Literal

import attrs

from kvtier_core.types import Nbytes

_MOST_REPLICAS = 16


def _check_address(config: object, field: attrs.Attribute, address: str) -> None:
    if (address or field.default) and not re.fullmatch(r"[^\s:/@]+:[0-9]{1,5}", address):
        raise ValueError("write host:port")


def _check_host(config: object, field: attrs.Attribute, host: str) -> None:
    if host and not re.fullmatch(r"[^\s:/@]+", host):
        raise ValueError("write a host name or an address, without a port")


def _check_devices(config: MooncakeSettings, field: attrs.Attribute, devices: tuple[str, ...]) -> None:
    if devices and config.protocol != "rdma":
        raise ValueError("devices need protocol: rdma")


def _check_prefix(config: object, field: attrs.Attribute, prefix: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._:/-]{1,200}", prefix):
        raise ValueError("a prefix may contain letters, digits and . _ : / -, at most 200")


@attrs.frozen
class MooncakeSettings:
    """Where the master is, and how frames are kept. Mooncake has no authentication, so there are no secrets."""

    #: The address of ``mooncake_master``: host:port.
    master: str = attrs.field(default="127.0.0.1:50051", validator=_check_address)
    #: The address of this machine, as other clients reach it; by default the one from which it reaches the master.
    host: str = attrs.field(default="", validator=_check_host)
    protocol: Literal["tcp", "rdma"] = "tcp"  #: that carries frames
    devices: tuple[str, ...] = attrs.field(default=(), converter=tuple, validator=_check_devices)  #: for ``rdma``
    segment: Nbytes = Nbytes(0)  #: memory of this machine that each engine lends to the store; gone when it ends
    prefix: str = attrs.field(default="kvtier", validator=_check_prefix)  #: of all keys in the store
    #: Copies of each frame, in segments of different clients.
    replicas: int = attrs.field(default=1, validator=[attrs.validators.ge(1), attrs.validators.le(_MOST_REPLICAS)])
    #: The client in whose segment frames are stored while there is room: host:port, as the master lists it.
    preferred_segment: str = attrs.field(default="", validator=_check_address)
    hard_pin: bool = False  #: the master never evicts frames of this tier: when the store is full, it accepts no more
