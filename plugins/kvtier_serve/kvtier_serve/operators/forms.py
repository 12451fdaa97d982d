"""The requests of operators to a server over HTTP, and the answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvtier_doctor.steering import PINNED_AT_MOST, PINNED_FOR


class RefusedError(Exception):
    """The request cannot be carried out; the message says why."""


#: A key, in hexadecimal digits.
_Key = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=1 << 20)]


class Prompt(Struct, forbid_unknown_fields=True):
    """A prompt of an engine of this server."""

    tokens: _Tokens | None = None
    cache_salt: str = ""
    namespace: str = ""  #: the beginning of its digest in hexadecimal digits; may be left out if there is one
    keys: Annotated[list[_Key], Meta(max_length=1 << 14)] = []  #: of its chunks, instead of tokens


class Scope(Struct, forbid_unknown_fields=True):
    """One namespace, or all."""

    namespace: str = ""


class HeldOf(Scope):
    """A namespace, and how many chunks to name."""

    most: Annotated[int, Meta(ge=1, le=1 << 16)] = 1 << 14


class Held(Struct):
    """What memory has: the beginnings of prompts first, and each chunk after the one before it."""

    chunks: list[tuple[str, int]]  #: the key of each, and the position in this list of the chunk before it, or -1
    left_out: int  #: chunks that were not named


class Health(Struct):
    """The owner's thread has answered."""

    boot: str
    uptime: float  #: seconds
    sessions: int


class Chunk(Struct):
    """Where a chunk can be loaded from, and why it cannot."""

    key: str
    tiers: list[str]
    miss_reason: str


class Explained(Struct):
    """The chunks of a prompt."""

    chunk_tokens: int
    chunks: list[Chunk]


class Brought(Struct):
    """What comes into memory, and what may."""

    chunks: int  #: on their way now
    in_memory: int  #: leading chunks that were there
    asked: list[str]  #: shared stores that are asked for the others


class Documents(Struct, forbid_unknown_fields=True):
    """A prompt in parts, as token ids. Its documents may be sent in any order."""

    documents: Annotated[list[_Tokens], Meta(min_length=1, max_length=64)]
    before: _Tokens = []  #: a system prompt, for instance
    after: _Tokens = []  #: a question
    cache_salt: str = ""
    namespace: str = ""  #: as in a prompt


class Order(Struct):
    """An order of documents, and the length of its cached prefix."""

    documents: list[int]  #: their positions in the request, from 0
    cached_tokens: int


class Arranged(Struct):
    """The order of documents with the longest cached prefix; among equals, the one closest to the request."""

    best: Order
    requested: Order  #: the order of the request
    by_first_document: list[Order]  #: the best order that begins with each document, longest cached prefix first
    exhaustive: bool  #: false: the search ended early, and a better order may exist


class PinOf(Prompt):
    """A prompt to pin."""

    seconds: Annotated[float, Meta(gt=0, le=PINNED_AT_MOST)] = PINNED_FOR  #: until the pin expires


class Pinned(Struct):
    """What a pin keeps in memory."""

    chunks: int  #: now
    pending: int  #: those after them, as far as stores have them
    left_out: int  #: for which all pins together have no room
    seconds: float  #: until it expires


class Pin(Struct):
    """A prompt that is kept in memory."""

    name: str
    namespace: int  #: its number
    model: str
    chunks: int  #: of the prompt
    slots: int  #: that it keeps now
    pending: bool  #: are more on their way?
    seconds: float  #: until it expires


_Nbytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Limits(Struct):
    """Bytes; null: any number."""

    soft: int | None
    hard: int | None


class QuotaOf(Struct, forbid_unknown_fields=True):
    """Bytes of all arenas together; null: any number."""

    cache_salt: Annotated[str, Meta(min_length=1)]
    soft: _Nbytes | None = None
    hard: _Nbytes | None = None


class ModelQuota(Struct, forbid_unknown_fields=True):
    """Bytes of each arena; null: any number."""

    model: str  #: as /status has it
    soft: _Nbytes | None = None
    hard: _Nbytes | None = None


class AllQuotas(Struct):
    """The quotas in force."""

    each_tenant: Limits  #: of each tenant without a quota of its own
    tenants: dict[str, Limits]  #: by name, as /tenants has it
    models: dict[str, Limits]
    lost: str = ""  #: why they end with the server; empty: they outlive it


class Tenant(Struct):
    """A tenant that has chunks in memory; ``anonymous`` has those without a salt, or with one that came once."""

    tenant: str
    nbytes: int
    soft: int | None
    hard: int | None


class Condemned(Struct, forbid_unknown_fields=True):
    """What is erased: all of a tenant, all of a namespace, or what a tenant has in a namespace."""

    cache_salt: str = ""
    namespace: str = ""


class Erased(Struct):
    """A receipt: what was deleted, what is overwritten, and what was not reached. Ask again while some is left."""

    at: float  #: seconds since 1970
    tenant: str  #: its name, as /tenants has it; empty: all tenants
    namespaces: list[str]
    deleted: dict[str, int]  #: chunks, by tier
    overwritten: dict[str, bool]  #: by tier: is, or will be, everything that was deleted overwritten?
    left: dict[str, int]  #: by tier: chunks of this call and others in use, or not overwritten yet
    unreachable: list[str]


class Done(Struct):
    """Number of chunks affected."""

    chunks: int
