"""How long an engine waits for its tiers, what it declines, and what it says of both."""

from __future__ import annotations

import attrs
import pytest
from fake_host import CHUNK, FRAME, Host, prompt
from patience import HANG
from test_scheduler_side import said, stack  # noqa: F401 - fixtures

from kvtier_core.engine.request_view import Bypass
from kvtier_core.engine.scheduler.prefill_speed import Computed, Steps, pairs
from kvtier_core.engine.step import ScheduledRequest, Step
from kvtier_core.stack.outcomes import Arriving, Lookup
from kvtier_core.telemetry.readings import Readings
from kvtier_core.types import EventKind

CHUNKS = 4
ASKED = prompt(1, CHUNKS * CHUNK + 3)


def a_token(host):
    """Seconds that it takes to compute one."""
    return host.side._waiting.speed.seconds(0, 1, 1)


def one_step(host, seconds, *scheduled):
    """A step that computes so many tokens of requests behind so many: of each its request, these two counts."""
    host.side.plan(Step([ScheduledRequest(each.request_id, *counts) for each, *counts in scheduled], (), tables))
    host.side._clock.now += seconds
    host.side.step_ended()


def tables(_):
    return [list(range(30))]


def test_requests_that_decode_do_not_pull_the_speed_of_the_engine_down(served):
    host = served()
    computes(host, 20_000)
    requests = [host.submit(f"{number}", prompt(number, CHUNK - 2)) for number in range(128)]
    for each in requests:
        host.side.match(each.view(), 0)
        host.side.admitted(each.view(), tables(each), 0)
    for _ in range(200):
        one_step(host, 0.025, *((each, len(each.tokens), 1) for each in requests))
    assert 1 / a_token(host) == pytest.approx(20_000)
    for each in requests:
        host.side.finished(each.view(), "abort")


def test_tokens_recomputed_after_a_preemption_count_as_prompt(served):
    host = served()
    request = host.submit("again", prompt(1, 10) + prompt(2, 90))
    host.side.admitted(attrs.evolve(request.view(), prompt_tokens=10), tables(request), 0)
    one_step(host, 0.1, (request, 0, 100))
    assert 1 / a_token(host) == pytest.approx(1000)
    host.side.finished(request.view(), "abort")


# -- what was saved ------------------------------------------------------------------------------------


def loaded_from_two_tiers(host, waits):
    """The events of a load of 400 tokens in 0.4 s, by a request that had waited so."""
    state = host.side.track(host.submit("second", ASKED).view())
    state.wait.seconds, state.load.begun = waits, host.side._clock()
    state.load.sources.update({"heap": 300, "disk": 100})
    host.side._clock.now += 0.4
    events = host.side._waiting.loaded(state)
    assert not host.side._waiting.end(state, 0), "its waits are counted once"
    host.side.finished(state.view, "abort")
    return events


def seconds(events):
    return [(event.kind, event.tier, pytest.approx(event.seconds)) for event in events]


def test_seconds_are_divided_by_tokens_and_counted_once(served):
    host = served()
    computes(host, 200)
    events = loaded_from_two_tiers(host, {"disk": 0.5, "far": 0.25, "": 7.0})
    assert seconds(events) == [
        (EventKind.AVOIDED, "heap", 1.5),
        (EventKind.WAITED, "heap", 0.3),
        (EventKind.AVOIDED, "disk", 0.5),
        (EventKind.WAITED, "disk", 0.6),
        (EventKind.WAITED, "far", 0.25),
    ]
    assert net_shown(events) == [
        *[("heap", 1.5), ("heap", pytest.approx(1.2)), ("disk", 0.5), ("disk", pytest.approx(-0.1))],
        ("far", -0.25),
    ]


def test_loads_before_the_speed_was_known_are_counted_once_it_is(served):
    host = served()
    readings = Readings()
    readings.add(early := loaded_from_two_tiers(host, {"disk": 0.5}))
    assert [readings.of(tier).net for tier in ("heap", "disk")] == [None, None]
    assert readings.lines_of_savings()[1] == (
        "disk: seconds saved are unknown: this engine has computed no prompt; 0.60 s waited, "
        "0 tokens loaded, 0 declined"
    )
    assert net_shown(early) == []
    assert not host.side._waiting.step_ended()
    computes(host, 200)
    later = host.side._waiting.step_ended()
    assert seconds(later) == [(EventKind.AVOIDED, "heap", 1.5), (EventKind.AVOIDED, "disk", 0.5)]
    assert not host.side._waiting.step_ended(), "it is counted once"
    assert net_shown([*early, *later]) == [("heap", pytest.approx(1.2)), ("disk", pytest.approx(-0.1))]


