"""The vocabulary of kvtier as types: keys, namespaces, layouts, slots, events, sizes and times."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, NewType

import attrs

from kvtier_core.errors import BackendError

#: Opaque bytes that name a chunk. It depends on the namespace, on the chunk's tokens and on all before them, so equal
#: keys mean interchangeable KV. Nothing parses it.
ChunkKey = NewType("ChunkKey", bytes)

#: Bytes of a key.
KEY_NBYTES = 32
#: In bytes. Frames, their headers and arena slots are multiples of it, so that O_DIRECT can move them.
FRAME_ALIGNMENT = 4096


class Slot(NamedTuple):
    """Room for one chunk in an arena."""

    arena: int  #: number of the arena in the stack, from 0
    index: int  #: number of the slot in the arena, from 0


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
        """Facts that are not equal: the name, the value here and the value in ``other``; empty where there is none."""
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
        return self.narrowed("epoch", secrets.token_hex(16))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that depend on every fact, the same on every machine."""
        plain = json.dumps(self.facts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(plain.encode(), digest_size=32, person=b"kvtier-ns").digest()


class KVKind(enum.StrEnum):
    """What a request must have of a group of layers to continue behind a prefix."""

    FULL_ATTENTION = "full attention"  #: the KV of every token of the prefix


class KVStructure(enum.StrEnum):
    """What the elements of a page are, as far as the engine side can tell a serializer."""

    KEYS_AND_VALUES = "keys and values"  #: one number an element; their order is the engine's, a fact of the namespace
    MLA_LATENT = "MLA latent"  #: one number an element: the compressed KV of multi-head latent attention
    OPAQUE = "opaque"  #: anything else, quantized KV with its scales for instance: bytes to be kept as they are


@attrs.frozen
class KVGroup:
    """Layers that share a block table: the engine keeps a request's block ``b`` in page ``b`` of each of them."""

    name: str  #: for logs, errors and facts; no other group of the layout has it
    kind: KVKind = attrs.field(converter=KVKind)
    page_nbytes: tuple[int, ...] = attrs.field(converter=tuple)  #: of a page of each layer, as one rank holds it
    block_tokens: int  #: tokens of one block
    dtype: str  #: of the elements of a page, in torch's words: ``bfloat16``; several if layers differ, with spaces
    structure: KVStructure = attrs.field(converter=KVStructure)

    @property
    def fact(self) -> str:
        """All of it in plain words, as a fact of a namespace."""
        pages = " ".join(map(str, self.page_nbytes))
        tokens = f"{self.block_tokens} tokens a block"
        return f"{self.name}: {self.kind}, {tokens}, {self.dtype}, {self.structure}, pages of {pages} bytes"


class LayerPlace(NamedTuple):
    """Where the pages of one layer lie in a shard."""

    group: int  #: number of its group in the layout
    page_nbytes: int
    offset: int  #: bytes from the start of the shard to the layer's first page; the others follow side by side
    blocks: int  #: pages of this layer in a chunk


@attrs.frozen
class ChunkLayout:
    """Where the bytes of a chunk lie in its frame.

    A frame is a header of 4 KiB, then one shard per rank, then zeros up to a multiple of `FRAME_ALIGNMENT`. A shard is
    group after group; a group is layer after layer; a layer is the chunk's pages in token order, side by side.

    The groups of a layout are stored, loaded and evicted together: one key names the chunk with all of them. The groups
    are facts of the namespace, and the namespace is part of every key, so no key ever names a chunk of other groups.
    Groups that are worth keeping at different places of a prompt (every chunk of full attention, but of a sliding
    window only the last ones before a boundary) do not belong in one layout: its slots would be mostly empty. They are
    separate layouts, each with its own arena, frames and key for the same chunk; an arena, a backend and a mover
    serve one layout and need not know of the others.
    """

    groups: tuple[KVGroup, ...] = attrs.field(converter=tuple)
    tokens: int = attrs.field()  #: of a chunk: a multiple of every group's ``block_tokens``, else ValueError
    ranks: int = 1

    @tokens.validator
    def _check_tokens(self, attribute: attrs.Attribute, tokens: int) -> None:
        for group in self.groups:
            if tokens < 1 or tokens % group.block_tokens:
                raise ValueError(f"{tokens} tokens are no whole blocks of {group.block_tokens} ({group.name})")

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Of each group, the pages of one layer in a chunk."""
        return tuple(self.tokens // group.block_tokens for group in self.groups)

    @cached_property
    def layers(self) -> tuple[LayerPlace, ...]:
        """All layers of all groups, in the order of a shard."""
        layers, offset = [], 0
        for number, (group, blocks) in enumerate(zip(self.groups, self.blocks, strict=True)):
            for nbytes in group.page_nbytes:
                layers.append(LayerPlace(number, nbytes, offset, blocks))
                offset += nbytes * blocks
        return tuple(layers)

    @cached_property
    def shard_nbytes(self) -> int:
        """Bytes of one rank's part of a payload."""
        return sum(layer.page_nbytes * layer.blocks for layer in self.layers)

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of all ranks' shards."""
        return self.shard_nbytes * self.ranks

    @cached_property
    def frame_nbytes(self) -> int:
        """Bytes of a whole frame, and of the slot that holds it."""
        return FRAME_ALIGNMENT + -(-self.payload_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT

    def shard_offset(self, rank: int) -> int:
        """Bytes from the start of the frame to the shard of ``rank``."""
        return FRAME_ALIGNMENT + rank * self.shard_nbytes


class EventKind(enum.Enum):
    """What can happen to chunks of a tier."""

    STORED = "stored"  #: a chunk of the engine became READY in an arena
    PROMOTED = "promoted"  #: a chunk was read from a tier below, verified, and is READY in an arena
    WRITTEN = "written"  #: a tier has stored a frame
    EVICTED = "evicted"  #: a tier dropped a chunk to make room
    REJECTED = "rejected"  #: a tier did not take a chunk: no room, too much in flight, or its policy
    MISSING = "missing"  #: a frame was gone from a store whose index had it
    CORRUPT = "corrupt"  #: a frame failed verification, or is forged; it is not served
    INCOMPATIBLE = "incompatible"  #: a frame has another codec, seal key or format version: neither served nor deleted
    IO_ERROR = "io_error"  #: a store raised
    BREAKER_OPEN = "breaker_open"  #: a tier failed repeatedly and is not called for a while
    BREAKER_CLOSED = "breaker_closed"  #: the tier works again


@attrs.frozen
class Event:
    """Something that happened to chunks of one tier."""

    kind: EventKind
    tier: str  #: its name
    keys: tuple[ChunkKey, ...] = ()
    nbytes: int = 0  #: of their frames, in all
    why: str = ""  #: in plain words


@attrs.frozen
class Usage:
    """What a tier holds now."""

    tier: str  #: its name
    chunks: int
    nbytes: int  #: of their frames
    capacity: int  #: in bytes
    pins: int = 0  #: of an arena: slots in use by requests and tiers, counted once for each use
    inflight: int = 0  #: of a store tier: bytes on their way to it or from it


_SIZE = re.compile(r"([0-9]+)\s*(B|KiB|MiB|GiB|TiB|PiB)")
_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min)")
_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


class Nbytes(int):
    """A number of bytes, written with a binary unit: ``8GiB``."""

    @classmethod
    def parse(cls, text: str) -> Nbytes:
        """Read a whole number and B, KiB, MiB, GiB, TiB or PiB. Raises ValueError for anything else."""
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
    """A length of time in seconds, written with a unit: ``500ms``, ``2s``, ``1min``."""

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """Read a number and ms, s or min. Raises ValueError for anything else."""
        match = _TIME.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a length of time; write a number and ms, s or min")
        return cls(float(match[1]) * _TIME_UNITS[match[2]])

    def __str__(self) -> str:
        return f"{float(self):.9f}".rstrip("0").rstrip(".") + "s"


@attrs.frozen
class EnvSecret:
    """A secret in an environment variable, written ``env:NAME``. Only the name of the variable is ever shown."""

    variable: str

    @classmethod
    def parse(cls, text: str) -> EnvSecret:
        """Read ``env:NAME``. Raises ValueError for anything else, and does not repeat what was written."""
        match = _ENV.fullmatch(text.strip())
        if match is None:
            raise ValueError("write env:NAME; secrets come from the environment, never from a file")
        return cls(match[1])

    @property
    def value(self) -> str:
        """The secret. Raises BackendError if the variable is not set, or empty."""
        value = os.environ.get(self.variable)
        if not value:
            raise BackendError(f"the environment variable {self.variable} is not set")
        return value

    def __str__(self) -> str:
        return f"env:{self.variable}"
