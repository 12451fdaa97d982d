"""Prompts longer than the arena: what fits is loaded at once, nothing is waited for that cannot come, the line says so.

The clock stands still, so that a wait which ends only with ``load_wait`` never ends.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fake_host import CHUNK, LAYOUT, Host, prompt
from patience import HANG
from test_groups import FULL, LOCAL, LONG, STATE, WINDOW
from test_scheduler_side import said  # noqa: F401 - a fixture
from test_waiting import Clock

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.manager import StorageManager

CHUNKS = 15
ASKED = prompt(1, CHUNKS * CHUNK + 3)
MODELS = {
    "full attention": LAYOUT,
    "a window": ChunkLayout([FULL, WINDOW], CHUNK),
    "two windows": ChunkLayout([FULL, WINDOW, LONG], CHUNK),
    "local attention": ChunkLayout([FULL, LOCAL], CHUNK),
    "states": ChunkLayout([FULL, STATE], CHUNK),
    "windows alone": ChunkLayout([LONG, WINDOW], CHUNK),
}


@pytest.fixture
def host(tmp_path):
    """``host(slots, layout)`` is a host with so many slots, above a disk that all hosts share."""
    hosts = []

    def start(slots, layout=LAYOUT, *, tested=True, **options):
        heap = {"type": "heap", "capacity": f"{slots * layout.frame_nbytes}B", "eviction": "lru"}
        disk = {"type": "disk", "path": str(tmp_path), "capacity": "4MiB", "min_free": "0B", "shared": True}
        values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "1s", "load": "always", "tiers": [heap, disk]}
        hosts.append(Host(load_config(values, Registry.of(kvtier_disk.plugin)), layout=layout, blocks=300, **options))
        if tested:
            hosts[-1].step()  # the self-test
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


def loads(host, request):
    """Steps until the request waits no longer; it must not take more of them than there are chunks to come."""
    for _ in range(100):
        host.step()
        host.side.drain(HANG)
        if request.state != "waiting":
            return request.offered
    raise AssertionError("it waits for chunks that have no room")


@pytest.mark.parametrize("queued", [False, True], ids=["asked", "queued before"])
@pytest.mark.parametrize("slots", [1, 2, 7, 14])
def test_a_prompt_longer_than_the_arena_is_loaded_as_far_as_it_fits(host, said, slots, queued):  # noqa: F811
    host(32).ask("first", ASKED)
    small = host(slots, clock=Clock())
    request = small.submit("second", ASKED)
    if queued:
        small.side.arrived(request.view())
        small.side.drain(HANG)
    assert loads(small, request) == slots * CHUNK
    small.run(request)
    loaded, left = slots * CHUNK, CHUNKS - slots
    why = f"disk {loaded}; heap is too small for {left} more of this prompt's chunks"
    told = f"{loaded} from kvtier ({why}), {len(ASKED) - loaded} computed"
    assert said()[-1] == f"kvtier: second: {len(ASKED)} tokens: {told}"
    small.assert_at_rest()


@pytest.mark.parametrize("slots", [4, 9, 14, 17])
@pytest.mark.parametrize("layout", MODELS.values(), ids=MODELS)
def test_models_with_several_parts_wait_for_no_boundary_that_does_not_fit(host, said, layout, slots):  # noqa: F811
    large = host(200, layout)
    for end in range(1, CHUNKS + 1):  # each prompt leaves a boundary where it ends
        large.ask(f"{end}", ASKED[: end * CHUNK + 3])
    small = host(slots, layout, clock=Clock())
    request = small.submit("second", ASKED)
    assert 0 < loads(small, request) <= CHUNKS * CHUNK
    small.run(request)
    if request.offered < CHUNKS * CHUNK:
        left = CHUNKS - request.offered // CHUNK
        assert f"; heap is too small for {left} more of this prompt's chunks), " in said()[-1]
    small.assert_at_rest()


def test_a_prompt_of_which_the_beginning_is_there_waits_for_no_slot_that_this_keeps(host, said):  # noqa: F811
    """The window at the end of the beginning leaves only with its chunk, which the request has pinned."""
    layout, other = MODELS["a window"], prompt(2, 7 * CHUNK + 3)
    large = host(200, layout)
    for end in range(1, 11):
        large.ask(f"{end}", ASKED[: end * CHUNK + 3])
    large.ask("other", other)
    small = host(12, layout, clock=Clock())
    for name, tokens, offered in (("beginning", ASKED[: 3 * CHUNK + 3], 3), ("other", other, 7), ("all", ASKED, 9)):
        request = small.submit(name, tokens[: 10 * CHUNK + 3])
        assert loads(small, request) == offered * CHUNK
        small.run(request)
    assert "; heap is too small for 1 more of this prompt's chunks), " in said()[-1]
    small.assert_at_rest()


@pytest.mark.parametrize(("model", "slots"), [("full attention", 15), ("a window", 18)])
def test_a_prompt_waits_for_no_slot_of_one_that_another_engine_continues(host, said, model, slots):  # noqa: F811
    layout = MODELS[model]
    large = host(200, layout)
    for end in range(1, CHUNKS + 1):
        large.ask(f"{end}", ASKED[: end * CHUNK + 3])
    small = host(slots, layout, clock=Clock())
    first = small.submit("first", prompt(2, 3 * CHUNK), continued_elsewhere=True)
    small.run(first)
    assert first.kept
    request = small.submit("second", ASKED)
    assert 0 < loads(small, request) < CHUNKS * CHUNK
    small.run(request)
    left = CHUNKS - request.offered // CHUNK
    kept = f"heap is too small for {left} more of this prompt's chunks beside prompts that must stay there"
    assert f"; {kept}), " in said()[-1]


def test_requests_that_share_a_prefix_are_all_loaded(host):
    asked = [prompt(number, CHUNKS * CHUNK, ASKED[: 8 * CHUNK]) for number in range(3)]
    large = host(100)
    for number, tokens in enumerate(asked):
        large.ask(f"{number}", tokens)
    small = host(14, clock=Clock())
    requests = [small.submit(f"{number}", tokens) for number, tokens in enumerate(asked)]
    small.run(*requests)
    assert [each.offered for each in requests] == [14 * CHUNK] * 3
    small.assert_at_rest()


@pytest.mark.parametrize("layout", [LAYOUT, MODELS["a window"]], ids=["full attention", "a window"])
def test_chunks_that_another_engine_has_just_computed_are_not_awaited_where_they_do_not_fit(host, layout):
    """The last one is not stored: it is late, and would be late for ever."""
    host(200, layout).ask("first", ASKED[: -CHUNK - 3])
    small = host(14 + len(layout.parts) - 1, layout, clock=Clock())
    request = small.submit("second", ASKED, computed_elsewhere=len(ASKED))
    assert 0 < loads(small, request) < CHUNKS * CHUNK
    small.run(request)
    small.assert_at_rest()


def test_no_request_keeps_the_slots_that_the_self_test_needs(host, monkeypatch):
    """A server may answer late that it has reserved them; by then the request may have all slots."""
    host(32).ask("first", ASKED)
    reserve, late = StorageManager.reserve_self_test_slots, [[]]
    monkeypatch.setattr(StorageManager, "reserve_self_test_slots", lambda *each: late.pop() if late else reserve(*each))
    small = host(14, clock=Clock(), tested=False)
    passed, small.outcomes = small.outcomes, Counter()
    request = small.submit("second", ASKED)
    small.side.match(request.view(), 0)
    small.side.drain(HANG)
    plan = small.side.plan

    def planned(step):
        """A worker that has slots to try reports that it has passed."""
        if (made := plan(step)).self_test_slots:
            small.outcomes = passed
        return made

    monkeypatch.setattr(small.side, "plan", planned)
    assert loads(small, request) == 14 * CHUNK
    small.run(request)
    small.assert_at_rest()
