"""Engines with several KV groups: what they are given to load is all that their next forward reads, in every group."""

from __future__ import annotations

import random

import pytest
from fake_host import BLOCK, Host, prompt
from patience import HANG

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout, KVKind, chunk_key
from kvtier_core.types import EventKind
from kvtier_doctor.steering import EngineSteering
from kvtier_testing.samples import make_group

CHUNK = 8
FULL = make_group((512, 128), block_tokens=BLOCK)
WINDOW = make_group((256, 256), name="window", block_tokens=BLOCK, kind=KVKind.SLIDING_WINDOW, reach=13)
LONG = make_group((192,), name="long window", block_tokens=2, kind=KVKind.SLIDING_WINDOW, reach=28)
LOCAL = make_group((384,), name="local", block_tokens=BLOCK, kind=KVKind.CHUNKED_LOCAL, reach=3 * CHUNK)
STATE = make_group((700,), name="state", block_tokens=CHUNK, kind=KVKind.STATE)

MODELS = {
    "full attention and a window": [FULL, WINDOW],
    "a window, full attention, a longer window": [WINDOW, FULL, LONG],
    "full and local attention": [FULL, LOCAL],
    "full attention and states": [STATE, FULL],
    "full attention, a window and states": [FULL, WINDOW, STATE],
    "a window alone": [WINDOW],
    "two windows": [LONG, WINDOW],
}


def _id(name):
    return name.replace(" ", "-")


@pytest.fixture(params=MODELS, ids=_id)
def layout(request):
    return ChunkLayout(MODELS[request.param], CHUNK)


def of_models(suits):
    """Only the models whose groups suit the test."""
    names = [name for name, groups in MODELS.items() if suits(groups)]
    return pytest.mark.parametrize("layout", names, indirect=True, ids=_id)


@pytest.fixture
def host(layout, tmp_path):
    """``host(slots)`` is a host over an arena with so many slots, above a disk that all hosts share one by one."""
    hosts = []

    def start(slots=200, shared=False, **options):
        heap = {"type": "heap", "capacity": f"{slots * layout.frame_nbytes}B", "eviction": "lru"}
        disk = {"type": "disk", "path": str(tmp_path), "capacity": "4MiB", "min_free": "0B", "eviction": "lru"}
        values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "10s", "tiers": [heap, disk | {"shared": shared}]}
        stack = load_config(values, Registry.of(kvtier_disk.plugin))
        hosts.append(Host(stack, layout=layout, blocks=200, **options))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


def test_a_prompt_that_returns_is_loaded_up_to_its_last_whole_chunk(host):
    served, asked = host(), prompt(1, 6 * CHUNK + 3)
    assert (served.ask("first", asked), served.ask("second", asked)) == (0, 6 * CHUNK)
    served.assert_at_rest()


def test_the_frames_of_a_load_are_reported(host):
    served, asked, told = host(), prompt(1, 6 * CHUNK + 3), []
    served.ask("first", asked)
    served.side.events.listeners.append(told.extend)
    served.ask("second", asked)
    (loaded,) = [event for event in told if event.kind is EventKind.LOADED]
    ((_, transfer),) = [load for plan in served.plans for load in plan.loads]
    arena = served.manager.arenas[0]
    assert [slot.index for slot in arena.slots(loaded.keys)] == [slot.index for slot in transfer.slots]
    assert loaded.nbytes == served.layout.payloads_nbytes(loaded.keys)


def test_one_token_is_always_left_to_compute(host):
    """The state behind the last token says nothing of what that token would be answered with."""
    served, asked = host(), prompt(1, 6 * CHUNK)
    served.ask("first", asked)
    served.ask("next turn", prompt(2, 8 * CHUNK, asked))
    assert 0 < served.ask("second", asked) < 6 * CHUNK
    served.assert_at_rest()


def test_the_next_turn_of_a_conversation_continues_where_the_last_one_ended(host):
    served, asked = host(), []
    for turn in range(5):
        asked = prompt(turn, len(asked) + 2 * CHUNK + 3, asked)
        before = (len(asked) - 2 * CHUNK - 3) // CHUNK * CHUNK
        assert served.ask(f"turn {turn}", asked) == before
    served.assert_at_rest()


