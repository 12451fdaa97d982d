"""The tokens of each request are counted once in each tier: queried = hit + missed + bypassed."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
from fake_host import CHUNK, FRAME, Host, prompt
from test_scheduler_side import host, stack  # noqa: F401 - fixtures
from test_waiting import ASKED, CHUNKS, Clock, computes, delivers, served  # noqa: F401 - fixtures

from kvtier_core.engine.request_view import Bypass
from kvtier_core.interfaces import Observer
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.types import EventKind

TIERS = ("heap", "disk")
PARTS = (EventKind.HIT, EventKind.MISSED, EventKind.BYPASSED)


class Ledger:
    """What events say of tokens, by kind and tier."""

    def __init__(self, engine: Host):
        self.events = []
        engine.side.events.listeners.append(self.events.extend)

    def tokens(self, tier):
        """Queried, hit, missed, bypassed."""
        sums = Counter()
        for event in self.events:
            if event.tier == tier:
                sums[event.kind] += event.tokens
        return tuple(sums[kind] for kind in (EventKind.QUERIED, *PARTS))

    def assert_adds_up(self):
        for tier in TIERS:
            queried, *parts = self.tokens(tier)
            assert queried == sum(parts), tier

    def whys(self):
        return {event.why for event in self.events if event.kind is EventKind.BYPASSED}


def test_a_miss_then_a_hit_from_each_tier(host):  # noqa: F811
    engine = host(chunks=8)
    ledger = Ledger(engine)
    engine.ask("first", ASKED)
    assert ledger.tokens("heap") == ledger.tokens("disk") == (35, 0, 35, 0)
    engine.ask("second", ASKED)
    assert ledger.tokens("heap") == (70, 32, 38, 0)
    assert ledger.tokens("disk") == (38, 0, 38, 0), "it is asked for what the heap has not"
    engine.ask("other", prompt(2, 8 * CHUNK + 3))  # the heap has no room for both
    engine.ask("third", ASKED)
    ledger.assert_adds_up()
    assert ledger.tokens("disk")[1] == 32


def test_bypassed_tokens_count_in_every_tier(host):  # noqa: F811
    engine = host()
    ledger = Ledger(engine)
    engine.ask("first", ASKED, identity=Bypass("nobody knows"))
    engine.ask("second", ASKED, most_loaded=0)
    assert ledger.tokens("heap") == ledger.tokens("disk") == (70, 0, 0, 70)
    assert ledger.whys() == {"not looked up"}


def test_declined_tokens_are_not_misses(served):  # noqa: F811
    engine = served()
    ledger = Ledger(engine)
    computes(engine, CHUNK / 0.1)
    delivers(engine, FRAME / 0.2)
    engine.ask("second", ASKED)
    assert ledger.tokens("heap") == (35, 0, 35, 0)
    assert ledger.tokens("disk") == (35, 0, 3, CHUNKS * CHUNK)
    assert ledger.whys() == {"sooner computed than loaded"}


def test_a_load_that_fails_was_no_hit(host):  # noqa: F811
    engine = host()
    engine.ask("first", ASKED)
    ledger = Ledger(engine)
    engine.failing = {"second"}
    engine.ask("second", ASKED)
    assert ledger.tokens("heap") == (35, 0, 0, 35)


def test_an_abort_before_the_load_has_ended_counts_nothing(host):  # noqa: F811
    engine = host()
    engine.ask("first", ASKED)
    ledger = Ledger(engine)
    engine.late_loads = 3
    request = engine.submit("second", ASKED)
    engine.step()
    assert request.state == "loading"
    engine.finish(request, "abort")
    engine.settle()
    assert ledger.tokens("heap") == (0, 0, 0, 0)


def test_loads_have_their_seconds(served):  # noqa: F811
    engine = served()
    ledger = Ledger(engine)
    engine.late_loads = 2
    request = engine.submit("second", ASKED)
    while request.state == "waiting":
        engine.step()
    keys = tuple(engine.side._requests.get("second").path)
    engine.side._clock.now += 0.25
    engine.run(request)
    (loaded,) = [event for event in ledger.events if event.kind is EventKind.LOADED]
    assert (loaded.tier, loaded.nbytes) == ("heap", CHUNKS * engine.layout.payload_nbytes)
    assert loaded.seconds == 0.25
    assert loaded.keys == keys and len(keys) == CHUNKS


class Remembering(Observer):
    def __init__(self):
        self.events = []

    def observe(self, events):
        self.events += events


def test_an_observer_learns_of_a_request_its_tokens_by_tier_its_wait_and_the_computing_avoided(stack):  # noqa: F811
    first = Host(stack())
    first.ask("first", ASKED)
    first.close()
    seen, clock = Remembering(), Clock()
    engine = Host(stack(), clock=clock, observers=Observers([("seen", seen)]))
    engine.step()  # the self-test
    computes(engine, CHUNK / 0.1)
    request = engine.submit("second", ASKED)
    assert engine.side.match(request.view(), 0) is None
    clock.now = 0.25
    engine.run(request)
    engine.close()  # the observer has been told everything
    told = [event for event in seen.events if event.request == "second"]
    assert [(event.tier, event.tokens) for event in told if event.kind is EventKind.HIT] == [("disk", CHUNKS * CHUNK)]
    seconds = {event.kind: (event.tier, pytest.approx(event.seconds)) for event in told}
    assert seconds[EventKind.WAITED] == ("disk", 0.25)
    assert seconds[EventKind.AVOIDED] == ("disk", 0.4)
    assert told[-1].kind is EventKind.FINISHED


def test_the_usage_is_reported_when_it_has_changed(host):  # noqa: F811
    engine = host()
    ledger = Ledger(engine)
    engine.ask("first", ASKED)
    told = {event.tier: event.usage for event in ledger.events if event.usage}
    engine.step()
    last = {event.tier: event.usage for event in ledger.events if event.usage}
    assert list(last.values()) == engine.manager.usage()
    assert told.keys() == last.keys() == set(TIERS)
    count = len(ledger.events)
    for _ in range(3):
        engine.step()
    assert len(ledger.events) == count, "nothing has changed"


def test_the_log_says_how_many_chunks_were_loaded_and_which_tokens_were_hits(served):  # noqa: F811
    engine = served()
    engine.ask("second", ASKED)
    engine.ask("third", ASKED)
    heap, disk = engine.side.events.readings.lines()
    assert "loaded 8 chunks (" in heap and heap.endswith("hit 32 of 70 tokens")
    assert disk.endswith("hit 32 of 38 tokens")


@pytest.mark.parametrize("seed", range(3))
def test_the_accounting_adds_up_whatever_happens(host, seed):  # noqa: F811
    engine, rng = host(chunks=6, blocks=60), random.Random(seed)
    ledger = Ledger(engine)
    heads = [prompt(each, 3 * CHUNK) for each in range(3)]
    asked = 0
    for number in range(40):
        tokens = prompt(number, rng.randrange(3 * CHUNK, 6 * CHUNK), rng.choice(heads))
        more = {"identity": Bypass("no")} if rng.random() < 0.1 else {}
        engine.failing = {f"{number}"} if rng.random() < 0.2 else set()
        engine.ask(f"{number}", tokens, most_loaded=rng.choice([0, CHUNK] + 8 * [sys.maxsize]), **more)
        asked += len(tokens)
        ledger.assert_adds_up()
    assert ledger.tokens("heap")[0] == asked
    hits = sum(ledger.tokens(tier)[1] for tier in TIERS)
    assert hits == sum(engine.side.events.readings.of(tier).savings["loaded"] for tier in TIERS)
    assert hits > 0 and all(ledger.tokens(tier)[1] for tier in TIERS)
