"""The settings of an S3 tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import attrs

from kvtier_core.types import Nbytes

#: Stores refuse parts of a multipart upload that are shorter, all but the last.
_SHORTEST_PART = Nbytes(5 << 20)
#: Names that need no quoting in a URL, so that a name is the same wherever it is written.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+/?")
_WORD = re.compile(r"[A-Za-z0-9:/_-]+")
_MOST_REQUESTS = 256


def _bucket_name(config: object, field: attrs.Attribute, name: str) -> None:
    if not _BUCKET.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid bucket name")


def _plain_name(config: object, field: attrs.Attribute, name: str) -> None:
    if not _PLAIN.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"{name!r} is not a valid prefix; write letters, digits, '-', '_', '.' and '/' between names")


def _plain_url(config: object, field: attrs.Attribute, url: str | None) -> None:
    if url is not None and not _ENDPOINT.fullmatch(url):
        raise ValueError("an endpoint must be https://HOST:PORT, without a path or a password")


def _one_word(config: object, field: attrs.Attribute, word: str | None) -> None:
    if word is not None and not _WORD.fullmatch(word):
        raise ValueError(f"{word!r} is not a valid {field.alias}")


def _long_enough(config: object, field: attrs.Attribute, nbytes: Nbytes) -> None:
    if nbytes < _SHORTEST_PART:
        raise ValueError(f"'{field.alias}' must be at least {_SHORTEST_PART}: stores refuse shorter parts")


@attrs.frozen
class S3Settings:
    """Where the bucket is and how it is used. Credentials come from where boto3 finds them, never from here."""

    bucket: str = attrs.field(validator=_bucket_name)  #: its name; the bucket must exist
    prefix: str = attrs.field(default="kvtier", validator=_plain_name)  #: of the names of all objects
    endpoint: str | None = attrs.field(default=None, validator=_plain_url)  #: of a store other than AWS
    #: By default that of the environment or the profile, or us-east-1.
    region: str | None = attrs.field(default=None, validator=_one_word)
    addressing: Literal["auto", "path", "virtual"] = "auto"  #: where the bucket is named: in the path, or in the host
    profile: str | None = None  #: in ~/.aws/config
    sse: Literal["none", "AES256", "aws:kms"] = "none"  #: encryption by the store, as requested with each write
    kms_key: str | None = attrs.field(default=None, validator=_one_word)  #: for ``aws:kms``; by default the bucket's
    ca: Path | None = None  #: certificates to trust, besides the system's
    part: Nbytes = attrs.field(default=Nbytes(8 << 20), validator=_long_enough)  #: longer frames are moved in parts
    #: In flight at a time, for each call; the tier makes up to ``threads`` calls at the same time.
    requests: int = attrs.field(default=32, validator=[attrs.validators.ge(1), attrs.validators.le(_MOST_REQUESTS)])
    #: Leave payloads out of the signature; ``auto``: where TLS protects them, or they do not leave this machine.
    unsigned: Literal["auto", "on", "off"] = "auto"