@of_models(lambda groups: STATE not in groups)  # states are where the engine offers them
def test_a_shared_prefix_is_loaded_from_the_third_prompt_on(host):
    """No boundary was stored where they part, unless windows are small; the second one stores it on its way."""
    served, shared = host(), prompt(0, 5 * CHUNK + 1)
    served.ask("first", prompt(1, 9 * CHUNK, shared))
    served.ask("second", prompt(2, 9 * CHUNK, shared))
    assert served.ask("third", prompt(3, 9 * CHUNK, shared)) == 5 * CHUNK


@pytest.mark.parametrize("shared", [False, True])
def test_a_request_is_loaded_only_from_the_media_that_it_names(host, shared):
    asked = prompt(1, 6 * CHUNK + 3)
    first = host(shared=shared)
    first.ask("first", asked)
    first.close()
    second, events = host(shared=shared), []
    second.side.events.listeners.append(events.extend)
    assert second.ask("second", asked, media=[Medium.HOST, Medium.UNSPECIFIED], most_stored=0) == 0
    assert not {EventKind.READ, EventKind.ASKED} & {event.kind for event in events}
    assert second.ask("third", asked, media=[Medium.DISK]) == 6 * CHUNK
    second.assert_at_rest()


def test_no_part_of_a_memory_only_request_is_written_until_another_names_it(host):
    served, asked = host(), prompt(1, 6 * CHUNK + 3)
    served.ask("first", asked, memory_only=True)
    served.side.drain(HANG)
    memory, disk = (usage.chunks for usage in served.manager.usage())
    assert memory and not disk
    assert served.ask("second", asked) == 6 * CHUNK
    served.side.drain(HANG)
    assert [usage.chunks for usage in served.manager.usage()] == [memory, memory]


def test_a_new_engine_is_warm_from_the_disk(host):
    first, asked = host(), prompt(1, 6 * CHUNK + 3)
    first.ask("first", asked)
    first.close()
    second = host()
    assert second.ask("second", asked) == 6 * CHUNK
    second.assert_at_rest()


def test_engines_that_share_a_store_find_what_the_other_one_stored(host):
    """Which boundaries are there is asked at once, for all parts of a prompt."""
    first, second, asked = host(shared=True), host(shared=True), prompt(1, 6 * CHUNK + 3)
    assert second.ask("before", asked[: 2 * CHUNK + 1]) == 0
    first.ask("first", asked)
    assert second.ask("second", asked) == 6 * CHUNK
    second.assert_at_rest()


@pytest.mark.parametrize("more", [0, 3])
def test_another_engine_finds_as_much_of_a_prompt_as_was_said_to_be_kept_for_it(host, more):
    first, second, asked = host(shared=True), host(shared=True), prompt(1, 6 * CHUNK + more)
    computed = first.submit("first", asked, continued_elsewhere=True)
    first.run(computed)
    first.settle()
    assert computed.kept >= 4 * CHUNK
    assert second.ask("second", asked, computed_elsewhere=computed.kept) == computed.kept
    second.assert_at_rest()


@pytest.mark.parametrize("late", [0, 3])
def test_stores_read_pages_before_others_overwrite_them(host, late):
    """The engine gives the blocks that left a window, and those of finished requests, to the next one at once."""
    served = host()
    served.late_stores = late
    prompts = [prompt(seed, 5 * CHUNK + 3) for seed in range(6)]
    for turn in range(2):
        for number, asked in enumerate(prompts):
            served.run(served.submit(f"{turn} {number}", asked))
    served.settle()
    assert [served.ask(f"again {number}", asked) for number, asked in enumerate(prompts)] == [5 * CHUNK] * 6


@of_models(lambda groups: len(groups) > 1)
def test_a_boundary_that_lacks_a_part_is_not_found(host):
    """Whatever part of it is missing, in whatever order parts are lost."""
    asked, rng = prompt(1, 6 * CHUNK + 3), random.Random(7)
    served = host()
    served.ask("first", asked)
    index = served.manager._hot.index
    for number in range(4):
        key = rng.choice(sorted(index.resident))
        served.manager._hot._release([key], evicted=True)
        served.ask(f"after {number}", asked)
    served.assert_at_rest()


