"""Prefill apart from decode: one engine keeps what it computed for a while, another waits a while for it."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import pytest
from fake_host import CHUNK, FRAME, Host, prompt
from patience import HANG, wait_until
from servers.ports import free_port
from test_scheduler_side import host, stack  # noqa: F401 - fixtures
from test_waiting import Clock, computes

import kvtier_disk.plugin
import kvtier_gds.plugin
import kvtier_peers.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import Bypass
from kvtier_core.engine.scheduler.handovers import COPIED, LEASE
from kvtier_core.telemetry.readings import BYPASSED, TOO_LONG

ASKED = prompt(1, 4 * CHUNK + 3)
#: One after the other, none of them asked twice.
PROMPTS = 1000


def batched(items, size):
    return (items[start : start + size] for start in range(0, len(items), size))


def hand_over(host, *prompts, **more):  # noqa: F811
    """Compute prompts that another engine continues; of each, how many tokens are kept for that."""
    requests = [host.submit(f"{tokens[0]}", tokens, continued_elsewhere=True, **more) for tokens in prompts]
    host.run(*requests)
    host.settle()
    host.step()
    return [each.kept for each in requests]


def test_handed_over_chunks_are_pinned_until_a_step_after_their_lease(host):  # noqa: F811
    engine = host(clock=Clock())
    engine.late_stores = 9
    assert hand_over(engine, ASKED) == [4 * CHUNK]
    for engine.side._clock.now, pins in ((LEASE - 0.1, 4), (LEASE, 0)):
        engine.step()
        assert engine.manager.pins_by_holder().total() == pins
    engine.assert_at_rest()


def test_handed_over_chunks_outlive_prompts_that_need_their_room(host):  # noqa: F811
    engine = host(chunks=10, clock=Clock())
    hand_over(engine, ASKED)
    for seed in range(2, 6):
        engine.ask(f"{seed}", prompt(seed, 6 * CHUNK))
    arena = engine.manager.arenas[0]
    path = engine.side._requests.track(engine.submit("again", ASKED).view()).path
    assert all(map(arena.has, path))


def test_nothing_of_a_prompt_is_evicted_while_the_rest_of_it_is_computed():
    """By prompts beside it."""
    heap = {"type": "heap", "capacity": f"{16 * FRAME}B", "eviction": "lru"}
    config = load_config({"version": 1, "chunk_tokens": CHUNK, "tiers": [heap]}, Registry.of())
    with contextlib.closing(Host(config, clock=Clock(), blocks=100)) as engine:
        first = engine.submit("first", prompt(1, 8 * CHUNK), continued_elsewhere=True)
        seeds = itertools.count(2)
        while first.computed < len(first.tokens):
            engine.run(*(engine.submit(f"{seed}", prompt(seed, 2 * CHUNK)) for seed in itertools.islice(seeds, 6)))
        engine.finish(first)
        assert first.kept == 8 * CHUNK


def test_what_another_request_is_storing_is_kept_too(host):  # noqa: F811
    engine = host(clock=Clock())
    engine.late_stores = 9
    other = engine.submit("other", ASKED)
    while other.computed < len(ASKED):
        engine.step()  # it keeps its blocks, or its stores would be fenced
    assert hand_over(engine, ASKED, most_loaded=0) == [4 * CHUNK]
    assert engine.manager.pins_by_holder().total() == 4


def test_a_request_that_is_aborted_leaves_no_lease(host):  # noqa: F811
    engine = host(clock=Clock())
    engine.late_stores = 9
    request = engine.submit("1", ASKED, continued_elsewhere=True)
    while request.computed < len(ASKED):
        engine.step()
    request.continued_elsewhere = False  # as vLLM's view says of one that has not ended well
    engine.finish(request, "abort")
    engine.assert_at_rest()


def test_what_is_not_kept_is_counted_and_logged_if_it_is_all(host, caplog):  # noqa: F811
    engine, readings = host(chunks=8, clock=Clock()), Counter()
    engine.side.events.readings.listeners.append(
        lambda added: readings.update({(each.metric, *each.labels[1:]): int(each.value) for each in added})
    )
    assert hand_over(engine, prompt(2, 6 * CHUNK)) == [4 * CHUNK]
    assert not caplog.records
    for seed in (3, 4):
        assert hand_over(engine, prompt(seed, 2 * CHUNK), identity=Bypass("for a reason")) == [0]
    assert readings["kvtier_handed_over_tokens",] == 4 * CHUNK
    assert readings["kvtier_not_kept_tokens", TOO_LONG] == 2 * CHUNK
    assert readings["kvtier_not_kept_tokens", BYPASSED] == 4 * CHUNK
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("nothing is kept; the engine that decodes computes the prompt again: for a reason")


def test_leases_pin_no_more_than_half_of_the_arena_the_oldest_ends_first(host):  # noqa: F811
    engine = host(chunks=12, clock=Clock())
    shorter = [prompt(seed, 3 * CHUNK) for seed in (2, 3, 4)]
    assert hand_over(engine, *shorter[:1]) == hand_over(engine, *shorter[1:2]) == [3 * CHUNK]
    first = engine.manager.pins_by_holder()
    assert (len(first), first.total()) == (2, 6)
    hand_over(engine, shorter[2])
    last = engine.manager.pins_by_holder()
    assert (len(last.keys() - first.keys()), last.total()) == (1, 6)
    assert hand_over(engine, prompt(5, 8 * CHUNK)) == [6 * CHUNK]
    assert list(engine.manager.pins_by_holder().values()) == [6]


def test_a_common_prefix_counts_once(host):  # noqa: F811
    engine = host(chunks=12, clock=Clock())
    alike = [ASKED[: 4 * CHUNK] + prompt(seed, CHUNK) for seed in (2, 3)]
    assert hand_over(engine, *alike[:1]) == hand_over(engine, *alike[1:]) == [5 * CHUNK]
    assert list(engine.manager.pins_by_holder().values()) == [5, 5]


def test_no_lease_is_taken_in_the_memory_of_a_server(host):  # noqa: F811
    """That of a server: an idle engine takes no step in which its leases could end."""
    engine = host(clock=Clock())
    engine.side._handovers._lent = True
    assert hand_over(engine, ASKED) == [4 * CHUNK]
    engine.assert_at_rest()


def test_handed_over_frames_of_a_slab_are_read_into_the_arena(tmp_path):
    """Peers see the arena alone. The engine that has the prompt in its own cache loads nothing, and stores nothing."""
    heap = {"type": "heap", "capacity": f"{32 * FRAME}B", "store_after": 2}
    slabs = {"type": "gds", "paths": [str(tmp_path)], "capacity": "4MiB", "mode": "gds"}
    values = {"version": 1, "chunk_tokens": CHUNK, "load": "always", "tiers": [heap, slabs]}
    config = load_config(values, Registry.of(kvtier_gds.plugin))
    with contextlib.closing(Host(config)) as first:
        first.ask("first", ASKED)
    with contextlib.closing(Host(config, clock=Clock())) as engine:
        assert hand_over(engine, ASKED, foreign=4 * CHUNK) == [4 * CHUNK]
        assert engine.manager.pins_by_holder().total() == 4


@pytest.mark.parametrize("why", ["bypassed", "short"])
def test_chunks_that_other_engines_could_not_find_are_not_handed_over(host, why):  # noqa: F811
    engine = host()
    if why == "bypassed":
        kept = hand_over(engine, ASKED, identity=Bypass("for a reason"))
    else:
        kept = hand_over(engine, ASKED[: CHUNK - 1])
    assert kept == [0]
    engine.assert_at_rest()


def test_leases_end_with_their_namespace(host):  # noqa: F811
    engine = host(clock=Clock())
    hand_over(engine, ASKED)
    engine.side.invalidate_all()
    engine.assert_at_rest()


# -- the engine that decodes -----------------------------------------------------------------------------


@contextlib.contextmanager
def two_peers(**more):
    """An engine that computes prompts and one that continues them, which reads from the first one's memory."""
    heap = {"type": "heap", "capacity": f"{60 * FRAME}B"}
    address, registry = f"127.0.0.1:{free_port()}", Registry.of(kvtier_peers.plugin)
    values = {"version": 1, "chunk_tokens": CHUNK, "load": "always", "load_wait": f"{HANG}s", "audit_every": "off"}
    listens = {"type": "peers", "listen": address}
    asks = {"type": "peers", "listen": f"127.0.0.1:{free_port()}", "peers": [address]}
    with (
        contextlib.closing(Host(load_config(values | {"tiers": [heap, listens]}, registry), **more)) as first,
        contextlib.closing(Host(load_config(values | {"tiers": [heap, asks]}, registry), blocks=100)) as second,
    ):
        second.step()  # the self-test
        yield first, second


