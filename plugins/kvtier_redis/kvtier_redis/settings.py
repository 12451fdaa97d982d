"""The settings of a Redis tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import attrs

from kvtier_core.types import FRAME_ALIGNMENT, EnvSecret, Nbytes, Seconds

_URLS = "write redis://host:port/db, rediss://host:port/db for TLS, or unix:///path"
_MOST_PART = Nbytes(64 << 20)


def _check_url(config: object, field: attrs.Attribute, url: str) -> None:
    """No message repeats the url: there may be a password in it."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        raise ValueError(_URLS) from None
    if parts.password is not None:
        raise ValueError("the url must not contain a password; write password: env:NAME")
    if parts.username is not None:
        raise ValueError("the url must not contain a user; write username:")
    if parts.scheme == "unix":
        valid = len(parts.path) > 1 and not parts.netloc
    else:
        valid = parts.scheme in ("redis", "rediss") and has_port and bool(re.fullmatch(r"/?[0-9]{0,4}", parts.path))
    if not valid or parts.query or parts.fragment:
        raise ValueError(_URLS)


def _check_mode(config: RedisSettings, field: attrs.Attribute, mode: str) -> None:
    if mode == "sentinel" and not (config.sentinels and config.service):
        raise ValueError("mode: sentinel needs sentinels (host:port of each) and service (the name of the master)")
    if mode != "single" and config.url.startswith("unix:"):
        raise ValueError(f"mode: {mode} needs hosts and ports, but the url names a Unix socket")
    if mode == "cluster" and urlsplit(config.url).path.strip("/0"):
        raise ValueError("a cluster has only database 0; remove the number from the url")


def _check_sentinels(config: object, field: attrs.Attribute, sentinels: tuple[str, ...]) -> None:
    for each in sentinels:
        if not re.fullmatch(r"[^\s:/@]+:[0-9]{1,5}", each):
            raise ValueError("write each sentinel as host:port")


def _check_prefix(config: object, field: attrs.Attribute, prefix: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._:/-]+", prefix):
        raise ValueError("a prefix may contain letters, digits and . _ : / -")


def _check_part(config: object, field: attrs.Attribute, part: int) -> None:
    if not FRAME_ALIGNMENT <= part <= _MOST_PART:
        raise ValueError(f"a part must be from {Nbytes(FRAME_ALIGNMENT)} to {_MOST_PART}")


def _check_ttl(config: object, field: attrs.Attribute, ttl: float | None) -> None:
    if ttl is not None and ttl < 1:
        raise ValueError("frames must live for at least a second")


@attrs.frozen
class RedisSettings:
    """Where the servers are, and how frames are kept there."""

    #: The server; in a cluster one of its nodes; with sentinels only the scheme and the database count.
    url: str = attrs.field(default="redis://127.0.0.1:6379/0", validator=_check_url)
    #: The addresses of Sentinels, which know where the master is.
    sentinels: tuple[str, ...] = attrs.field(default=(), converter=tuple, validator=_check_sentinels)
    service: str = ""  #: the name that the sentinels know the master by
    #: The kind of server that ``url`` names.
    mode: Literal["single", "cluster", "sentinel"] = attrs.field(default="single", validator=_check_mode)
    username: str = ""  #: of the server's ACL; without one it is ``default``
    password: EnvSecret | None = None  #: of ``username``, or of the server
    ca: Path | None = None  #: the authority that signed the server's certificate, besides those that the system trusts
    cert: Path | None = None  #: of this client, if the server asks for one
    key: Path | None = None  #: of this client's certificate
    verify: bool = True  #: refuse a server whose certificate is for another host
    prefix: str = attrs.field(default="kvtier", validator=_check_prefix)  #: of all keys on the server
    ttl: Seconds | None = attrs.field(default=None, validator=_check_ttl)  #: a frame expires after this
    #: Frames are stored in values of this size. Above 8 MiB the server's allocator returns each to the system.
    part: Nbytes = attrs.field(default=Nbytes(1 << 20), validator=_check_part)