def test_a_small_arena_evicts_whole_boundaries(host, layout):
    """Many prompts in turn, of which a few fit: whatever is found is whole, and chunks of no use do not stay."""
    served = host(slots=24)
    rng, starts = random.Random(3), [prompt(seed, 4 * CHUNK) for seed in range(3)]
    for number in range(40):
        start = rng.choice(starts)
        served.ask(f"{number}", prompt(rng.randrange(6), rng.randrange(len(start), 7 * CHUNK), start))
    served.assert_at_rest()
    assert served.manager.usage()[0].chunks <= 24


def test_preempted_requests_continue_where_they_may(host):
    served, asked = host(), prompt(1, 6 * CHUNK + 3)
    request = served.submit("first", asked)
    for _ in range(3):
        served.step()
    served.preempt(request)
    served.run(request)
    served.settle()
    assert served.ask("second", asked) == 6 * CHUNK


def test_a_load_that_fails_is_computed(host):
    served, asked = host(), prompt(1, 6 * CHUNK + 3)
    served.ask("first", asked)
    served.failing.add("second")
    assert served.ask("second", asked) == 0
    served.assert_at_rest()


@pytest.mark.parametrize("slots", [12, 40])
def test_a_busy_host_under_many_kinds_of_trouble(host, slots):
    """Prompts that share beginnings, aborted, preempted and failed at random, in an arena that is too small."""
    served, drawn = host(slots), random.Random(slots)
    starts = [prompt(seed, 3 * CHUNK) for seed in range(3)]
    served.late_stores, served.late_loads = 2, 1
    alive, loaded = [], 0
    for number in range(250):
        if len(alive) < 3:
            asked = prompt(
                drawn.randrange(5), drawn.randrange(CHUNK, 8 * CHUNK), drawn.choice(starts)[: drawn.randrange(25)]
            )
            alive.append(served.submit(f"{number}", asked))
        served.failing = {each.request_id for each in alive if drawn.random() < 0.05}
        served.step()
        for each in [each for each in alive if each.state == "running"]:
            if drawn.random() < 0.05:
                served.preempt(each)
            elif each.computed == len(each.tokens) or drawn.random() < 0.05:
                loaded += bool(each.offered)
                served.finish(each, "abort" if each.computed < len(each.tokens) else "stop")
        alive = [each for each in alive if each.state != "finished"]
    served.failing = set()
    served.run(*alive)
    assert loaded > 5 or slots < 40
    served.assert_at_rest()


def test_a_window_that_has_passed_is_not_stored(host, layout):
    """Of what a request loads the engine keeps the last window alone, and the earlier ones cannot be stored again."""
    served, asked = host(), prompt(1, 6 * CHUNK + 3)
    served.ask("first", asked)
    hot, tier = served.manager._hot, served.manager.tiers[0]
    chunks = served.side._requests._database.keys(asked[: 2 * CHUNK])
    for level in (hot, tier):
        lost = level.index.other_parts(list(map(chunk_key, chunks)))
        hot._release(lost, evicted=True) if level is hot else level.index.remove(lost)
    assert served.ask("second", asked) == 6 * CHUNK
    served.ask("third", asked[: 2 * CHUNK + 1])
    served.assert_at_rest()


@of_models(lambda groups: len(groups) > 1 and STATE not in groups)  # the others keep no more
def test_an_engine_that_keeps_more_than_was_found_computes_it(host, monkeypatch):
    """Its blocks would hold what somebody else left there."""
    served, asked, skipped = host(), prompt(1, 6 * CHUNK + 3), Host._skipped
    served.ask("first", asked)
    monkeypatch.setattr(Host, "_skipped", lambda self, number, tokens: max(0, skipped(self, number, tokens) - 9))
    served.ask("second", asked)
    assert any(plan.failed_loads for plan in served.plans)
    served.assert_at_rest()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_pin_takes_no_more_slots_than_it_may(host, where):
    """What a request needs to continue has several parts."""
    served, asked = host(slots=80), prompt(1, 20 * CHUNK + 3)
    served.ask("first", asked)
    if where == "disk":
        for number in range(8):
            served.ask(f"flood {number}", prompt(100 + number, 20 * CHUNK + 3))
    steering = EngineSteering(served.manager, CHUNK, served.side._name, lambda: 0.0)
    steering.answer({"pin": "system", "prompt": asked})
    for _ in range(3):
        served.settle(), steering.step()
    assert 0 < served.manager.pins_by_holder().total() <= served.manager.arenas[0].capacity // 8
    steering.end()
    served.assert_at_rest()