def test_a_load_saves_computing_for_all_that_the_engine_serves_meanwhile(served):
    host = served()
    computes(host, 200)
    host.side._waiting.step_planned(4, Computed(0, 0, 4))
    avoided = [event.seconds for event in loaded_from_two_tiers(host, {}) if event.kind is EventKind.AVOIDED]
    assert avoided == [pytest.approx(5 * 1.5), pytest.approx(5 * 0.5)]


def net_shown(events):
    shown = Readings().add(events)
    return [(*each.labels, each.value) for each in shown if each.metric == "kvtier_net_seconds_saved"]


def saved(host, tier="disk"):
    return host.side.events.readings.of(tier)


# -- waiting and declining -----------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def served(stack):  # noqa: F811
    """``served(**settings)`` is a host that finds ASKED on its disk, with a clock that the test moves."""
    hosts = []

    def start(**settings):
        first = Host(stack())
        first.ask("first", ASKED)
        first.close()
        hosts.append(Host(stack(**settings), clock=Clock()))
        hosts[-1].step()  # the self-test
        hosts[-1].side.step_ended()
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


def computes(host, tokens_per_second):
    """What the host's steps would have shown."""
    speed = host.side._waiting.speed
    speed._steps[0], speed._costs[0] = Steps(2048, pairs(0, 2048), tokens_per_second), 1 / tokens_per_second


def delivers(host, nbytes_per_second):
    """What its reads would have shown."""
    tier = host.manager.tiers[0]
    tier._reads._speed.rate = nbytes_per_second
    return tier


def test_no_request_waits_longer_than_computing_takes(served, said):  # noqa: F811
    host = served(load_wait="10s")
    clock = host.side._clock
    computes(host, CHUNK / 0.1)  # a chunk in a tenth of a second
    request = host.submit("second", ASKED)
    answers = []
    for clock.now in (0.0, 0.39, 0.4):  # never stepped again: nothing comes up
        host.side._stepped = True
        answers.append(host.side.match(request.view(), 0))
    assert answers == [None, None, 0]
    host.side.admitted(request.view(), [list(range(10))], 0)
    assert saved(host).net == pytest.approx(-0.4)
    host.side.finished(request.view(), "abort")


@pytest.mark.parametrize("computed", [0, 2 * CHUNK])
def test_the_limit_of_a_load_is_the_time_of_computing_as_many_chunks(served, computed):
    host = served()
    waiting, state = host.side._waiting, host.side.track(host.submit("second", ASKED).view())
    waiting.speed._steps[0], waiting.speed._costs = Steps(CHUNK, pairs(0, CHUNK), 100.0), [1e-3, 1e-2, 1e-6]
    state.match.computed = computed
    for chunks in range(5):
        expected = waiting.speed.seconds(computed, computed + chunks * CHUNK, len(ASKED))
        assert waiting.limit(state).computing(chunks) == pytest.approx(expected)
    host.side.finished(state.view, "abort")


def test_a_waiting_request_is_not_looked_up_in_each_step(served, monkeypatch):
    host = served(load_wait="10s")
    view, lookups = host.submit("second", ASKED).view(), []
    lookup = host.manager.lookup
    monkeypatch.setattr(host.manager, "lookup", lambda *args: lookups.append(args) or lookup(*args))
    host.side._stepped = True  # nothing comes up yet
    assert host.side.match(view, 0) is None
    assert [host.side.still_waits("second", view.tokens, 0) for _ in range(100)] == [True] * 100
    assert len(lookups) == 1
    host.side.drain(HANG)
    assert not host.side.still_waits("second", view.tokens, 0)
    assert host.side.match(view, 0) == CHUNKS * CHUNK
    host.side.finished(view, "abort")


def test_a_waiting_request_is_looked_up_when_it_may_wait_no_longer(served):
    host = served(load_wait="1s")
    view = host.submit("second", ASKED).view()
    host.side._stepped = True
    assert host.side.match(view, 0) is None
    for host.side._clock.now, waits in ((0.9, True), (1.0, False)):
        assert host.side.still_waits("second", view.tokens, 0) == waits
    host.side.finished(view, "abort")


