"""The messages of a server are what is documented, and whatever else comes is answered or ends one connection."""

from __future__ import annotations

import random
import re
import socket

import attrs
import pytest
from engine_process import OWN
from served import LAYOUT, serving
from source_copy import ROOT

from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind
from kvtier_core.server.connection import Connection
from kvtier_core.server.protocol import (
    CALLS,
    DONE,
    HEADER,
    LONGEST,
    PREAMBLE,
    REFUSED,
    Header,
    Opening,
    ProtocolError,
    ServedLookup,
    describe,
    encode,
    reason,
    result,
)
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Whereabouts
from kvtier_core.types import Event, EventKind, FrameRead, Location, Namespace, ReadStatus, Slot, StoredFrame, Usage

PAGE = (ROOT / "docs/reference/protocol.md").read_text()
OPENING = Opening("model", "fuzzer", Namespace.of({"model": "model"}), LAYOUT)
FRAME = StoredFrame("gds", Location(((1 << 64) - 1, -1, "a name", b"bytes"), 4096), OWN[0], bytes(32))
#: Arguments that each call is right with.
RIGHT = {
    "open": (OPENING,),
    "on_request": (OWN, {}, b""),
    "lookup": (OWN, "request", None, b"", 0, ["gds"]),
    "prefetch": (OWN, None, b""),
    "reserve": (OWN, "store", b"", []),
    "commit": ("store", None, []),
    "release": ("request",),
    "reserve_self_test_slots": ("self-test", 1),
    "step": (),
    "invalidate_all": (Namespace.of({"model": "model", "epoch": "1"}),),
    "whereabouts": (OWN,),
    "pins_by_holder": (),
    "load_begins": ([FRAME], "request"),
    "load_ended": ("request", {OWN[0]: FrameRead(ReadStatus.CORRUPT, "a checksum")}, False),
    "stop_direct_reads": ("gds", "no GPU"),
    "attach": (1, 0, 0),
    "detach": (),
    "attached": (),
}


