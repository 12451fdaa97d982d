"""The settings of a tier of peers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import attrs

from kvtier_core.types import EnvSecret, Seconds


class Address(NamedTuple):
    """The address at which a node shows its frames."""

    host: str  #: a name, or an address
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """An address that is written as ``host:port`` or ``[::1]:port``. Raises ValueError."""
        found = re.fullmatch(r"\[([0-9a-fA-F:]+)\]:([0-9]{1,5})|([^\s:/@\[\]]+):([0-9]{1,5})", text)
        if found is None or not 0 < int(found[2] or found[4]) < 1 << 16:
            raise ValueError(f"write an address as host:port, not {text!r}")
        return cls(found[1] or found[3], int(found[2] or found[4]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _check_address(config: object, field: attrs.Attribute, text: str) -> None:
    Address.of(text)


def _check_peers(config: object, field: attrs.Attribute, peers: tuple[str, ...]) -> None:
    for each in peers:
        Address.of(each)


def _check_tls(config: PeersSettings, field: attrs.Attribute, key: Path | None) -> None:
    if len({config.ca is None, config.cert is None, key is None}) > 1:
        raise ValueError("TLS needs 'ca', 'cert' and 'key'")


def _check_patience(config: object, field: attrs.Attribute, patience: float) -> None:
    if patience <= 0:
        raise ValueError("a peer needs more than 0s to answer")


@attrs.frozen
class PeersSettings:
    """Where the nodes are, and who may read their frames."""

    #: Address at which this engine shows its frames; each data parallel replica uses the next port. Beyond loopback
    #: only with a token or TLS.
    address: str = attrs.field(default="127.0.0.1:7710", alias="listen", validator=_check_address)
    #: Addresses at which other engines show theirs. A name is resolved again and again, and may have many addresses, as
    #: a headless service does. This engine's own address among them does no harm.
    peers: tuple[str, ...] = attrs.field(default=(), converter=tuple, validator=_check_peers)
    file: Path | None = None  #: more addresses, one per line; read again when it changes
    #: A secret that all peers know. With it they prove to each other who they are; it encrypts nothing. Without it and
    #: TLS, they prove on loopback that they belong to one account.
    token: EnvSecret | None = None
    ca: Path | None = None  #: with TLS: the authority that signed the certificates of all peers
    cert: Path | None = None  #: this node's certificate
    key: Path | None = attrs.field(default=None, validator=_check_tls)  #: of that certificate
    #: A peer that is silent for this long while it is asked or read from is left alone for a while.
    patience: Seconds = attrs.field(default=Seconds(0.5), validator=_check_patience)