def test_a_request_that_has_changed_is_looked_up(served):
    host = served(load_wait="10s")
    view = host.submit("second", ASKED).view()
    host.side._stepped = True
    assert not host.side.still_waits("second", view.tokens, 0), "it was never looked up"
    assert host.side.match(view, 0) is None
    assert not host.side.still_waits("second", view.tokens, CHUNK), "the engine has some of it by now"
    assert not host.side.still_waits("second", view.tokens + 1, 0)
    assert host.side.still_waits("second", view.tokens, 0)
    host.side.bypass("second", Bypass("for a reason"))
    assert not host.side.still_waits("second", view.tokens, 0)
    host.side.finished(view, "abort")


@pytest.mark.parametrize("load", ["auto", "always"])
def test_a_store_that_is_silent_for_so_long_is_not_waited_for(served, load):
    """Neither by a request whose chunks an earlier one waits for, nor by one whose chunks would be read next."""
    host = served(load_wait="1s", load=load)
    clock, tier = host.side._clock, host.manager.tiers[0]
    tier.chooser._clock = clock
    computes(host, CHUNK / 0.1)
    tier._reads._speed.begin(1, 0.0)
    for clock.now, answer in ((0.3, None), (1.0, 0)):
        request = host.submit(f"{clock.now}", ASKED)
        host.side._stepped = True
        assert host.side.match(request.view(), 0) == answer
        host.side.finished(request.view(), "abort")


def test_with_load_always_the_wait_is_that_of_the_configuration(served):
    host = served(load_wait="10s", load="always")
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    request = host.submit("second", ASKED)
    for clock.now in (0.0, 0.4, 9.9):
        host.side._stepped = True
        assert host.side.match(request.view(), 0) is None
    host.side.finished(request.view(), "abort")


def test_a_slow_store_is_declined_and_the_line_has_both_numbers(served, said):  # noqa: F811
    host = served()
    computes(host, CHUNK / 0.1)
    delivers(host, FRAME / 0.2)
    assert host.ask("second", ASKED) == 0
    why = "disk has 4 more chunks: 0.800 s to load them, 0.400 s to compute them"
    assert said()[-1] == f"kvtier: second: 35 tokens: 0 from kvtier, 35 computed ({why})"
    assert saved(host).declined == CHUNKS * CHUNK


def test_declined_chunks_after_a_load_count_once(served):
    host = served()
    computes(host, CHUNK / 0.1)
    delivers(host, FRAME / 1e-3)
    host.ask("first", ASKED[: 2 * CHUNK + 1])
    delivers(host, FRAME / 1e3)._reads._speed.answer = 1.0
    assert host.ask("second", ASKED) == 2 * CHUNK
    assert sum(saved(host, tier).declined for tier in ("heap", "disk")) == 2 * CHUNK


def test_a_declined_store_is_probed_and_taken_again(served, said):  # noqa: F811
    host = served()
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    tier = delivers(host, FRAME / 1e3)
    assert host.ask("second", ASKED) == 0
    assert "to load them" in said()[-1]
    assert tier._reads._speed.rate != FRAME / 1e3, "a probe was measured"
    clock.now = 2.0
    tier._reads._speed.rate = FRAME / 1e-3
    host.manager.arenas[0].make_room(32)
    assert host.ask("third", ASKED) == CHUNKS * CHUNK
    assert said()[-1].startswith("kvtier: third: 35 tokens: 32 from kvtier (disk 32), 3 computed")


def test_waiting_and_computing_are_reported_with_a_hit(served, said):  # noqa: F811
    host = served()
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    request = host.submit("second", ASKED)
    assert host.side.match(request.view(), 0) is None
    clock.now = 0.25
    host.run(request)
    assert (
        said()[-1]
        == "kvtier: second: 35 tokens: 32 from kvtier (disk 32; waited 0.250 s, computing takes 0.400 s), 3 computed"
    )
    assert (saved(host).savings["loaded"], saved(host).avoided, saved(host).waited) == (
        32,
        *map(pytest.approx, (0.4, 0.25)),
    )


def test_the_engines_own_queue_is_not_waiting(served, said):  # noqa: F811
    """Everything is READY after a quarter of a second, and the engine has blocks for the request after thirty."""
    host = served(load_wait="1s")
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    request = host.submit("second", ASKED)
    assert host.side.match(request.view(), 0) is None
    host.side.drain(HANG)
    for clock.now in (0.25, 0.5, 30.0):
        assert host.side.match(request.view(), 0) == CHUNKS * CHUNK
    host.run(request)
    assert (
        said()[-1]
        == "kvtier: second: 35 tokens: 32 from kvtier (disk 32; waited 0.250 s, computing takes 0.400 s), 3 computed"
    )
    assert saved(host).net == pytest.approx(0.15)