def continue_elsewhere(second, asked, kept):
    """Run these prompts. Another engine keeps ``kept`` tokens of each, and all of these are loaded."""
    requests = [second.submit(each, asked[each], computed_elsewhere=kept) for each in asked]
    wait_until(lambda: second.step() and all(each.state != "waiting" for each in requests))
    second.run(*requests)
    assert {each.offered for each in requests} == {kept}
    second.assert_at_rest()


def test_every_new_prompt_arrives_although_the_arena_of_the_first_engine_is_full():
    """Its default policy has seen none of them come back, and would keep none."""
    with two_peers() as (first, second):
        for seeds in batched(range(PROMPTS), 5):
            asked = {f"{seed}": prompt(seed, 4 * CHUNK + 3) for seed in seeds}
            assert [hand_over(first, tokens) for tokens in asked.values()] == [[4 * CHUNK]] * len(asked)
            continue_elsewhere(second, asked, 4 * CHUNK)
        assert first.manager.pins_by_holder().total() <= 30


def test_a_lease_ends_soon_after_a_peer_has_copied_its_prompt():
    with two_peers(clock=Clock()) as (first, second):
        assert hand_over(first, ASKED) == [4 * CHUNK]
        continue_elsewhere(second, {"second": ASKED}, 4 * CHUNK)
        wait_until(lambda: len(first.manager.arenas[0].copied) >= 4)
        first.step()
        for first.side._clock.now, pins in ((COPIED - 0.1, 4), (COPIED, 0)):
            first.step()
            assert first.manager.pins_by_holder().total() == pins


