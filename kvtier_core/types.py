"""The vocabulary of kvtier as types: keys, namespaces, slots, events, sizes and times."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple, NewType

import attrs

from kvtier_core.errors import BackendError

#: Opaque bytes that name a chunk. A key depends on the namespace, the chunk's tokens and all tokens before them, so
#: equal keys mean interchangeable KV. Nothing parses it.
ChunkKey = NewType("ChunkKey", bytes)

#: Bytes of a key.
KEY_NBYTES = 32
#: In bytes. Frames, their headers and arena slots are multiples of it, so that O_DIRECT can move them.
FRAME_ALIGNMENT = 4096
FRAME_HEADER_NBYTES = FRAME_ALIGNMENT  #: bytes of a frame before its payload

#: The first bytes of every frame of every format version.
FRAME_MAGIC = b"kvtier\r\n"


#: The fact that distinguishes an engine's namespace from the one before its weights may have changed.
EPOCH = "epoch"


class Slot(NamedTuple):
    """Space for one frame in an arena."""

    arena: int  #: number of the arena in the stack, from 0
    index: int  # type: ignore[assignment]  #: number of the slot in the arena, from 0; hides a method of tuples


class Location(NamedTuple):
    """The place where a store keeps a frame."""

    #: Integers of at most 64 bits, text and bytes that only its backend and its readers understand.
    place: tuple[int | str | bytes, ...]
    nbytes: int  #: of the frame


class StoredFrame(NamedTuple):
    """A chunk in a store tier, from which workers load it without a slot."""

    tier: str  #: its name
    location: Location
    key: ChunkKey  #: the key that the frame must carry
    namespace: bytes  #: the namespace digest that it must carry


@attrs.frozen
class Namespace:
    """Everything that must be equal for two engines to share KV, as named facts in plain words.

    Two namespaces that differ in one fact share no key and no frame.
    """

    facts: tuple[tuple[str, str], ...]  #: names and values, sorted by name

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Namespace:
        """The namespace of these facts, whose values become text."""
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())))

    @classmethod
    def from_json(cls, text: str | bytes) -> Namespace:
        """Read the text that `to_json` made. Raises ValueError for anything else."""
        facts = json.loads(text)
        if not isinstance(facts, dict) or not all(isinstance(fact, str) for fact in facts.values()):
            raise ValueError("not the facts of a namespace")
        return cls.of(facts)

    def to_json(self) -> str:
        """All facts, for people and for `from_json`."""
        return json.dumps(dict(self.facts), indent=1) + "\n"

    def differences(self, other: Namespace) -> list[tuple[str, str, str]]:
        """The facts that differ, as name, value here and value in ``other``; a missing value is empty."""
        here, there = dict(self.facts), dict(other.facts)
        return [
            (name, here.get(name, ""), there.get(name, ""))
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]

    def narrowed(self, name: str, value: str) -> Namespace:
        """The same facts and one more."""
        return Namespace.of({**dict(self.facts), name: value})

    def renewed(self) -> Namespace:
        """The same facts in a new epoch, which shares nothing with this one or any other."""
        return self.narrowed(EPOCH, secrets.token_hex(16))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that depend on every fact, the same on every machine."""
        plain = json.dumps(self.facts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(plain.encode(), digest_size=32, person=b"kvtier-ns").digest()


class EventKind(enum.Enum):
    """The kinds of events of a tier's chunks, and of requests that look there."""

    STORED = "stored"  #: a chunk of the engine became READY in an arena
    PROMOTED = "promoted"  #: a chunk was read from a tier below, verified, and is READY in an arena
    LOADED = "loaded"  #: the engine has copied chunks of a tier into its pages
    READ = "read"  #: a store tier has read frames, which passed verification
    WRITTEN = "written"  #: a tier has stored a frame
    ASKED = "asked"  #: a shared store was asked for frames, and has these
    EVICTED = "evicted"  #: a tier dropped a chunk to make room
    REJECTED = "rejected"  #: a tier did not take a chunk: no room, too much in flight, or its policy
    MISSING = "missing"  #: a frame was gone from a store whose index had it
    CORRUPT = "corrupt"  #: a frame failed verification and is not served; or an audit found that its KV is wrong
    AUDITED = "audited"  #: the engine has computed a chunk that is stored, and they are the same
    INCOMPATIBLE = "incompatible"  #: a frame of another codec, seal key or format version: neither served nor deleted
    IO_ERROR = "io_error"  #: a store raised
    BREAKER_OPEN = "breaker_open"  #: a tier failed repeatedly and is not called for a while
    BREAKER_CLOSED = "breaker_closed"  #: the tier works again
    QUERIED = "queried"  #: a request had tokens that no tier above supplied
    HIT = "hit"  #: the tokens among these that the tier supplied
    MISSED = "missed"  #: the tokens that it did not have
    BYPASSED = "bypassed"  #: tokens that were not looked up, or that are faster to compute than to load
    AVOIDED = "avoided"  #: computing that requests did not wait for, because of a load, in seconds
    WAITED = "waited"  #: a request waited for the tier, in seconds
    HANDED_OVER = "handed_over"  #: tokens of a prompt that are kept for the engine that continues it
    NOT_KEPT = "not_kept"  #: the other tokens of its whole chunks
    WITHHELD = "withheld"  #: tokens of a request that asked not to store them
    BLENDED = "blended"  #: tokens whose KV was moved from other places of prompts; the answer may differ
    ARRIVED = "arrived"  #: a request was first seen, with its chunks' keys; why, if only in memory; of no tier
    FINISHED = "finished"  #: a request ended or was aborted, with the seconds since it arrived; of no tier
    USAGE = "usage"  #: the contents of the tier have changed; once a second at most


class ReadStatus(enum.Enum):
    """The outcome of reading one frame."""

    VERIFIED = "verified"  #: the slot holds the chunk, sealed and raw
    MISSING = "missing"  #: the store does not have the frame
    CORRUPT = "corrupt"  #: the frame is damaged, or can never be read
    IO_ERROR = "io_error"  #: a shared store cannot serve this key now
    INCOMPATIBLE = "incompatible"  #: the frame may be whole, but this tier's codec cannot serve it

    @property
    def event(self) -> EventKind | None:
        """The event that reports this outcome; None if the frame is served."""
        return None if self is ReadStatus.VERIFIED else EventKind(self.value)


@attrs.frozen
class FrameRead:
    """The outcome of one read, and the reason if the frame is not served."""

    status: ReadStatus
    why: str = ""
    nbytes: int = 0  #: length of the stored frame, if it is served


@attrs.frozen
class WriteUse:
    """The write budget of a tier, and what was written."""

    left: int  #: bytes that may be written now
    per_day: int  #: bytes that may be written a day
    endurance: int | None  #: bytes that may be written to its drive in all, as the operator has stated it
    written: int  #: bytes, since the tier was opened
    seconds: int  #: since the tier was opened


@attrs.frozen
class Usage:
    """The current contents of a tier."""

    tier: str  #: its name
    chunks: int
    nbytes: int  #: of their frames
    capacity: int  #: in bytes
    pins: int = 0  #: for an arena: slots in use by requests and tiers, counted once per use
    inflight: int = 0  #: for a store tier: bytes on their way to or from it
    can_read: bool = True  #: False while a breaker or a hanging call blocks reads from a store tier
    can_write: bool = True  #: the same for writes
    writes: WriteUse | None = None  #: for a store tier with a write budget


@attrs.frozen
class Event:
    """Something that happened to chunks of one tier, or to a request that looked there."""

    kind: EventKind
    tier: str  #: its name; empty if the event concerns no tier
    keys: tuple[ChunkKey, ...] = ()
    nbytes: int = 0  #: total length of their frames
    why: str = ""  #: in plain words
    seconds: float = 0.0  #: its duration; 0 if unknown
    tokens: int = 0  #: of a request; for WAITED: loaded tokens whose computing time is unknown
    usage: Usage | None = None  #: only for USAGE
    request: str = ""  #: the request's id, printable, of events of a request
    traceparent: str = ""  #: for ARRIVED: the trace context that the request's trace continues (W3C Trace Context)
    at: float = attrs.field(factory=time.time, eq=False)  #: when it was noticed, in seconds since 1970


_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


class Nbytes(int):
    """A number of bytes, written with a binary unit: ``8GiB``."""

    PATTERN: ClassVar[str] = r"([0-9]+)\s*(B|KiB|MiB|GiB|TiB|PiB)"  #: the text that `parse` accepts

    @classmethod
    def parse(cls, text: str) -> Nbytes:
        """Read a whole number and B, KiB, MiB, GiB, TiB or PiB. Raises ValueError for anything else."""
        match = re.fullmatch(cls.PATTERN, text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB")
        return cls(int(match[1]) * _SIZE_UNITS[match[2]])

    def __str__(self) -> str:
        for unit, size in reversed(_SIZE_UNITS.items()):
            if self >= size and self % size == 0:
                return f"{int(self) // size}{unit}"
        return f"{int(self)}B"


def size(nbytes: float) -> str:
    """A size for people: three digits and a unit, ``1.46GiB``, without an exponent."""
    for unit in _SIZE_UNITS:
        if nbytes < 999.5 or unit == "PiB":
            break
        nbytes /= 1024
    return f"{nbytes:.3g}{unit}" if nbytes < 999.5 else f"{nbytes:.0f}{unit}"


class Seconds(float):
    """A length of time in seconds, written with a unit: ``500ms``, ``2s``, ``1min``."""

    PATTERN: ClassVar[str] = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min)"  #: the text that `parse` accepts

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """Read a number and ms, s or min. Raises ValueError for anything else."""
        match = re.fullmatch(cls.PATTERN, text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a duration; write a number and ms, s or min")
        return cls(float(match[1]) * _TIME_UNITS[match[2]])

    def __str__(self) -> str:
        return f"{float(self):.9f}".rstrip("0").rstrip(".") + "s"


@attrs.frozen
class EnvSecret:
    """A secret in an environment variable, written ``env:NAME``. Only the name of the variable is ever shown."""

    PATTERN: ClassVar[str] = r"env:([A-Za-z_][A-Za-z0-9_]*)"  #: the text that `parse` accepts

    variable: str

    @classmethod
    def parse(cls, text: str) -> EnvSecret:
        """Read ``env:NAME``. Raises ValueError for anything else, and does not repeat the value."""
        match = re.fullmatch(cls.PATTERN, text.strip())
        if match is None:
            raise ValueError("write env:NAME; secrets come from the environment, never from a file")
        return cls(match[1])

    @property
    def value(self) -> str:
        """The secret, in UTF-8 whatever the locale. Raises BackendError if the variable is not set, or empty."""
        value = os.environb.get(self.variable.encode(), b"").decode(errors="surrogateescape")
        if not value:
            raise BackendError(f"the environment variable {self.variable} is not set for this process")
        return value

    def __str__(self) -> str:
        return f"env:{self.variable}"