def test_steps_in_which_the_engine_does_not_ask_are_not_waiting(served):
    """It has asked in one step, has no room for more requests in the next ones, and then asks again."""
    host = served(load_wait="1s")
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    request = host.submit("second", ASKED)
    assert host.side.match(request.view(), 0) is None
    for clock.now in (0.0, 0.2, 10.0, 20.0):
        host.side.plan(Step((), (), tables))
    clock.now = 30.0
    host.run(request)
    assert saved(host).waited == pytest.approx(0.2)


def test_a_request_that_the_engine_seldom_asks_about_waits_no_longer_than_it_may(served):
    host = served(load_wait="1s")
    clock = host.side._clock
    host.manager.step = list  # nothing comes up
    request = host.submit("second", ASKED)
    answers = []
    for clock.now in (0.0, 10.0, 20.0):
        answers.append(host.side.match(request.view(), 0))
        for _ in range(3):
            host.side.plan(Step((), (), tables))
            clock.now += 0.6
    assert answers == [None, None, 0]
    host.side.finished(request.view(), "abort")


def test_each_tier_is_charged_with_what_it_was_waited_for(served):
    host = served(load_wait="10s")
    clock = host.side._clock
    computes(host, CHUNK / 1.0)
    state = host.side.track(host.submit("second", ASKED).view())
    waiting = host.side._waiting
    for clock.now, awaited in ((0.0, "far"), (1.0, "disk"), (1.5, "")):
        waiting.asked(state)
        assert waiting.allows(state, Lookup(arriving=Arriving(4, awaited)))
    clock.now = 3.5
    waiting.asked(state)
    assert not waiting.end(state, 32)
    clock.now = 4.5
    state.load.sources.update({"disk": 24, "heap": 8})
    waited = {event.tier: event.seconds for event in waiting.loaded(state) if event.kind is EventKind.WAITED}
    assert waited == {"far": 1.0, "disk": 0.5 + 0.75, "heap": 0.25}
    assert state.wait.total == 3.5
    host.side.finished(state.view, "abort")


def test_chunks_on_their_way_are_waited_for_in_their_tier(served):
    host = served()
    request = host.submit("second", ASKED)
    host.manager.lookup(host.side._requests.keys(host.side.track(request.view()), 32), "other")
    host.manager._promotions.start()
    found = host.manager.lookup(host.side._requests.get("second").path, "second")
    assert (found.arriving.chunks, found.arriving.tier) == (CHUNKS, "disk")
    host.manager.release("other")
    host.manager.release("second")
    host.side.finished(request.view(), "abort")


def test_a_load_that_fails_was_waited_for_in_vain(served):
    host = served()
    clock = host.side._clock
    computes(host, CHUNK / 0.1)
    host.failing = {"second"}
    request = host.submit("second", ASKED)
    assert host.side.match(request.view(), 0) is None
    clock.now = 0.25
    host.run(request)
    assert saved(host).savings == {"loaded": 0, "declined": 0, "avoided": 0.0, "waited": 0.25, "unpriced": 0}


def test_after_a_warm_restart_what_was_saved_is_reported_when_the_engine_has_computed_a_prompt(served):
    host = served()
    told = []
    host.side.events.listeners.append(told.extend)
    clock = host.side._clock
    request = host.submit("second", ASKED)
    assert host.side.match(request.view(), 0) is None
    clock.now = 0.25
    host.run(request)
    host.step()
    for _ in host.plans:
        host.side.step_ended()
    assert saved(host).net is None
    assert net_shown(told) == []
    other = host.submit("other", prompt(2, 90))
    host.side.admitted(other.view(), tables(other), 0)
    one_step(host, 9.0, (other, 0, 90))
    host.step()
    assert saved(host).net == pytest.approx(3.2 - 0.25)
    assert net_shown(told) == [("disk", pytest.approx(3.2 - 0.25))]
    host.side.finished(other.view(), "abort")


def test_chunks_of_a_queued_request_are_promoted(served, said):  # noqa: F811
    host = served()
    request = host.submit("second", ASKED)
    host.side.arrived(request.view())
    host.side.drain(HANG)
    assert host.side.match(request.view(), 0) == CHUNKS * CHUNK
    host.run(request)
    assert said()[-1] == "kvtier: second: 35 tokens: 32 from kvtier (disk 32), 3 computed"