def test_of_equal_prompts_one_copy_ends_one_lease(host):  # noqa: F811
    engine = host(clock=Clock())
    twice = [engine.submit(each, ASKED, continued_elsewhere=True) for each in ("once", "twice")]
    engine.run(*twice)
    engine.settle()
    path = engine.side._requests.track(engine.submit("again", ASKED).view()).path
    engine.manager.arenas[0].copied.extend(path)
    engine.step()
    for engine.side._clock.now, pins in ((COPIED - 0.1, 8), (COPIED, 4), (LEASE - 0.1, 4), (LEASE, 0)):
        engine.step()
        assert engine.manager.pins_by_holder().total() == pins


@pytest.fixture
def two(tmp_path):
    """An engine that computes prompts and one that continues them, on one disk. A test tells the second the time."""
    heap = {"type": "heap", "capacity": f"{32 * FRAME}B"}
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "4MiB", "min_free": "0B", "shared": True}
    values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "2s", "load": "always", "tiers": [heap, disk]}
    config = load_config(values, Registry.of(kvtier_disk.plugin))
    hosts = [Host(config), Host(config, clock=Clock())]
    hosts[1].step()  # the self-test
    yield hosts
    for each in hosts:
        each.close()


def steps(engine, until):
    """What an engine does that has nothing else to do."""
    while engine.side._clock.now < until:
        engine.side._clock.now += 0.01
        engine.step()
        engine.side.drain(1.0)


@pytest.fixture
def asked_again(two, monkeypatch):
    """When the second engine asked for chunks again that were not there."""
    times, ask_again = [], two[1].manager.ask_again
    monkeypatch.setattr(
        two[1].manager, "ask_again", lambda path: times.append(two[1].side._clock.now) or ask_again(path)
    )
    return times


def test_late_chunks_are_asked_for_again_and_loaded(two, asked_again):
    first, second = two
    request = second.submit("second", ASKED, computed_elsewhere=len(ASKED))
    steps(second, 0.5)
    assert (request.state, 6 < len(asked_again) < 15) == ("waiting", True)
    first.ask("first", ASKED)
    steps(second, 1.0)
    second.run(request)
    assert request.offered == 4 * CHUNK
    second.assert_at_rest()


def test_chunks_that_never_come_are_computed_after_load_wait(two):
    _, second = two
    request = second.submit("second", ASKED, computed_elsewhere=len(ASKED))
    steps(second, 1.95)
    assert request.state == "waiting"
    steps(second, 2.05)
    assert request.state == "running"
    second.run(request)
    second.assert_at_rest()


def test_no_request_waits_longer_than_computing_the_late_chunks_takes(two):
    _, second = two
    second.side._waiting._always = False
    computes(second, CHUNK / 0.1)
    request = second.submit("second", ASKED, computed_elsewhere=len(ASKED))
    steps(second, 0.35)
    assert request.state == "waiting"
    steps(second, 0.45)
    assert request.state == "running"
    second.run(request)


@pytest.mark.parametrize("computed", [0, CHUNK - 1], ids=["nothing", "less than a chunk"])
def test_no_request_waits_for_chunks_that_no_engine_computed(two, computed):
    _, second = two
    request = second.submit("second", ASKED, computed_elsewhere=computed)
    steps(second, 0.05)
    assert request.state == "running"
    second.run(request)


def test_no_request_waits_for_chunks_of_a_tier_that_it_excludes(two):
    _, second = two
    request = second.submit("second", ASKED, computed_elsewhere=len(ASKED), media=())
    steps(second, 0.05)
    assert request.state == "running"
    second.run(request)


def test_no_request_waits_if_no_store_can_be_asked(host):  # noqa: F811
    engine = host(clock=Clock())
    engine.step()
    request = engine.submit("1", ASKED, computed_elsewhere=len(ASKED))
    engine.step()
    assert request.state == "running"
    engine.run(request)
