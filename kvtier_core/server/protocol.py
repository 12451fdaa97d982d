"""The messages between a server and the processes of engines, on a Unix socket: docs/reference/protocol.md.

Both sides begin with `PREAMBLE`. Then each message is a header and a body in MessagePack, whose types are checked as it
is decoded: the arguments of a call, in order, as an array; its result; or the reason why there is none. Every request
is answered, in order, also a bad one. No message has a token of a prompt in it, nor anything that is executed.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import attrs
import msgspec
from msgspec import Meta

from kvtier_core.errors import KvtierError
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Whereabouts
from kvtier_core.types import KEY_NBYTES, ChunkKey, Event, FrameRead, Location, Namespace, Slot, StoredFrame, Usage

#: Bytes of a body. That of a lookup of a million chunks.
LONGEST = 64 << 20


class ProtocolError(KvtierError):
    """The other side does not speak this protocol, or has broken it."""


class Header(NamedTuple):
    """What every message begins with: 24 bytes, little-endian."""

    nbytes: int  #: of the body
    number: int  #: of the request; its answer has the same
    call: int  #: of a request: the number of the call. Of an answer: `DONE` or `REFUSED`.
    epoch: int  #: of an answer: another one than before means that workers must attach the arenas again
    boot: int  #: of an answer: drawn at random when the server started


HEADER = struct.Struct("<IIIIQ")
DONE, REFUSED = 0, 1

Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Path = Annotated[list[Key], Meta(max_length=1 << 20)]
Holder = Annotated[str, Meta(max_length=1024)]
Salt = Annotated[bytes, Meta(max_length=1024)]
Names = Annotated[list[str], Meta(max_length=64)]


@attrs.frozen
class Opening:
    """The engine that opens a session."""

    model: str  #: for people, like the next one
    engine: str
    namespace: Namespace
    layout: ChunkLayout  #: ``packed`` if its workers can pack
    recomputes: bool = True  #: does the engine compute what a load could not bring? Else it gets no stored frames.


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
    about: tuple[str, ...] = ()  #: a line a tier, for people
    cold: str = ""  #: why nothing that the tiers hold can be found; empty if that is not so
    packed: bool = False  #: as `Stack.packed`


class ServedLocation(NamedTuple):
    """A `Location`; msgspec cannot name the types of what is in its place."""

    place: tuple[Any, ...]  #: numbers, text and bytes
    nbytes: int


class ServedFrame(NamedTuple):
    """A `StoredFrame` as it comes."""

    tier: str
    location: ServedLocation
    key: Key
    namespace: bytes

    @property
    def stored(self) -> StoredFrame:
        """The frame that was sent."""
        return StoredFrame(self.tier, Location._make(self.location), ChunkKey(self.key), self.namespace)


@attrs.frozen
class ServedLookup(Lookup):
    """A lookup in a message, where slots and stored frames look alike: the frames have a field of their own."""

    slots: Sequence[Slot] = ()
    frames: Mapping[int, ServedFrame] = attrs.field(factory=dict)  #: by their places among the slots

    @classmethod
    def of(cls, found: Lookup) -> Lookup:
        """The form in which a lookup is sent."""
        if StoredFrame not in map(type, found.slots):
            return found
        frames = {at: slot for at, slot in enumerate(found.slots) if isinstance(slot, StoredFrame)}
        slots = [slot for slot in found.slots if isinstance(slot, Slot)]
        return cls(**{**attrs.asdict(found, recurse=False), "slots": slots}, frames=frames)

    @property
    def found(self) -> Lookup:
        """The lookup that was sent."""
        if not self.frames:
            return self
        slots, places = iter(self.slots), range(len(self.slots) + len(self.frames))
        both = [self.frames[at].stored if at in self.frames else next(slots) for at in places]
        return attrs.evolve(self, slots=both, frames={})


@attrs.frozen
class Stepped:
    """What has happened since the last step of this session."""

    events: tuple[Event, ...] = ()
    settled: tuple[str, ...] = ()  #: holders of which nothing is on its way any more
    jobs: int = 0  #: as `Stack.jobs`
    usage: tuple[Usage, ...] | None = None  #: None: the same as before


class Call(NamedTuple):
    """The types of a call."""

    number: int
    arguments: Mapping[str, Any]
    result: Any


#: A scheduler side makes these calls; the last three are those of a worker. Most are methods of `Stack`.
CALLS = {
    "open": Call(1, {"opening": Opening}, Opened),
    "on_request": Call(2, {"path": Path, "hints": dict[str, str] | None, "salt": Salt}, None),
    "lookup": Call(
        3,
        {"path": Path, "holder": Holder, "limit": LoadLimit | None, "salt": Salt, "skipped": int, "not_direct": Names},
        ServedLookup,
    ),
    "prefetch": Call(4, {"path": Path, "limit": LoadLimit | None, "salt": Salt}, None),
    "reserve": Call(5, {"path": Path, "holder": Holder, "salt": Salt, "parts": Path}, dict[Key, Slot]),
    "commit": Call(6, {"holder": Holder, "checksums": dict[Key, list[int]] | None, "empty": Path}, None),
    "release": Call(7, {"holder": Holder}, None),
    "reserve_self_test_slots": Call(8, {"holder": Holder, "count": Annotated[int, Meta(ge=1, le=256)]}, list[Slot]),
    "step": Call(9, {}, Stepped),
    "invalidate_all": Call(10, {"namespace": Namespace}, Opened),
    "whereabouts": Call(11, {"path": Path}, list[Whereabouts]),
    "pins_by_holder": Call(12, {}, dict[str, int]),
    "load_begins": Call(13, {"frames": list[ServedFrame], "holder": Holder}, None),
    "load_ended": Call(14, {"holder": Holder, "unread": dict[Key, FrameRead], "ok": bool}, None),
    "stop_direct_reads": Call(15, {"tier": str, "why": str}, None),
    "attach": Call(32, {"session": int, "arena": int, "rank": int}, tuple[int, int]),
    "detach": Call(33, {}, None),
    "attached": Call(34, {}, None),
}
NAMES = {call.number: name for name, call in CALLS.items()}


def plain(number: Any) -> int | float:
    """A number with a unit, without it."""
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
    return _decoded(_arguments[name], body)


def result(name: str, body: bytes) -> Any:
    """The result of a call. Raises ProtocolError."""
    return _decoded(_results[name], body)


def reason(body: bytes) -> str:
    """Why a call has no result. Raises ProtocolError."""
    return _decoded(_reason, body)


def _decoded(decoder: msgspec.msgpack.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError) as error:
        raise ProtocolError(f"a message is not what it should be: {error}") from error


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
        classes[name] = [str(member.value) for member in of]
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
        raise ProtocolError("what answers there is no kvtier serve")
    if preamble != PREAMBLE:
        raise ProtocolError("engine and server have different releases of kvtier; install the same one for both")