class Client:
    """Sends whatever it is told, and waits for what comes."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._stream = self._socket.makefile("rb")
        self._socket.sendall(PREAMBLE)
        assert self._stream.read(len(PREAMBLE)) == PREAMBLE

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._stream.close()
        self._socket.close()

    def send(self, message):
        self._socket.sendall(message)

    def ask(self, call, body, number=7):
        """Header and body of the answer."""
        self.send(HEADER.pack(len(body), number, call, 0, 0) + body)
        header = Header(*HEADER.unpack(self._stream.read(HEADER.size)))
        return header, self._stream.read(header.nbytes)

    def has_hung_up(self):
        return not self._stream.read(1)


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path) as served:
        yield served


def test_the_documentation_names_each_call_with_its_arguments():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\w, ]+) \|", PAGE, re.MULTILINE)
    said = {name: (int(number), [] if of == "none" else of.split(", ")) for name, number, of in rows}
    assert said == {name: (call.number, list(call.arguments)) for name, call in CALLS.items()}
    assert f"most {LONGEST >> 20} MiB" in PAGE and HEADER.size == 24


def test_a_field_or_a_word_anywhere_in_a_message_makes_it_another_protocol():
    """Nobody has to list them: whatever a call is made of is in the text that both sides compare."""
    text = describe()
    for of in (KVGroup, ChunkLayout, Namespace, Event, Usage, LoadLimit, Lookup, Whereabouts, ServedLookup, FrameRead):
        assert all(f"{field.name}: " in text for field in attrs.fields(of)), of
    assert all(kind.value in text for each in (EventKind, KVKind, Medium, ReadStatus) for kind in each)
    assert "Slot: arena: int, index: int" in text and "Header: nbytes: int" in text


def test_calls_have_the_arguments_of_the_interface():
    for name in CALLS.keys() & vars(Stack).keys():
        method = vars(Stack)[name]
        if callable(method) and name not in ("step", "pins_by_holder"):
            code = method.__code__
            count = code.co_argcount + code.co_kwonlyargcount
            assert list(CALLS[name].arguments) == list(code.co_varnames[1:count]), name


def test_a_lookup_comes_back_as_it_was():
    """Whatever a location is made of, and which of its chunks have slots."""
    slots = [Slot(0, 7), FRAME, FRAME, Slot(1, 8)]
    found = Lookup(slots, sources=["cpu", "gds", "gds", "ssd"], parts=[], chunks=4, miss_reason="not stored")
    told = result("lookup", encode(ServedLookup.of(found))).found
    for field in attrs.fields(Lookup):
        assert getattr(told, field.name) == getattr(found, field.name), field.name


def test_every_right_request_is_answered_in_order(served):
    with Client(served.path) as client:
        for number, (name, values) in enumerate(RIGHT.items(), start=1):
            header, body = client.ask(CALLS[name].number, encode(values), number)
            assert (header.number, header.call) == (number, DONE), (name, body)
            assert header.boot == served.server.boot
    assert RIGHT.keys() == CALLS.keys()


def test_a_bad_request_is_answered_and_the_next_one_served(served):
    drawn = random.Random(0)
    with Client(served.path) as client:
        client.ask(1, encode((OPENING,)))
        for name, values in RIGHT.items():
            right = encode(values)
            spoiled = [b"", b"\xc1", right[:-1], right + b"\0", encode({"a": 1}), encode([None] * 9)]
            spoiled += [bytes(drawn.randbytes(drawn.randrange(200))) for _ in range(50)]
            for body in spoiled if name not in ("detach", "attached", "step", "pins_by_holder") else spoiled[:4]:
                header, answer = client.ask(CALLS[name].number, body)
                assert header.call == REFUSED and reason(answer), (name, body)
        assert client.ask(99, b"\x90")[0].call == REFUSED
        assert client.ask(CALLS["step"].number, encode(()))[0].call == DONE


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("open", "attach", "detach", "attached")])
def test_calls_before_a_session_is_open_are_refused(served, name):
    with Client(served.path) as client:
        header, answer = client.ask(CALLS[name].number, encode(RIGHT[name]))
        assert header.call == REFUSED and "before open" in reason(answer)


def test_keys_of_another_length_are_refused(served):
    with Client(served.path) as client:
        client.ask(1, encode((OPENING,)))
        for key in (b"", OWN[0][:31], OWN[0] + b"\0"):
            header, _ = client.ask(CALLS["lookup"].number, encode(([key], "request", None, b"", 0, [])))
            assert header.call == REFUSED


@pytest.mark.parametrize(
    "message",
    [HEADER.pack(LONGEST + 1, 1, 3, 0, 0), HEADER.pack((1 << 32) - 1, 1, 3, 0, 0)],
    ids=["longer than any", "as long as can be said"],
)
def test_a_message_without_end_ends_its_connection_alone(served, message):
    with Client(served.path) as client, Client(served.path) as other:
        client.send(message)
        assert client.has_hung_up()
        assert other.ask(1, encode((OPENING,)))[0].call == DONE


@pytest.mark.parametrize(
    ("preamble", "why"),
    [(b"HTTP/1.1 400 Bad", "no kvtier serve"), (PREAMBLE[:8] + bytes(8), "different releases")],
    ids=["another program", "another release"],
)
def test_a_client_of_another_protocol_gets_an_explanation(preamble, why):
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(preamble)
    with theirs, pytest.raises(ProtocolError, match=why):
        list(connection.receive())
    connection.close()


def test_garbage_in_pieces_harms_nobody(served):
    drawn = random.Random(1)
    stack = served.stack()
    for _ in range(100):
        with Client(served.path) as client:
            body = encode(RIGHT["open"])
            whole = HEADER.pack(len(body), 1, 1, 0, 0) + body
            harmed = bytearray(whole)
            for _ in range(drawn.randrange(1, 4)):
                harmed[drawn.randrange(len(harmed))] = drawn.randrange(256)
            client.send(harmed[: drawn.randrange(len(harmed))])
    assert stack.reserve(OWN, "store"), "an engine beside them is not served any more"


def test_a_message_that_cannot_be_sent_raises_in_the_sender():
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode((object(),))
