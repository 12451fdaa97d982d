"""Calls with arguments of any kind that their types permit, and some that they do not: from the types in `CALLS`."""

from __future__ import annotations

import enum
import os
import random
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
from oracle import kv_of

from kvtier_core.layouts import ChunkLayout, KVKind, chunk_key, part_key
from kvtier_core.stack.outcomes import LoadLimit, Terms
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, FrameRead, Namespace, ReadStatus, Slot
from kvtier_remote.connection import connect
from kvtier_remote.protocol import (
    CALLS,
    DONE,
    Header,
    Holder,
    Key,
    Names,
    Opened,
    Opening,
    Path,
    ProtocolError,
    ServedFrame,
    ServedLocation,
    encode,
    reason,
    result,
)
from kvtier_serve.server import Server
from kvtier_testing.samples import make_group, make_layout

ONE_PART = make_layout((1024, 3072), 2)
WINDOW = make_group((1024,), name="window", kind=KVKind.SLIDING_WINDOW, reach=ONE_PART.tokens + 1)
SEVERAL_PARTS = ChunkLayout([make_group((1024,)), WINDOW], ONE_PART.tokens)
#: Of each session, so that some have the same holders.
HOLDERS = [f"holder {number}" for number in range(5)]
TIERS = ["cpu", "gds", "none"]
#: The first ones are those of honest engines.
NAMESPACES = [Namespace.of({"model": "model", "epoch": epoch}) for epoch in range(4)]
#: What no field expects, and no decoder may take.
STRANGE = [None, True, -1, 1 << 31, (1 << 64) - 1, 0.5, float("nan"), float("inf"), "", "x" * 2000, b"", [], {}, [[[]]]]
PROMPTS = [[chunk_key(bytes([prompt if at > 2 else 0, at]) * 16) for at in range(8)] for prompt in range(1, 7)]


