"""A call that names what its engine does not have is refused whole; whatever it said, others keep what they have."""

from __future__ import annotations

import contextlib

import pytest
from engine_process import LAYOUT, NAMESPACE, OWN
from patience import HANG, wait_until
from served import PATIENT, config_of, serving
from sizes import some
from tables import tables
from test_kills import at_rest

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.stack.outcomes import ANY
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.connection import Connection
from kvtier_remote.protocol import Opening
from kvtier_serve.server import Server
from kvtier_testing.samples import make_keys

OTHERS = make_keys(14)[6:]


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path) as served:
        yield served


def sessions(served, count=2):
    """Those of as many engines, in order. A test calls them as the server's thread does."""
    for _ in range(count):
        served.stack()
    return [session for _, session in sorted(served.server.sessions.items())]


def on_owner(served, call, *arguments):
    return served.server.ask(lambda: call(*arguments)).result()


def refused(served, call, *arguments):
    """The reason; nothing has changed."""

    def tried():
        remembered = [*served.server.spaces, *served.server.sessions.values(), served.server.spaces.tenants]
        before = tables(*remembered)
        with pytest.raises(ContractError) as caught:
            call(*arguments)
        assert tables(*remembered) == before
        return str(caught.value)

    return on_owner(served, tried)


def test_an_engine_cannot_free_the_slots_of_another(served):
    first, second = sessions(served)
    slots = on_owner(served, first.reserve, OWN, "store", b"", [], "")
    on_owner(served, second.reserve, OTHERS[:2], "store", b"", [], "")
    for empty in (OWN, [OTHERS[0], OWN[0]], [OTHERS[0], OTHERS[0]]):
        assert refused(served, second.commit, "store", None, empty)
    others = on_owner(served, second.reserve, OTHERS[2:], "more", b"", [], "")
    assert set(slots.values()).isdisjoint(others.values()), "a slot that is being filled was given away"
    on_owner(served, first.commit, "store", None, [])
    found = on_owner(served, second.lookup, OWN, "request", ANY)
    assert list(found.slots) == list(slots.values())


def test_a_refused_commit_keeps_its_reservation(served):
    (session,) = sessions(served, 1)
    on_owner(served, session.reserve, OWN, "store", b"", [], "")
    for checksums, empty in ((None, OTHERS[:1]), ({OTHERS[0]: [0]}, []), ({OWN[0]: [0, 0]}, []), ({OWN[0]: []}, [])):
        assert refused(served, session.commit, "store", checksums, empty)
    on_owner(served, session.commit, "store", None, [])
    assert len(on_owner(served, session.lookup, OWN, "request", ANY).slots) == len(OWN)


@pytest.mark.parametrize("how", ["release", "end"])
def test_what_was_looked_up_and_committed_under_one_name_is_released(served, how):
    """The commit ends what was reserved, and nothing else."""
    (session,) = sessions(served, 1)
    on_owner(served, session.reserve, OWN, "first", b"", [], "")
    on_owner(served, session.commit, "first", None, [])
    on_owner(served, session.lookup, OWN, "both", ANY)
    on_owner(served, session.reserve, OTHERS[:2], "both", b"", [], "")
    on_owner(served, session.reserve_self_test_slots, "both", 1)
    on_owner(served, session.commit, "both", None, [])
    assert session.held == 1
    if how == "release":
        on_owner(served, session.release, "both")
        assert not session.held
    else:
        served.stacks[0].close()
    (space,) = served.server.spaces
    (arena,) = space.stack.arenas
    wait_until(lambda: not arena.pins and not arena.reserved)


def test_an_engine_has_the_slots_of_one_self_test(served):
    (session,) = sessions(served, 1)
    slots = on_owner(served, session.reserve_self_test_slots, "self-test", 1)
    assert on_owner(served, session.reserve_self_test_slots, "self-test", 1) == slots
    for holder, count in (("self-test", 2), ("another", 1), ("another", 0)):
        assert refused(served, session.reserve_self_test_slots, holder, count)
    on_owner(served, session.release, "self-test")
    assert on_owner(served, session.reserve_self_test_slots, "another", 1)


