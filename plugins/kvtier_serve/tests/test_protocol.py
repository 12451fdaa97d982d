"""The messages of a server are what is documented, and whatever else comes is answered or ends one connection."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import threading

import attrs
import pytest
from engine_process import OWN
from patience import HANG, wait_until
from served import LAYOUT, serving
from source_copy import ROOT

from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import (
    ANY,
    Arriving,
    Declined,
    LoadLimit,
    Lookup,
    Missing,
    Terms,
    TooSmall,
    Whereabouts,
)
from kvtier_core.types import Event, EventKind, FrameRead, Location, Namespace, ReadStatus, Slot, StoredFrame, Usage
from kvtier_remote.connection import Connection
from kvtier_remote.protocol import (
    CALLS,
    DONE,
    HEADER,
    LONGEST,
    MOST_CHUNKS,
    MOST_RESERVED,
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
from kvtier_serve import sessions
from kvtier_testing.samples import make_keys

PAGE = (ROOT / "docs/reference/protocol.md").read_text()
OPENING = Opening("model", "fuzzer", Namespace.of({"model": "model"}), LAYOUT)
FRAME = StoredFrame("gds", Location(((1 << 64) - 1, -1, "a name", b"bytes"), 4096), OWN[0], bytes(32))
#: Arguments that each call is right with.
RIGHT = {
    "open": (OPENING,),
    "on_request": (OWN, {}, b"", False),
    "lookup": (OWN, "request", Terms(LoadLimit(0.1, 1.0), b"", 0, ["gds"], ["s3"])),
    "prefetch": (OWN, ANY),
    "reserve": (OWN, "store", b"", [], "", False),
    "commit": ("store", None, []),
    "release": ("request",),
    "reserve_self_test_slots": ("self-test", 1),
    "step": (),
    "invalidate_all": (Namespace.of({"model": "model", "epoch": "1"}),),
    "whereabouts": (OWN,),
    "pins_by_holder": (),
    "load_begins": ([], "request"),
    "load_ended": ("request", {}, False),
    "stop_direct_reads": ("disk", "no GPU"),
    "attach": (1, 0, 0),
    "detach": (),
    "attached": (),
}


class Client:
    """Sends whatever it is told, and waits for what comes."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(HANG)
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
    with serving(tmp_path, 16, {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1MiB"}) as served:
        yield served


def test_the_documentation_names_each_call_with_its_arguments():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\w, ]+) \|", PAGE, re.MULTILINE)
    said = {name: (int(number), [] if of == "none" else of.split(", ")) for name, number, of in rows}
    assert said == {name: (call.number, list(call.arguments)) for name, call in CALLS.items()}
    assert f"most {LONGEST >> 20} MiB" in PAGE and HEADER.size == 24


def test_a_field_or_a_word_anywhere_in_a_message_makes_it_another_protocol():
    """Nobody has to list them: whatever a call is made of is in the text that both sides compare."""
    text = describe()
    stack = (Terms, LoadLimit, Arriving, Declined, TooSmall, Missing, Whereabouts)
    for of in (KVGroup, ChunkLayout, Namespace, Event, Usage, FrameRead, ServedLookup, *stack):
        assert all(f"{field.name}: " in text for field in attrs.fields(of)), of
    assert all(kind.value in text for each in (EventKind, KVKind, Medium, ReadStatus) for kind in each)
    assert "Slot: arena: int, index: int" in text and "Header: nbytes: int" in text


def test_calls_have_the_arguments_of_the_interface():
    shared = [name for name in CALLS if hasattr(Stack, name)]
    assert len(shared) == len(CALLS) - 4  # open, and the calls of workers
    for name in shared:
        method = getattr(Stack, name)
        if callable(method) and name not in ("step", "pins_by_holder"):
            code = method.__code__
            count = code.co_argcount + code.co_kwonlyargcount
            assert list(CALLS[name].arguments) == list(code.co_varnames[1:count]), name


def test_a_lookup_comes_back_as_it_was():
    """Whatever a location is made of, which of its chunks have slots, and why it ends where it does."""
    slots, sources = [Slot(0, 7), FRAME, FRAME, Slot(1, 8)], ["cpu", "gds", "gds", "ssd"]
    for rest in (Declined("far", 3, None, 0.5), TooSmall("cpu", 2), Missing("not stored"), None):
        for arriving in (Arriving(2, "disk", 1.5), None):
            found = Lookup(slots, sources, [], chunks=4, chain=5, exact=3, arriving=arriving, rest=rest)
            assert result("lookup", encode(ServedLookup.of(found))).found == found


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
            header, _ = client.ask(CALLS["lookup"].number, encode(([key], "request", ANY)))
            assert header.call == REFUSED


@pytest.mark.parametrize("name", ["lookup", "prefetch"])
def test_a_path_that_begins_before_its_prompt_is_refused(name, served):
    with Client(served.path) as client:
        client.ask(1, encode((OPENING,)))
        *others, terms = RIGHT[name]
        header, answer = client.ask(CALLS[name].number, encode((*others, attrs.asdict(terms) | {"skipped": -1})))
        assert header.call == REFUSED and "skipped" in reason(answer)


