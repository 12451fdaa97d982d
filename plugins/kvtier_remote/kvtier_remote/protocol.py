"""The messages between a server and the processes of engines, on a Unix socket: docs/reference/protocol.md.

Both sides begin with `PREAMBLE`. Then each message is a header and a body in MessagePack, whose types are checked as it
is decoded: the arguments of a call, in order, as an array; its result; or the reason why there is none. Every request
is answered, in order, even a bad one. No message contains a token of a prompt, or anything that is executed.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import attrs
import msgspec
from msgspec import Meta

from kvtier_core.errors import KvtierError
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.outcomes import Arriving, Declined, Lookup, Missing, Terms, TooSmall, Whereabouts
from kvtier_core.types import KEY_NBYTES, ChunkKey, Event, FrameRead, Location, Namespace, Slot, StoredFrame, Usage

#: The most bytes of a body.
LONGEST = 16 << 20
#: The most chunks that a call names; their lookup takes the server 5 ms. Of a longer prompt, the first are cached.
MOST_CHUNKS = 1 << 13
#: The most slots that a call reserves, which takes the server 1 ms; the client calls again for more.
MOST_RESERVED = 128


class ProtocolError(KvtierError):
    """The other side does not speak this protocol, or has broken it."""


class Header(NamedTuple):
    """The header of every message: 24 bytes, little-endian."""

    nbytes: int  #: of the body
    number: int  #: of the request; its answer has the same
    call: int  #: of a request: the number of the call. Of an answer: `DONE` or `REFUSED`.
    epoch: int  #: of an answer: a change means that workers must attach the arenas again
    boot: int  #: of an answer: drawn at random when the server started


HEADER = struct.Struct("<IIIIQ")
DONE, REFUSED = 0, 1

Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Path = Annotated[list[Key], Meta(max_length=MOST_CHUNKS)]
Parts = Annotated[list[Key], Meta(max_length=MOST_RESERVED)]
Holder = Annotated[str, Meta(max_length=1024)]
Salt = Annotated[bytes, Meta(max_length=2048)]
Names = Annotated[list[str], Meta(max_length=64)]
Hints = Annotated[dict[str, str], Meta(max_length=64)]


@attrs.frozen
class Opening:
    """The engine that opens a session."""

    model: str  #: for people, like the next one
    engine: str
    namespace: Namespace
    layout: ChunkLayout  #: ``packed`` if its workers can pack
    recomputes: bool = True  #: does the engine compute what a load did not bring? Otherwise it gets no stored frames.


@attrs.frozen
class ServedArena:
    """An arena of a session, which its workers ask for with `attach`."""

    name: str
    slot_nbytes: int


@attrs.frozen
class Opened:
    """A session."""

    session: int
    arenas: tuple[ServedArena, ...]
    media: dict[str, Medium]  #: of all tiers, hottest first
    reader_handles: dict[str, str] = attrs.field(factory=dict)  #: as `Stack.reader_handles`
    about: tuple[str, ...] = ()  #: a line for each tier, for people
    cold: str = ""  #: why nothing that the tiers hold can be found; empty otherwise
    packed: bool = False  #: as `Stack.packed`
    shared: tuple[str, ...] = ()  #: as `Stack.shared`


class ServedLocation(NamedTuple):
    """A `Location`; msgspec cannot name the types of the items in its place."""

    place: tuple[Any, ...]  #: numbers, text and bytes
    nbytes: int


class ServedFrame(NamedTuple):
    """A `StoredFrame` as a message has it."""

    tier: str
    location: ServedLocation
    key: Key
    namespace: bytes

    @classmethod
    def of(cls, frame: StoredFrame) -> ServedFrame:
        """The form in which a frame is sent."""
        return cls(frame.tier, ServedLocation(*frame.location), frame.key, frame.namespace)

    @property
    def stored(self) -> StoredFrame:
        """The frame that was sent."""
        return StoredFrame(self.tier, Location._make(self.location), ChunkKey(self.key), self.namespace)


@attrs.frozen
class AskedTerms(Terms):
    """The terms of a lookup in a message."""

    salt: Salt = b""
    not_direct: Names = attrs.field(factory=list)
    without: Names = attrs.field(factory=list)


@attrs.frozen
class ServedLookup:
    """A `Lookup` in a message, where values of different classes look alike: each has its own field."""

    slots: Sequence[Slot]
    frames: Mapping[int, ServedFrame]  #: by their places among the slots
    sources: Sequence[str]
    parts: Sequence[tuple[int, int]]
    chunks: int
    chain: int
    exact: int
    arriving: Arriving | None
    declined: Declined | None
    too_small: TooSmall | None
    missing: Missing | None

    @classmethod
    def of(cls, found: Lookup) -> ServedLookup:
        """The form in which a lookup is sent."""
        return cls(
            [slot for slot in found.slots if isinstance(slot, Slot)],
            {at: ServedFrame.of(slot) for at, slot in enumerate(found.slots) if isinstance(slot, StoredFrame)},
            found.sources,
            found.parts,
            found.chunks,
            found.chain,
            found.exact,
            found.arriving,
            found.rest if isinstance(found.rest, Declined) else None,
            found.rest if isinstance(found.rest, TooSmall) else None,
            found.rest if isinstance(found.rest, Missing) else None,
        )

    @property
    def found(self) -> Lookup:
        """The lookup that was sent."""
        slots, places = iter(self.slots), range(len(self.slots) + len(self.frames))
        both: list[Slot | StoredFrame] = [self.frames[at].stored if at in self.frames else next(slots) for at in places]
        rest = self.declined or self.too_small or self.missing
        return Lookup(
            both, self.sources, self.parts, self.chunks, self.chain, self.exact, arriving=self.arriving, rest=rest
        )


@attrs.frozen
class Stepped:
    """What has happened since the last step of this session."""

    events: tuple[Event, ...] = ()
    settled: tuple[str, ...] = ()  #: holders for which nothing is on its way any more
    jobs: int = 0  #: as `Stack.jobs`
    usage: tuple[Usage, ...] | None = None  #: None: the same as before
    lost: bool = False  #: have events before these been lost?


class Call(NamedTuple):
    """The types of a call."""

    number: int
    arguments: Mapping[str, Any]
    result: Any


Checksums = Annotated[dict[Key, list[int]], Meta(max_length=MOST_CHUNKS)]
Frames = Annotated[list[ServedFrame], Meta(max_length=MOST_CHUNKS)]
Unread = Annotated[dict[Key, FrameRead], Meta(max_length=MOST_CHUNKS)]

#: A scheduler side makes these calls; the last three are those of a worker. Most are methods of `Stack`.
CALLS = {
    "open": Call(1, {"opening": Opening}, Opened),
    "on_request": Call(2, {"path": Path, "hints": Hints | None, "salt": Salt, "memory_only": bool}, None),
    "lookup": Call(3, {"path": Path, "holder": Holder, "terms": AskedTerms}, ServedLookup),
    "prefetch": Call(4, {"path": Path, "terms": AskedTerms}, None),
    "reserve": Call(
        5,
        {"path": Path, "holder": Holder, "salt": Salt, "parts": Parts, "promised_to": Holder, "memory_only": bool},
        dict[Key, Slot],
    ),
    "commit": Call(6, {"holder": Holder, "checksums": Checksums | None, "empty": Path}, None),
    "release": Call(7, {"holder": Holder}, None),
    "reserve_self_test_slots": Call(8, {"holder": Holder, "count": Annotated[int, Meta(ge=1, le=256)]}, list[Slot]),
    "step": Call(9, {}, Stepped),
    "invalidate_all": Call(10, {"namespace": Namespace}, Opened),
    "whereabouts": Call(11, {"path": Path}, list[Whereabouts]),
    "pins_by_holder": Call(12, {}, dict[str, int]),
    "load_begins": Call(13, {"frames": Frames, "holder": Holder}, None),
    "load_ended": Call(14, {"holder": Holder, "unread": Unread, "ok": bool}, None),
    "stop_direct_reads": Call(15, {"tier": str, "why": str}, None),
    "attach": Call(32, {"session": int, "arena": int, "rank": int}, tuple[int, int]),
    "detach": Call(33, {}, None),
    "attached": Call(34, {}, None),
}
NAMES = {call.number: name for name, call in CALLS.items()}


def plain(number: Any) -> int | float:
    """A number, without its unit."""
    for plain in (int, float):
        if isinstance(number, plain):
            return plain(number)
    raise TypeError(f"no message has a value of type {type(number).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_arguments = {name: msgspec.msgpack.Decoder(tuple[*call.arguments.values()]) for name, call in CALLS.items()}  # type: ignore[misc]
_results = {name: msgspec.msgpack.Decoder(call.result) for name, call in CALLS.items()}
_reason = msgspec.msgpack.Decoder(str)


def encode(value: Any) -> bytes:
    """A body. Raises ProtocolError for a value that no message can have."""
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, msgspec.EncodeError) as error:
        raise ProtocolError(f"this cannot be sent: {error}") from error


def arguments(name: str, body: bytes) -> Sequence[Any]:
    """The arguments of a call. Raises ProtocolError."""
    told: Sequence[Any] = _decoded(_arguments[name], body)
    return told


def result(name: str, body: bytes) -> Any:
    """The result of a call. Raises ProtocolError."""
    return _decoded(_results[name], body)


def reason(body: bytes) -> str:
    """Why a call has no result. Raises ProtocolError."""
    why: str = _decoded(_reason, body)
    return why


def _decoded(decoder: msgspec.msgpack.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def _said(of: Any, classes: dict[str, list[str]]) -> str:
    """A type in words that are the same for every version of Python; ``classes`` collects those that it is made of."""
    if typing.get_origin(of) is Annotated:
        return _said(typing.get_args(of)[0], classes)
    if parts := [_said(each, classes) for each in typing.get_args(of) if each is not ...]:
        origin = typing.get_origin(of)
        kind = "either" if origin in (typing.Union, types.UnionType) else origin.__name__
        return f"{kind}[{', '.join(parts)}]"
    name = "nothing" if of in (None, types.NoneType) else of.__name__
    if isinstance(of, enum.EnumMeta):
        members: Iterable[Any] = of
        classes[name] = [str(member.value) for member in members]
    elif name not in classes and (attrs.has(of) or hasattr(of, "_fields")):
        classes[name] = []  # it may have itself in it
        hints = typing.get_type_hints(of)
        fields = [field.name for field in attrs.fields(of)] if attrs.has(of) else of._fields
        classes[name] = [f"{field}: {_said(hints[field], classes)}" for field in fields]
    return name


def describe() -> str:
    """All calls, with the classes that their types are made of: whatever changes a message changes this text."""
    classes: dict[str, list[str]] = {}
    calls = [
        f"{call.number} {name}({', '.join(f'{each}: {_said(of, classes)}' for each, of in call.arguments.items())})"
        f" -> {_said(call.result, classes)}"
        for name, call in CALLS.items()
    ]
    _said(Header, classes)
    return "\n".join([HEADER.format, *calls, *(f"{name}: {', '.join(classes[name])}" for name in sorted(classes))])


_MAGIC = b"kvtier:\n"
#: Both sides send it first. Its second half names the calls and their types.
PREAMBLE = _MAGIC + hashlib.blake2b(describe().encode(), digest_size=8).digest()


def check_preamble(preamble: bytes) -> None:
    """Raise ProtocolError if this is not `PREAMBLE`."""
    if not preamble.startswith(_MAGIC):
        raise ProtocolError("the process listening there is not kvtier serve")
    if preamble != PREAMBLE:
        raise ProtocolError("engine and server have different releases of kvtier; install the same release for both")