def test_a_holder_that_moved_has_one_path_and_is_released_everywhere(served):
    stays, moves = sessions(served)
    on_owner(served, stays.reserve, OWN, "store", b"", [], "")
    on_owner(served, stays.commit, "store", None, [])
    on_owner(served, moves.lookup, OWN, "request", ANY)
    on_owner(served, moves.reserve, OTHERS[:2], "request", b"", [], "")
    former = moves.space
    served.stacks[1].invalidate_all(NAMESPACE.renewed())
    wait_until(lambda: moves.space is not former)
    on_owner(served, moves.reserve, OTHERS, "request", b"", [], "")
    on_owner(served, moves.lookup, OTHERS, "request", ANY)
    assert not former.stack.arenas[0].pins and former.stack.arenas[0].reserved == 2
    on_owner(served, moves.commit, "request", None, [])
    assert not former.stack.arenas[0].reserved and not moves.space.stack.arenas[0].reserved
    assert former not in moves._holders, "it has left a space in which it has nothing"


def answer(server):
    while server.turn(0):
        pass


@pytest.fixture
def server(tmp_path):
    """One that this thread turns."""
    server = Server(config_of(16), tmp_path / "s")
    yield server
    server.close(0.0)


OPENING = Opening("model", "engine", NAMESPACE, LAYOUT)


def space_with_chunks(server):
    """That of a namespace whose engine has gone; its chunks are there."""
    with contextlib.closing(RemoteStack(server.path, OPENING, Waits(0.0, 0.0, 0.0))) as first:
        wait_until(lambda: answer(server) or first.step() or first.handles)
    (space,) = server.spaces
    space.stack.reserve(OWN, "store")
    space.stack.commit("store")
    return space


@pytest.mark.parametrize("answered", some([False, True]))
def test_an_epoch_that_begins_before_a_session_is_open_is_not_lost(server, answered):
    space = space_with_chunks(server)
    with contextlib.closing(RemoteStack(server.path, OPENING, Waits(0.0, 0.0, 0.0))) as stack:
        if answered:
            answer(server)
            stack.on_request(OWN)  # it looks for answers
        stack.invalidate_all(namespace := NAMESPACE.renewed())
        for number in range(10):
            stack.step()
            stack.lookup(OWN, "request")
            answer(server)
            assert not stack.lookup(OWN, "request").slots, f"it found chunks of before, in step {number}"
        (session,) = server.sessions.values()
        wait_until(lambda: answer(server) or stack.step() or session.space.namespace == namespace)
    assert not space.stack.arenas[0].pins


def test_an_engine_whose_epoch_is_refused_finds_nothing_earlier(server, monkeypatch):
    """Its session is still in the namespace of before when it answers."""
    space_with_chunks(server)
    monkeypatch.setattr(Connection, "wait", lambda connection, seconds: server.turn(0))
    monkeypatch.setattr(server.spaces, "renew", refuse)
    with contextlib.closing(RemoteStack(server.path, OPENING, Waits(HANG, HANG, 0.0))) as stack:
        answer(server)
        stack.invalidate_all(NAMESPACE.renewed())
        stack.step()
        assert not stack.lookup(OWN, "request").slots
        answer(server)
        assert "no room" in stack.lookup(OWN, "request").miss_reason


def refuse(*arguments):
    raise BackendError("no room")


def test_a_store_that_ends_with_another_server_says_nothing(tmp_path, caplog):
    with serving(tmp_path) as first:
        stack = RemoteStack(first.path, Opening("model", "engine", NAMESPACE, LAYOUT), PATIENT)
        assert stack.reserve(OWN, "store")
        attachment = stack.attachment
    with serving(tmp_path) as second:
        wait_until(lambda: not stack.step() and stack.attachment != attachment)
        stack.commit("store")
        stack.release("store")
        stack.drain(5.0)
        assert "refuses" not in caplog.text
        stack.close()
        wait_until(lambda: at_rest(second.server))