@pytest.mark.parametrize("name", ["on_request", "lookup", "prefetch", "reserve", "whereabouts"])
def test_a_call_that_names_too_many_chunks_is_refused(name, served):
    with Client(served.path) as client:
        client.ask(1, encode((OPENING,)))
        _, *others = RIGHT[name]
        header, answer = client.ask(CALLS[name].number, encode(([OWN[0]] * (MOST_CHUNKS + 1), *others)))
        assert header.call == REFUSED and str(MOST_CHUNKS) in reason(answer)


def test_a_prompt_that_is_longer_than_a_call_is_cached_up_to_there(served):
    stack, keys = served.stack(), make_keys(MOST_CHUNKS + 5)
    stack.on_request(keys)
    stack.prefetch(keys)
    assert list(stack.reserve(keys, "store")) == keys[:16]
    stack.commit("store")
    assert len(stack.lookup(keys, "request").slots) == 16
    assert len(stack.whereabouts(keys)) == len(keys)


def test_the_whereabouts_of_any_path_come_with_a_step(served):
    stack, keys, answers = served.stack(), make_keys(MOST_CHUNKS + 5), []
    stack.reserve(keys[:3], "store")
    stack.commit("store")
    stack.ask_whereabouts(keys, answers.append)
    assert not answers, "nobody waits for them"
    wait_until(lambda: stack.step() is not None and answers)
    (places,) = answers
    assert [bool(place.tiers) for place in places] == [True] * 3 + [False] * (MOST_CHUNKS + 2)


def test_calls_that_a_busy_server_does_not_take_are_sent_with_later_steps(served):
    """More than the socket holds; no call that waits for its answer follows."""
    stack, keys, answers, over = served.stack(), make_keys(256), [], threading.Event()
    served.server.ask(over.wait)
    for _ in range(200):
        stack.ask_whereabouts(keys, answers.append)
    over.set()
    wait_until(lambda: stack.step() is not None and len(answers) == 200)


def test_an_engine_is_told_once_that_events_were_lost(served):
    stack = served.stack()
    assert stack.gaps == 0
    (session,) = served.server.sessions.values()
    lost = [Event(EventKind.STORED, "cpu")] * (sessions._MOST_EVENTS + 1)
    served.server.ask(lambda: session.tell(lost)).result()
    wait_until(lambda: stack.step() is not None and stack.gaps)
    stack.drain(HANG)
    assert stack.gaps == 1


def test_slots_are_reserved_in_as_many_calls_as_it_takes(tmp_path):
    keys = make_keys(2 * MOST_RESERVED + 10)
    with serving(tmp_path, slots=len(keys)) as served:
        stack = served.stack()
        assert list(stack.reserve(keys, "store")) == keys
        stack.commit("store")
        assert len(stack.lookup(keys, "request").slots) == len(keys)


def test_an_engine_has_the_slots_of_one_self_test(served):
    with Client(served.path) as client:
        client.ask(1, encode((OPENING,)))
        call = CALLS["reserve_self_test_slots"].number
        assert client.ask(call, encode(("first", 1)))[0].call == DONE
        for holder, count in (("first", 2), ("second", 1)):
            header, answer = client.ask(call, encode((holder, count)))
            assert header.call == REFUSED and "self-test" in reason(answer)
        client.ask(CALLS["release"].number, encode(("first",)))
        assert client.ask(call, encode(("second", 1)))[0].call == DONE


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
    [(b"HTTP/1.1 400 Bad", "not kvtier serve"), (PREAMBLE[:8] + bytes(8), "different releases")],
    ids=["another program", "another release"],
)
def test_a_client_of_another_protocol_gets_an_explanation(preamble, why):
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(preamble)
    with theirs, pytest.raises(ProtocolError, match=why):
        list(connection.receive())
    connection.close()


def test_what_the_other_side_said_before_it_closed_explains_a_send_that_fails():
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(PREAMBLE[:8] + bytes(8))
    theirs.close()
    with pytest.raises(ProtocolError, match="different releases"):
        connection.send(Header(0, 1, CALLS["step"].number, 0, 0), b"")
    connection.close()


#: Many engines at once; each says why it is not served.
ENGINES_OF_ANOTHER_RELEASE = """
import os, sys
from pathlib import Path
from kvtier_remote import protocol
protocol.PREAMBLE = protocol.PREAMBLE[:8] + bytes(8)
from kvtier_remote.client import RemoteStack
from kvtier_testing.samples import make_layout
from kvtier_core.types import Namespace
opening = protocol.Opening("model", "engine", Namespace.of({}), make_layout())
children = []
for _ in range(30):
    if not (child := os.fork()):
        os.write(1, f"{RemoteStack(Path(sys.argv[1]), opening).describe()}\\n".encode())
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def test_each_engine_of_another_release_is_told_so(served):
    command = [sys.executable, "-c", ENGINES_OF_ANOTHER_RELEASE, str(served.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 30 and [each for each in said if "install the same release for both" not in each] == []


def test_garbage_in_pieces_harms_no_connection(served):
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
