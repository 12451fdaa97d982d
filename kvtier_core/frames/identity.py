"""The identity of a codec in a frame: its type, a digest of its options, and whether it is lossless.

And the identity of a keyed seal: its protection, and the id of its key.
"""

from __future__ import annotations

import enum
import hashlib
import json
import pathlib

import attrs

from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import SerializerConfig
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import Namespace

#: The name of a codec has at most this many bytes in UTF-8.
MAX_TYPE_NBYTES = 64

DIGEST_NBYTES = 32
KEY_ID_NBYTES = 16


@attrs.frozen
class CodecIdentity:
    """Identifies a codec. Frames with equal identities are decoded alike in every process and on every machine."""

    type: str  #: the name of the serializer, ``raw`` without one
    digest: bytes  #: `DIGEST_NBYTES` of the type, its format version and all of its options
    lossless: bool  #: is the decoded payload, bit for bit, the original one?

    def __str__(self) -> str:
        if self.digest in (RAW.digest, PACKED.digest):
            return self.type if self.lossless else f"{self.type} after a lossy codec"
        return f"{self.type} {self.digest.hex()[:8]}{'' if self.lossless else ', lossy'}"


#: Payloads without a serializer. No digest of options is zero, so no serializer has this identity.
RAW = CodecIdentity("raw", bytes(DIGEST_NBYTES), lossless=True)

#: Payloads of packed shards (csrc/packed.h), as they are in the slots of an arena that packs.
PACKED = CodecIdentity("packed shards", b"\2".ljust(DIGEST_NBYTES, b"\0"), lossless=True)


def codec_of_slots(layout: ChunkLayout) -> CodecIdentity:
    """The codec of frames in an arena's slots, and in tiers without a serializer."""
    return PACKED if layout.packed else RAW


def namespace_of_slots(namespace: Namespace, layout: ChunkLayout) -> Namespace:
    """The namespace of an engine's frames in slots: raw and packed ones have different namespaces."""
    return namespace_of_ranks(namespace, layout).narrowed("slots", PACKED.type) if layout.packed else namespace


def namespace_of_ranks(namespace: Namespace, layout: ChunkLayout) -> Namespace:
    """The namespace of frames for engines with exactly this number of ranks."""
    return namespace.narrowed("shards", str(layout.shards)) if layout.any_ranks else namespace


def lossy(codec: CodecIdentity) -> CodecIdentity:
    """The identity of slots whose payloads a lossy codec decoded. They are served, and never written to a store."""
    return attrs.evolve(codec, lossless=False)


class Protection(enum.Enum):
    """The kinds of protection by a keyed seal. The value is the flag in the header."""

    NONE = 0  #: no keyed seal
    FORGERY = 2  #: only holders of the key can make a frame; the payload is not encrypted
    READING = 4  #: the payload is encrypted as well


@attrs.frozen
class SealIdentity:
    """Identifies a keyed seal. The id distinguishes keys and reveals nothing about them."""

    protection: Protection
    key_id: bytes

    def __str__(self) -> str:
        how = {Protection.NONE: "none", Protection.FORGERY: "authenticated", Protection.READING: "encrypted"}
        return f"{how[self.protection]} {self.key_id.hex()}" if self != UNKEYED else "none"


#: The identity of frames without a keyed seal.
UNKEYED = SealIdentity(Protection.NONE, bytes(KEY_ID_NBYTES))


def identity_of(config: SerializerConfig, *, packed: bool = False) -> CodecIdentity:
    """The identity of the codec that ``config`` opens, below an arena that is ``packed`` or not.

    All fields of the config are part of it, because any of them may change the bytes. Raises ConfigError if the plugin
    omits a required attribute, or if a field's value cannot be compared between processes.
    """
    name, lossless, version = config.type, getattr(config, "lossless", None), config.format_version
    if not 0 < len(name.encode()) <= MAX_TYPE_NBYTES or "\0" in name:
        raise _unusable(f"the name {name!r} is not of 1 to {MAX_TYPE_NBYTES} bytes without a NUL")
    if type(lossless) is not bool:
        raise _unusable(f"{name} does not state whether it is lossless")
    if type(version) is not int:
        raise _unusable(f"the format version of {name} is not an int")
    what = [name, version, _fields(type(config), config)]
    if packed:  # its decoded checksum is that of packed shards
        what.append(PACKED.type)
    described = json.dumps(what, ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.blake2b(described.encode(), digest_size=DIGEST_NBYTES, person=b"kvtier-codec").digest()
    return CodecIdentity(name, digest, lossless)


def _fields(kind: type[attrs.AttrsInstance], options: object) -> list[object]:
    return [[field.name, _canonical(getattr(options, field.name), field.name)] for field in attrs.fields(kind)]


def _canonical(value: object, name: str) -> object:
    """The value as JSON. A value without a JSON type carries the name of its type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__name__, value.name]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, pathlib.PurePath):
        return ["path", str(value)]
    if isinstance(value, tuple | list):
        return ["list", [_canonical(each, name) for each in value]]
    kind = type(value)
    if attrs.has(kind):
        return ["group", getattr(value, "type", kind.__name__), _fields(kind, value)]
    raise _unusable(f"its option {name} is a {type(value).__name__}, which cannot be compared between processes")


def _unusable(why: str) -> ConfigError:
    return ConfigError([Problem("", "$", why)])
