"""The words of kvtier as types: keys, namespaces, layouts, slots, sizes, events."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, NewType

import attrs

#: 32 opaque bytes that name a chunk; a digest chained over the whole prefix. Never parsed.
ChunkKey = NewType("ChunkKey", bytes)

KEY_NBYTES = 32
#: Frames, their headers and arena slots are multiples of this, so that O_DIRECT can move them.
FRAME_ALIGNMENT = 4096


class Presence(enum.Enum):
    MISS = "miss"
    READY = "ready"
    PENDING = "pending"  #: on its way: ask again after step()


class Slot(NamedTuple):
    """Room for one chunk: which arena of the stack, and its number there."""

    arena: int
    index: int


@attrs.frozen
class Namespace:
    """What makes the KV of two engines interchangeable, as named facts in plain words.

    Constant for a stack. Two namespaces with one differing fact never share a byte.
    """

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Namespace:
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())))

    @classmethod
    def from_json(cls, text: str | bytes) -> Namespace:
        """What `to_json` made. Raises ValueError for anything else."""
        facts = json.loads(text)
        if not isinstance(facts, dict) or not all(isinstance(fact, str) for fact in facts.values()):
            raise ValueError("not the facts of a namespace")
        return cls.of(facts)

    def to_json(self) -> str:
        """For people and for `from_json`."""
        return json.dumps(dict(self.facts), indent=1) + "\n"

    def differences(self, other: Namespace) -> list[tuple[str, str, str]]:
        """Facts that are not the same: the name, its value here and in ``other``, or an empty text."""
        here, there = dict(self.facts), dict(other.facts)
        return [
            (name, here.get(name, ""), there.get(name, ""))
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]

    def renewed(self) -> Namespace:
        """All these facts in another epoch, which shares nothing with this one or any other."""
        return Namespace.of({**dict(self.facts), "epoch": secrets.token_hex(16)})

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, the same on every machine."""
        plain = json.dumps(self.facts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(plain.encode(), digest_size=32, person=b"kvtier-ns").digest()


@attrs.frozen
class ChunkLayout:
    """Where the bytes of a chunk lie in its frame.

    A frame is a header page, then one shard per rank, then zeros up to a multiple of `FRAME_ALIGNMENT`.
    A shard is, layer after layer, the chunk's pages of that layer in token order.
    """

    page_nbytes: tuple[int, ...]  #: of one page of each layer, as one rank holds it
    blocks: int  #: pages of one layer in a chunk
    ranks: int = 1

    @cached_property
    def shard_nbytes(self) -> int:
        return sum(self.page_nbytes) * self.blocks

    @cached_property
    def payload_nbytes(self) -> int:
        return self.shard_nbytes * self.ranks

    @cached_property
    def frame_nbytes(self) -> int:
        """Bytes of a whole frame, and of the slot that holds it."""
        return FRAME_ALIGNMENT + -(-self.payload_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT

    def shard_offset(self, rank: int) -> int:
        """Of rank's shard, in bytes from the start of the frame."""
        return FRAME_ALIGNMENT + rank * self.shard_nbytes


class EventKind(enum.Enum):
    STORED = "stored"  #: an engine's chunk became READY in an arena
    PROMOTED = "promoted"  #: a chunk came up from a tier below, verified
    WRITTEN = "written"  #: a frame is whole in a tier below
    EVICTED = "evicted"
    REJECTED = "rejected"  #: a tier would not take a frame: no room, too much in flight, policy
    MISSING = "missing"  #: the index said yes, the store said no
    CORRUPT = "corrupt"  #: bytes that failed verification; never served
    IO_ERROR = "io_error"  #: a store raised
    BREAKER_OPEN = "breaker_open"  #: a breaker opened: the tier is left alone for a while
    BREAKER_CLOSED = "breaker_closed"


@attrs.frozen
class Event:
    """Something that happened to chunks of one tier."""

    kind: EventKind
    tier: str
    keys: tuple[ChunkKey, ...] = ()
    nbytes: int = 0
    why: str = ""


@attrs.frozen
class Usage:
    """What one level of a stack holds now."""

    tier: str
    chunks: int
    nbytes: int
    capacity: int
    pins: int = 0  #: of an arena
    inflight: int = 0  #: bytes on their way to or from a tier


_SIZE = re.compile(r"([0-9]+)\s*(B|KiB|MiB|GiB|TiB|PiB)")
_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min)")
_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


class Nbytes(int):
    """A number of bytes that is written with a binary unit: ``8GiB``."""

    @classmethod
    def parse(cls, text: str) -> Nbytes:
        """Raises ValueError for anything but a whole number and B, KiB, MiB, GiB, TiB or PiB."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB")
        return cls(int(match[1]) * _SIZE_UNITS[match[2]])

    def __str__(self) -> str:
        for unit, size in reversed(_SIZE_UNITS.items()):
            if self >= size and self % size == 0:
                return f"{int(self) // size}{unit}"
        return f"{int(self)}B"


class Seconds(float):
    """A length of time that is written with its unit: ``500ms``, ``2s``, ``1min``."""

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """Raises ValueError for anything but a number and ms, s or min."""
        match = _TIME.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a length of time; write a number and ms, s or min")
        return cls(float(match[1]) * _TIME_UNITS[match[2]])

    def __str__(self) -> str:
        return f"{float(self):.9f}".rstrip("0").rstrip(".") + "s"