class Values:
    """Arguments by their types. What a session was told is put into its next calls, and into those of others."""

    def __init__(self, drawn: random.Random, layout: ChunkLayout, strange: float):
        """``strange``: how often a value is none of its type."""
        self._drawn = drawn
        self.layout = layout
        self._strange = strange
        self.frames: list[ServedFrame] = []  #: that some lookup found
        self.given: list[ChunkKey] = []  #: keys of slots that some engine was given to fill

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Those of a call."""
        return tuple(self.of(kind) for kind in CALLS[name].arguments.values())

    def of(self, kind: Any) -> Any:
        """A value of this type, or a strange one."""
        drawn = self._drawn
        if drawn.random() < self._strange:
            return drawn.choice(STRANGE)
        known = {Key: self._key, Path: self._path, Holder: lambda: drawn.choice(HOLDERS)}
        for each, make in known.items():
            if kind == each:
                return make()
        if kind == Names:
            return drawn.choices(TIERS, k=drawn.randrange(3)) if drawn.random() < 0.3 else []
        if typing.get_origin(kind) is Annotated:
            return self.of(typing.get_args(kind)[0])
        return self._made(kind)

    def _made(self, kind: Any) -> Any:
        drawn, origin, inner = self._drawn, typing.get_origin(kind), typing.get_args(kind)
        match kind:
            case _ if origin in (typing.Union, types.UnionType):
                return self.of(drawn.choice(inner))
            case _ if origin is list or (origin is tuple and ... in inner):
                return [self.of(inner[0]) for _ in range(drawn.randrange(4))]
            case _ if origin is tuple:
                return [self.of(each) for each in inner]
            case _ if origin in (dict, Mapping):
                return {self._hashable(inner[0]): self.of(inner[1]) for _ in range(drawn.randrange(4))}
            case _ if origin is Sequence:
                return [self.of(inner[0]) for _ in range(drawn.randrange(4))]
        special = {Namespace: self._namespace, ChunkLayout: self._layout, ServedFrame: self._frame}
        if kind in special:
            return special[kind]()
        if attrs.has(kind) or hasattr(kind, "_fields"):
            hints = typing.get_type_hints(kind, include_extras=True)
            names = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else kind._fields
            values = {name: self.of(hints[name]) for name in names}
            return values if attrs.has(kind) else list(values.values())
        if isinstance(kind, enum.EnumMeta):
            return drawn.choice(list(kind)).value
        plain = {
            int: lambda: drawn.choice([0, 1, 1, 1, 2, 3, 7, -1, 1 << 40]),
            bool: lambda: drawn.random() < 0.5,
            float: lambda: drawn.choice([0.0, 0.5, 1e100, 1e308, -1.0, float("inf"), float("nan")]),
            str: lambda: drawn.choice([*TIERS, "priority", ""]),
            bytes: lambda: drawn.choice([b"", b"", b"salt", b"another salt"]),
            types.NoneType: lambda: None,
        }
        return plain[kind]() if kind in plain else drawn.choice(STRANGE)

    def _hashable(self, kind: Any) -> Any:
        value = self.of(kind)
        return value if isinstance(value, bytes | str | int | float | None) else "a key"

    def _key(self) -> bytes:
        drawn = self._drawn
        match drawn.randrange(20):
            case 0:
                return drawn.randbytes(drawn.choice([31, 32]))
            case 1:
                return part_key(drawn.choice(drawn.choice(PROMPTS)), drawn.randrange(3))
        return drawn.choice(drawn.choice(PROMPTS))

    def _path(self) -> list[bytes]:
        drawn = self._drawn
        path: list[bytes] = list(drawn.choice(PROMPTS)[drawn.randrange(2) * drawn.randrange(8) :])
        path = path[: drawn.randrange(len(path) + 1)]
        match drawn.randrange(12):
            case 0:
                path.reverse()
            case 1:
                path.insert(drawn.randrange(len(path) + 1), self._key())
            case 2:
                drawn.shuffle(path)
        return path

    def _namespace(self) -> Any:
        """Nearly always one that engines have."""
        if self._drawn.random() < 0.98:
            return self._drawn.choice(NAMESPACES)
        return {"facts": [[self.of(str), self.of(str)] for _ in range(self._drawn.randrange(3))]}

    def _layout(self) -> Any:
        """Theirs, mostly; otherwise one with a field that is another."""
        drawn = self._drawn
        layout = attrs.asdict(self.layout)
        if drawn.random() < 0.3:
            hints = typing.get_type_hints(ChunkLayout)
            name = drawn.choice([field.name for field in attrs.fields(ChunkLayout)])
            layout[name] = self.of(hints[name])
        return layout

    def _frame(self) -> Any:
        """One that was found, or part of one."""
        if not self.frames:
            return ServedFrame("gds", ServedLocation((0, 0), 4096), self._key(), bytes(32))
        frame = self._drawn.choice(self.frames[-8:])
        field = self._drawn.choice(ServedFrame._fields)
        return frame if self._drawn.random() < 0.9 else frame._replace(**{field: self.of(bytes)})


class Lent:
    """The memory of a server, in which engines write and read their slots; the oracle says what they may find."""

    def __init__(self, server: Server, layout: ChunkLayout):
        self._server = server
        self._layout = layout

    def fill(self, slots: Mapping[ChunkKey, Slot], slot_nbytes: int, epoch: bytes) -> None:
        """As workers store. Chunks of another layout are filled with anything."""
        for key, slot in slots.items():
            if slot_nbytes == self._layout.frame_nbytes:
                payload = self._payload(key, slot)
                payload[:] = kv_of(key, epoch, len(payload))
            else:
                self._slot(slot, slot_nbytes)[:] = epoch[:1] * slot_nbytes

    def check(self, slots: Mapping[ChunkKey, Slot], epoch: bytes) -> None:
        """As workers load."""
        for key, slot in slots.items():
            payload = self._payload(key, slot)
            assert payload == kv_of(key, epoch, len(payload)), "wrong bytes"

    def _payload(self, key: ChunkKey, slot: Slot) -> memoryview:
        nbytes = self._layout.part_of(key).payload_nbytes
        return self._slot(slot, self._layout.frame_nbytes)[FRAME_HEADER_NBYTES:][:nbytes]

    def _slot(self, slot: Slot, nbytes: int) -> memoryview:
        memory = self._server.spaces.memories[slot.arena].extents.memory
        return memory[slot.index * nbytes : (slot.index + 1) * nbytes]


def other_parts(layout: ChunkLayout, path: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Of the last chunk of a path."""
    return [part_key(path[-1], part.number) for part in layout.parts[1:]]


