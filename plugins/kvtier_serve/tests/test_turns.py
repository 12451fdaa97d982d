"""No turn of the owner's thread does more than a bounded amount of work, whatever the server holds and whoever hangs.

Work is counted in steps: lines of Python, and rounds of loops within a line. Compiled code is not counted.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter

import pytest
from books import used
from patience import wait_until
from served import config_of
from test_openings import GATED, OPENS, PLUGIN, READS

from kvtier_core.stack.outcomes import ANY, Terms
from kvtier_core.types import Namespace
from kvtier_remote.connection import connect
from kvtier_remote.protocol import CALLS, MOST_CHUNKS, MOST_RESERVED, Header, Opening, encode
from kvtier_serve.operators.console import Condemned, Console, Documents, Named, Scope
from kvtier_serve.server import Server
from kvtier_serve.sessions import Session
from kvtier_serve.tenants import UNBOUNDED, Quota
from kvtier_testing.samples import make_layout

LAYOUT = make_layout((64,), 1)
CHUNKS, NAMESPACES, WITH_MEMORY = 30_000, 300, 20
#: Steps of a turn: a core makes some 15 000 in a millisecond.
MOST = 30_000
#: Steps of a call, and more for each chunk that it names.
FIXED, EACH = 2000, 40
NBYTES = LAYOUT.frame_nbytes
OURS = b"ours"


class Steps:
    """Counts the steps of this thread, by function."""

    def __init__(self):
        self.by = Counter()

    @property
    def count(self):
        return self.by.total()

    def _step(self, frame, event, argument):
        self.by[frame.f_code] += 1
        return self._step

    @contextlib.contextmanager
    def counted(self):
        self.by.clear()
        before = sys.gettrace()
        sys.settrace(self._step)
        try:
            yield
        finally:
            sys.settrace(before)


class Full:
    """A server of many namespaces, whose memory is full, and whose turns are those of this thread.

    Half of the memory is one tenant's, and the rest that of many.
    """

    def __init__(self, folder):
        config = config_of(CHUNKS, {**GATED, "threads": 1}, frame=NBYTES, plugins=(PLUGIN,))
        self.server = Server(config, folder / "s", Quota(soft=CHUNKS * NBYTES))
        self.tenants = self.server.spaces.tenants
        self.console = Console(self.server)
        self.sessions = [self.session(f"model {number}") for number in range(NAMESPACES)]
        self.engine = self.sessions[0]
        drawn = random.Random(0)
        self.fresh = iter(lambda: drawn.randbytes(32), None)
        self.keys = []
        for session in self.sessions[:WITH_MEMORY]:
            if session.reserve([next(self.fresh)], "store", b"", (), ""):
                session.commit("store", None, ())
        self.store(CHUNKS // 2, OURS)
        for number in range(CHUNKS // 2 // MOST_RESERVED):
            self.store(MOST_RESERVED, f"tenant {number}".encode())
        self.rest()

    def session(self, model):
        opening, got = Opening(model, "engine", Namespace.of({"model": model}), LAYOUT), []
        self.server.spaces.open(opening, got.append)
        wait_until(lambda: (self.server.turn(0), got)[1])
        number = len(self.server.sessions) + 1000
        session = self.server.sessions[number] = Session(number, opening, got[0].value)
        return session

    def store(self, chunks, salt):
        """A prompt of a tenant; returns its keys."""
        keys = [next(self.fresh) for _ in range(chunks)]
        for begin in range(0, chunks, MOST_RESERVED):
            if self.engine.reserve(keys[begin : begin + MOST_RESERVED], "store", salt, (), ""):
                self.engine.commit("store", None, ())
            self.server.turn(0)
        self.keys += keys
        return keys

    def pin(self, keys, salt, holder="request"):
        for begin in range(0, len(keys), 512):
            self.engine.lookup(keys[begin : begin + 512], f"{holder} {begin}", Terms(salt=salt))

    def unpin(self, keys, holder="request"):
        for begin in range(0, len(keys), 512):
            self.engine.release(f"{holder} {begin}")

    def rest(self):
        """Turn until nothing is under way."""
        self.turns(lambda: self.server.turn(0.01), lambda: not self.engine.space.stack.jobs)

    def turns(self, turn, until):
        """Take turns until there is nothing to do, and something holds."""
        wait_until(lambda: any(not turn() and until() for _ in range(1000)))

    def worst(self, until=lambda: True):
        """The steps of the longest turn, until there is nothing to do, and something holds."""
        steps, worst = Steps(), 0

        def turn():
            nonlocal worst
            with steps.counted():
                busy = self.server.turn(0.01)
            worst = max(worst, steps.count)
            return busy

        self.turns(turn, until)
        return worst

    def worst_asked(self, work):
        """The same, of work for an operator."""
        asked = self.server.ask(work)
        return self.worst(asked.done)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    full = Full(tmp_path_factory.mktemp("full"))
    yield full
    full.server.close(5.0)


@pytest.mark.more
def test_an_idle_turn_beside_many_namespaces_costs_little(full):
    assert full.worst() < MOST / 10


def test_a_store_that_fills_the_memory_is_evicted_for_in_bounded_turns(full):
    full.store(2000, b"newcomer")
    assert full.worst(lambda: not full.engine.space.stack.jobs) < MOST


def test_a_tenant_beyond_its_hard_quota_whose_chunks_are_in_use_costs_little(full):
    keys = full.store(4000, OURS)
    full.rest()
    full.pin(keys, OURS)
    full.tenants.set_quotas(UNBOUNDED, {full.tenants.name(OURS): Quota(hard=1000 * NBYTES)})
    assert full.worst() < MOST
    assert used(full.tenants)[full.tenants.name(OURS)] >= 4000 * NBYTES, "pinned chunks were evicted"
    full.unpin(keys)
    assert full.worst(lambda: full.tenants.name(OURS) not in full.tenants.over_hard) < MOST
    full.tenants.set_quotas(UNBOUNDED, {})


def test_room_is_made_by_those_beyond_a_soft_quota_at_the_cost_of_the_victims(full):
    names = [full.tenants.name(f"tenant {number}".encode()) for number in range(100)]
    full.tenants.set_quotas(UNBOUNDED, dict.fromkeys(names, Quota(soft=0)))
    steps = Steps()
    with steps.counted():
        if full.engine.reserve([next(full.fresh) for _ in range(128)], "store", b"newcomer", (), ""):
            full.engine.commit("store", None, ())
    assert steps.count < MOST
    assert full.worst(lambda: not full.engine.space.stack.jobs) < MOST


def test_hung_stores_are_not_waited_for(full):
    before = READS.passed
    with READS.shut():
        for session in full.sessions[:WITH_MEMORY]:
            assert session.lookup([next(full.fresh) for _ in range(4)], "request", ANY).arriving
        assert full.worst(lambda: READS.passed >= before + WITH_MEMORY) < MOST
        for session in full.sessions[:WITH_MEMORY]:
            session.release("request")
    assert full.worst() < MOST


@pytest.mark.parametrize("number", [1, 64, MOST_CHUNKS])
@pytest.mark.parametrize("call", ["on_request", "prefetch", "lookup", "reserve"])
def test_a_call_costs_what_it_names(call, number, full):
    path = full.store(number // 16, OURS) + [next(full.fresh) for _ in range(number - number // 16)]
    full.rest()
    arguments = {
        "on_request": (path, None, OURS),
        "prefetch": (path, Terms(salt=OURS)),
        "lookup": (path, "request", Terms(salt=OURS)),
        "reserve": (path, "store", OURS, (), ""),
    }
    steps = Steps()
    with steps.counted():
        getattr(full.engine, call)(*arguments[call])
    assert steps.count < FIXED + EACH * number
    with steps.counted():
        full.engine.release("request")
        full.engine.release("store")
    assert steps.count < FIXED + EACH * number
    full.rest()


def documents(full, tokens):
    """As many as a server takes."""
    namespace = full.engine.space.namespace.digest.hex()
    return Documents([[number] * tokens for number in range(64)], namespace=namespace)


OPERATIONS = {
    "status": lambda full: full.console.status(),
    "explain": lambda full: full.console.explain(Named(full.engine.space, full.keys, b"")),
    "arrange": lambda full: full.console.arrange(documents(full, 900)),
    "prefetch": lambda full: full.console.prefetch(Named(full.engine.space, full.keys[-512:], b"")),
    "erase": lambda full: full.console.erase(Condemned(cache_salt="theirs")),
    "clear": lambda full: full.console.clear(Scope()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators_ask_in_pieces(operation, full):
    assert full.worst_asked(lambda: OPERATIONS[operation](full)) < MOST
    full.rest()


def test_documents_shorter_than_a_chunk_are_arranged_in_pieces(full, monkeypatch):
    """Every order of them is open, so the search goes on for as long as it may."""
    monkeypatch.setattr("kvtier_serve.operators.arranging._MOST", 1000)
    assert full.worst_asked(lambda: full.console.arrange(documents(full, 1))) < MOST


def test_a_model_shrinks_in_pieces(full):
    full.store(10_000, b"newcomer")
    full.rest()
    full.server.spaces.set_quota("model 0", Quota(hard=1000 * NBYTES))
    assert full.worst(lambda: not full.server.spaces.shrinking) < MOST
    assert full.engine.space.stack.usage()[0].chunks <= 1000
    full.server.spaces.set_quota("model 0", Quota())


def test_an_engine_that_held_everything_ends_in_pieces(full):
    keys = full.store(10_000, b"newcomer")
    full.rest()
    full.pin(keys, b"newcomer")
    assert full.worst_asked(full.engine.end) < MOST
    assert not full.engine.space.stack.arenas[0].pins
    full.engine = full.sessions[0] = full.session("model 0")


@pytest.mark.more
def test_namespaces_come_and_go_beside_the_turns(full):
    arrived = []
    with OPENS.shut():
        for number in range(10):
            opening = Opening(f"new {number}", "engine", Namespace.of({"model": f"new {number}"}), LAYOUT)
            full.server.spaces.open(opening, arrived.append)
        assert full.worst() < MOST
    assert full.worst(lambda: len(arrived) == 10) < MOST
    for session in full.sessions[1:]:
        session.space.sessions.discard(session)
    assert full.worst(lambda: len(list(full.server.spaces)) <= 10) < MOST


def test_an_engine_that_calls_without_a_pause_is_served_in_turn_with_others(full):
    flood, other = connect(full.server.path), connect(full.server.path)
    for connection in (flood, other):
        body = encode((full.engine.opening,))
        connection.send(Header(len(body), 1, CALLS["open"].number, 0, 0), body)
    full.rest()
    for connection in (flood, other):
        assert connection.next() is not None
    number, body = 1, encode((full.keys[:256],))
    while not flood.unsent:
        number += 1
        flood.send(Header(len(body), number, CALLS["whereabouts"].number, 0, 0), body)
    body = encode(("request",))
    other.send(Header(len(body), 2, CALLS["release"].number, 0, 0), body)
    steps = Steps()
    with steps.counted():
        full.server.turn(0)
    assert steps.count < 3 * MOST
    assert other.next() is not None
    answered = sum(1 for _ in flood.receive())
    assert 0 < answered < number - 1, "one engine had the whole turn"
    for connection in (flood, other):
        connection.close()
    full.rest()