class Hostile:
    """An engine that may make any call. It fills the slots that it was given when it commits them, and no others."""

    def __init__(self, server: Server, values: Values, lent: Lent, drawn: random.Random):
        self._drawn = drawn
        self.counts: Counter[tuple[str, bool]] = Counter()  #: of calls, by whether they were done
        self._server = server
        self._values = values
        self._lent = lent
        self._connection = connect(server.path)
        self._opened: Opened | None = None
        self._reserved: dict[str, list[tuple[dict[ChunkKey, Slot], int, bytes]]] = {}  # by holder
        self._found: dict[str, list[ServedFrame]] = {}  # by holder
        self._attached = False

    def call(self, name: str) -> None:
        """Make a call with any arguments, or with nearly right ones."""
        arguments = list(CALLS[name].arguments)
        values = dict(zip(arguments, self._values.arguments(name), strict=True))
        if self._drawn.random() < 0.6:
            values.update(self._right(name))
        self._send(name, list(values.values()))

    def _right(self, name: str) -> Mapping[str, Any]:
        """Arguments that make a call right."""
        drawn = self._drawn
        holder = drawn.choice(list(self._reserved if name == "commit" else self._found) or HOLDERS)
        own = [key for slots, _, _ in self._reserved.get(holder, ()) for key in slots]
        frames = self._found.get(holder, ())
        some = [key for key in own if drawn.random() < 0.3]
        match name:
            case "open":
                return {"opening": Opening("model", "hostile", drawn.choice(NAMESPACES), self._values.layout)}
            case "commit":
                sums = {
                    key: [drawn.randrange(1 << 32)] * self._values.layout.shards for key in own if drawn.random() < 0.3
                }
                others = self._values.given[-8:][:1] if drawn.random() < 0.3 else []
                return {"holder": holder, "checksums": sums, "empty": [*some, *others]}
            case "reserve":
                path = drawn.choice(PROMPTS)[: drawn.randrange(1, 9)]
                return {"path": path, "parts": other_parts(self._values.layout, path)}
            case "lookup":
                limit, salt = drawn.choice([None, LoadLimit(1.0, 1.0)]), drawn.choice([b"", b"salt"])
                tiers = (drawn.choice([(), ["gds"], ["disk", "no such tier"]]) for _ in range(2))
                return {"terms": Terms(limit, salt, drawn.randrange(3), *tiers)}
            case "load_begins":
                return {"holder": holder, "frames": frames}
            case "load_ended":
                why = FrameRead(drawn.choice(list(ReadStatus)), "it says so")
                return {"holder": holder, "unread": {each.key: why for each in frames if drawn.random() < 0.1}}
            case "attach":
                return {"session": self._opened.session if self._opened else 1, "arena": 0}
        return {}

    def _send(self, name: str, arguments: Sequence[Any]) -> None:
        """Make a call, if it can be sent, and wait for its answer."""
        if name == "commit" and isinstance(arguments[0], str):
            for given in self._reserved.get(arguments[0], ()):
                self._lent.fill(*given)
        try:
            body = encode(arguments)
        except ProtocolError:
            return
        self._connection.send(Header(len(body), 1, CALLS[name].number, 0, 0), body)
        header, answer = self._answer()
        while self._connection.descriptors:
            os.close(self._connection.descriptors.pop())
        self.counts[name, header.call == DONE] += 1
        if header.call == DONE:
            self._note(name, arguments, result(name, answer))
        else:
            assert reason(answer)

    def _answer(self) -> tuple[Header, bytes]:
        while True:
            for message in self._connection.receive():
                return message
            self._server.turn(0)

    def _note(self, name: str, arguments: Sequence[Any], found: Any) -> None:
        if name in ("open", "invalidate_all"):
            self._opened = found
        elif name == "reserve" and found:
            session = self._server.sessions[self._opened.session]
            given = found, self._opened.arenas[0].slot_nbytes, session.space.namespace.digest
            self._reserved.setdefault(arguments[1], []).append(given)
            self._values.given += found
        elif name == "lookup":
            self._found[arguments[1]] = list(found.frames.values())
            self._values.frames += found.frames.values()
        elif name in ("commit", "release"):
            self._reserved.pop(arguments[0], None)
        elif name in ("attach", "detach"):
            self._attached = name == "attach"

    def close(self) -> None:
        """Its workers end, and then it does."""
        if self._attached:
            self._send("detach", ())
        self._connection.close()
