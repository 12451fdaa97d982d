"""What the scheduler side promises to any engine. The host asserts before each forward that the KV below is right."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_host import BLOCK, CHUNK, FRAME, Host, blocks_of, prompt

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.engine.request_view import Bypass, KVIdentity, PromptItem
from kvtier_core.engine.step import Step, StepResult
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import EventKind


@pytest.fixture
def stack(tmp_path):
    """``stack(chunks, **settings)`` is a heap of so many chunks, over a disk with room for a hundred."""

    def configure(chunks=32, **settings):
        heap = {"type": "heap", "capacity": f"{chunks * FRAME}B", "eviction": "lru"}
        disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": f"{100 * FRAME}B", "min_free": "0B"}
        tiers = [heap, disk | {"eviction": "lru"}]
        values = {"version": 1, "chunk_tokens": CHUNK, "load_wait": "10s", "tiers": tiers, **settings}
        return load_config(values, Registry.of(kvtier_disk.plugin))

    return configure


@pytest.fixture
def host(stack):
    """``host(chunks, settings, **options)`` is a host over such a stack."""
    hosts = []

    def start(chunks=32, settings=None, **options):
        hosts.append(Host(stack(chunks, **(settings or {})), **options))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


@pytest.fixture
def said(caplog):
    """``said()`` are the hit lines since it was called last."""
    caplog.set_level("INFO", logger="kvtier")

    def lines():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [line for line in found if " from kvtier" in line]

    return lines


def stored(host):
    """How many chunks the arena holds."""
    return host.manager.usage()[0].chunks


def test_a_prompt_is_stored_and_then_loaded(host, said):
    served, asked = host(), prompt(1, 4 * CHUNK + 3)
    assert (served.ask("first", asked), served.ask("second", asked)) == (0, 4 * CHUNK)
    assert said() == [
        "kvtier: first: 35 tokens: 0 from kvtier, 35 computed (not stored)",
        "kvtier: second: 35 tokens: 32 from kvtier (heap 32), 3 computed",
    ]
    assert served.ask("third", prompt(2, 50, asked[: 2 * CHUNK + 1])) == 2 * CHUNK
    served.assert_at_rest()


def test_a_prompt_comes_up_from_the_tier_below(stack, said):
    first = Host(stack())
    asked = prompt(1, 4 * CHUNK + 3)
    first.ask("first", asked)
    first.close()
    second = Host(stack())
    request = second.submit("second", asked)
    assert second.side.match(request.view(), 0) is None, "it is to wait for the disk"
    second.run(request)
    assert request.offered == 4 * CHUNK
    assert second.side.sources("second") == {}, "it has finished"
    assert said()[-1] == "kvtier: second: 35 tokens: 32 from kvtier (disk 32), 3 computed"
    second.assert_at_rest()
    second.close()


def test_a_request_waits_for_a_tier_no_longer_than_it_may(stack, said):
    first, asked = Host(stack()), prompt(1, 2 * CHUNK)
    first.ask("first", asked)
    first.close()
    now = [0.0]
    second = Host(stack(load_wait="2s"), clock=lambda: now[0])
    second.step()  # the self-test
    request = second.submit("second", asked)
    answers = []
    for now[0] in (0.0, 1.9, 2.0):  # never stepped: nothing can come up
        answers.append(second.side.match(request.view(), 0))
    assert answers == [None, None, 0]
    second.side.admitted(request.view(), [[0, 1, 2, 3]], 0)
    assert said()[-1] == "kvtier: second: 16 tokens: 0 from kvtier, 16 computed (it was not promoted in time)"
    second.side.finished(request.view(), "abort")
    second.close()


def test_only_what_the_engine_does_not_have_is_loaded(host, said):
    """Its own tokens may end inside a chunk: then the chunk's first pages stay as they are."""
    served, asked = host(), prompt(1, 4 * CHUNK)
    served.ask("first", asked)
    request = served.submit("third", asked)
    assert served.side.match(request.view(), CHUNK + BLOCK) == 3 * CHUNK - BLOCK
    blocks = list(range(30, 38))
    served.side.admitted(request.view(), [blocks], 3 * CHUNK - BLOCK)
    ((_, load),) = served.side.plan(Step([], [], {}.get)).loads
    assert load.pages == (((NO_BLOCK, 33),), ((34, 35),), ((36, 37),))
    assert said()[-1] == (
        "kvtier: third: 32 tokens: 12 from the engine's own cache, 20 from kvtier (heap 24), 0 computed"
    )
    assert served.side.sources("third") == {"heap": 20}
    served.side.progress(StepResult(ended_loads=["third"]))
    served.side.finished(request.view(), "abort")
    served.assert_at_rest()


@pytest.mark.parametrize("late", [0, 3])
def test_blocks_that_kvtier_did_not_fill_are_not_stored_nor_what_stands_on_them(host, late):
    served = host()
    served.late_stores = late
    served.step()
    for number in range(3):
        served.ask(str(number), prompt(number, 6 * CHUNK), foreign=2 * CHUNK)
        assert stored(served) == 0
    # Their blocks are the next request's, which computes them itself.
    served.ask("own", prompt(9, 6 * CHUNK))
    assert stored(served) == 6
    served.assert_at_rest()


def test_tokens_after_a_load_are_stored(host):
    served, asked = host(), prompt(1, 2 * CHUNK)
    served.ask("first", asked)
    assert served.ask("longer", prompt(2, 4 * CHUNK, asked)) == 2 * CHUNK
    assert stored(served) == 4


def test_when_trusted_blocks_are_reported_bad_nothing_earlier_is_kept(host):
    served = host()
    served.late_stores = 4
    first = served.submit("first", prompt(1, 6 * CHUNK))
    for _ in range(2):
        served.step()
    assert served._stores, "some stores are under way"
    served.invalid = set(first.blocks[:1])
    served.run(first)
    served.settle()
    assert stored(served) == 0
    served.ask("next", prompt(1, 6 * CHUNK))
    assert stored(served) == 6


def test_blocks_of_others_may_be_bad(host):
    served = host()
    first = served.submit("first", prompt(1, 2 * CHUNK))
    served.step()
    served.invalid = {39}
    served.run(first)
    served.settle()
    assert stored(served) == 2


def test_a_block_is_not_overwritten_before_a_late_store_has_read_it(host):
    """Prompts fill the engine one after the other, so that each forward writes where a store still reads."""
    served, prompts = host(200, blocks=14), [prompt(seed, 6 * CHUNK) for seed in range(8)]
    served.late_stores = 6
    for number, asked in enumerate(prompts):
        served.run(served.submit(f"cold {number}", asked))
    assert any(plan.stores_to_fence for plan in served.plans)
    served.settle()
    assert [served.ask(f"warm {number}", asked) for number, asked in enumerate(prompts)] == [6 * CHUNK] * 8
    served.assert_at_rest()


@pytest.mark.parametrize("late", [2, 5])
def test_another_connector_overwrites_no_block_before_a_late_store_has_read_it(host, late):
    """It loads its tokens into blocks that the last request had, and its forward never writes them."""
    served, prompts = host(200, blocks=14), [prompt(seed, 6 * CHUNK) for seed in range(3)]
    served.late_stores = late
    for number, asked in enumerate(prompts):
        served.run(served.submit(f"cold {number}", asked))
        served.run(served.submit(f"foreign {number}", prompt(100 + number, 6 * CHUNK), foreign=6 * CHUNK - BLOCK))
    served.settle()
    assert [served.ask(f"warm {number}", asked) for number, asked in enumerate(prompts)] == [6 * CHUNK] * 3


def test_only_stores_whose_blocks_are_given_away_are_fenced(host):
    served = host()
    served.late_stores = 6
    served.run(served.submit("first", prompt(1, 2 * CHUNK)))
    (job,) = served._stores
    assert served.plans[-1].stores_to_fence == ()
    other = served.side.plan(Step([], [20, 21], {}.get))
    assert other.stores_to_fence == ()
    blocks = blocks_of(served._stores[job][1])
    assert served.side.plan(Step([], blocks, {}.get)).stores_to_fence == (job,)


def test_a_slot_stays_pinned_until_the_load_has_read_it(host):
    """While a load is slow, other prompts fill the whole arena several times."""
    served, asked = host(6, blocks=60), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.late_loads = 12
    slow = served.submit("slow", asked)
    served.step()
    assert served.manager.pins_by_holder() == {"request slow (2)": 3}
    for number in range(10):
        served.run(served.submit(str(number), prompt(100 + number, 3 * CHUNK)))
    served.run(slow)
    assert slow.offered == 3 * CHUNK
    served.assert_at_rest()


def test_a_request_that_is_aborted_while_it_loads_keeps_its_pins_until_the_load_has_ended(host):
    served, asked = host(), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.late_loads = 5
    slow = served.submit("slow", asked)
    served.step()
    served.finish(slow, "abort")
    assert served.manager.pins_by_holder() == {"request slow (2)": 3} and served.side.busy()
    served.assert_at_rest()


def test_a_lookup_during_a_load_finds_nothing_and_takes_no_pin_from_it(host):
    served, asked = host(), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.late_loads = 8
    slow = served.submit("slow", asked)
    served.step()
    assert served.side.match(slow.view(), 0) == 0
    for _ in range(5):
        served.step()
    assert served.manager.pins_by_holder() == {"request slow (2)": 3}
    served.run(slow)
    assert slow.offered == 3 * CHUNK
    served.assert_at_rest()


def test_a_failed_load_is_computed_and_not_tried_again(host, said):
    served, asked = host(), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    said()
    served.failing = {"second"}
    request = served.submit("second", asked)
    served.run(request)
    assert request.offered == 0
    assert said() == [
        "kvtier: second: 24 tokens: 24 from kvtier (heap 24), 0 computed",
        "kvtier: second: 24 tokens: 0 from kvtier, 24 computed (its load failed)",
    ]
    assert served.ask("third", asked) == 3 * CHUNK
    served.assert_at_rest()


def test_requests_with_other_salts_and_items_share_only_what_is_the_same(host):
    served, asked = host(200), prompt(1, 4 * CHUNK)
    cat, dog = (KVIdentity(items=(PromptItem(CHUNK + 2, 5, content),)) for content in ("cat", "dog"))
    alice, bob = KVIdentity(b"alice"), KVIdentity(b"bob")
    asked_as = [KVIdentity(), alice, bob, alice, cat, dog, cat, KVIdentity()]
    loaded = [served.ask(str(number), asked, identity=identity) for number, identity in enumerate(asked_as)]
    # An item changes the chunk in which it lies, the second one, and all behind it.
    assert loaded == [0, 0, 0, 4 * CHUNK, CHUNK, CHUNK, 4 * CHUNK, 4 * CHUNK]


def test_an_item_counts_in_each_chunk_that_it_touches():
    items = (PromptItem(6, 4, "a"), PromptItem(17, 2, "b"))
    assert KVIdentity(items=items).extra(8) == {0: b'[[6, 4, "a"]]', 1: b'[[-2, 4, "a"]]', 2: b'[[1, 2, "b"]]'}


def test_a_request_that_cannot_be_identified_is_bypassed(host, said):
    served, asked = host(), prompt(1, 3 * CHUNK)
    assert served.ask("first", asked, identity=Bypass("who knows?")) == 0
    assert said() == ["kvtier: first: 24 tokens: 0 from kvtier, 24 computed (who knows?)"]
    assert stored(served) == 0
    served.assert_at_rest()


def test_a_bypass_that_comes_later_keeps_nothing_more(host, said):
    served, asked = host(), prompt(1, 6 * CHUNK)
    request = served.submit("first", asked)
    served.step()  # 16 of its tokens
    served.side.bypass("first", Bypass("its image is another's"))
    served.side.bypass("unknown", Bypass("nobody asked for it"))
    served.run(request)
    served.settle()
    assert stored(served) == 2
    served.ask("second", asked)
    served.preempt(request := served.submit("third", asked))
    served.side.track(request.view())
    served.side.bypass("third", Bypass("its image is another's"))
    said()
    served.run(request)
    assert said() == ["kvtier: third: 48 tokens: 0 from kvtier, 48 computed (its image is another's)"]


def test_a_request_that_wants_no_cached_prefix_is_stored_nevertheless(host, said):
    served, asked = host(), prompt(1, 3 * CHUNK)
    assert served.ask("first", asked, most_loaded=0) == 0
    assert served.ask("second", asked, most_loaded=0) == 0
    assert said()[-1] == "kvtier: second: 24 tokens: 0 from kvtier, 24 computed (it asked not to read cached prefixes)"
    assert served.ask("third", asked) == 3 * CHUNK


@pytest.mark.parametrize("loads, stores", [(True, False), (False, True)])
def test_a_role_is_kept_to(stack, said, loads, stores):
    asked = prompt(1, 3 * CHUNK)
    both = Host(stack())
    both.ask("first", asked)
    both.close()
    served = Host(stack(), loads=loads, stores=stores)
    assert served.ask("second", asked) == (3 * CHUNK if loads else 0)
    served.ask("third", prompt(2, 3 * CHUNK))
    assert stored(served) == (3 if loads else 6)
    if not loads:
        assert (
            said()[-1]
            == "kvtier: third: 24 tokens: 0 from kvtier, 24 computed (this engine is configured to store only)"
        )
    served.close()


# -- the self-test ---------------------------------------------------------------------------------------


def test_the_self_test_is_over_when_every_rank_has_reported(host):
    served = host(ranks=2)
    assert len(served.step().self_test_slots) == 1
    assert len(served.step().self_test_slots) == 1, "one rank has not reported"
    served.outcomes = Counter({(0, ""): 1})
    served.step()
    assert served.step().self_test_slots == ()


def test_an_engine_with_nothing_to_do_steps_for_the_self_test(host):
    served = host()
    served.outcomes = Counter()
    assert served.side.busy()
    assert len(served.step().self_test_slots) == 1
    served.outcomes = Counter({(0, ""): 1})
    served.step()
    assert not served.side.busy()


def test_an_engine_stops_stepping_for_a_self_test_that_never_ends(host):
    served = host()
    served.outcomes = Counter()
    assert sum(served.side.busy() for _ in range(5000)) == 1000
    served.outcomes = Counter({(0, ""): 1})
    served.step()


def test_of_a_store_that_filled_some_slots_the_leading_chunks_are_kept(host):
    """One rank filled both slots, the other only the first. What lies behind an empty slot nobody could reach."""
    served = host(ranks=2)
    request = served.submit("first", prompt(1, 2 * CHUNK))
    ((job, transfer),) = served.step().stores
    assert len(transfer.slots) == 2
    served.side.progress(StepResult(set(), set(), set(), WorkerProgress(Counter([job]), filled={job: 1})))
    assert stored(served) == 1
    served.finish(request)


def test_while_a_rank_is_at_its_self_test_requests_wait_for_it(host, said):
    served, asked = host(), prompt(1, 3 * CHUNK)
    served.outcomes = Counter()
    served.run(first := served.submit("first", asked))
    assert first.offered == 0
    served.settle()
    waiting = served.submit("second", asked)
    served.step()
    assert waiting.state == "waiting"
    served.outcomes = Counter({(0, ""): 1})
    served.run(waiting)
    assert waiting.offered == 3 * CHUNK


def test_requests_wait_for_a_ranks_self_test_no_longer_than_they_may(host, said):
    now = [0.0]
    served, asked = host(settings={"load_wait": "2s"}, clock=lambda: now[0]), prompt(1, 3 * CHUNK)
    served.outcomes = Counter()
    served.ask("first", asked)
    waiting = served.submit("second", asked)
    served.step()
    now[0] = 2.0
    served.run(waiting)
    assert waiting.offered == 0
    assert said()[-1] == "kvtier: second: 24 tokens: 0 from kvtier, 24 computed (the self-test has not finished)"


def test_a_failed_self_test_ends_it_all(host, said, caplog):
    served, asked = host(ranks=2), prompt(1, 3 * CHUNK)
    served.outcomes = Counter({(0, ""): 1, (0, "rank 1: arena heap: a load did not restore block 3 of layer a"): 1})
    for request_id in ("first", "second"):
        served.step()
        assert served.ask(request_id, asked) == 0
    why = "the self-test failed: rank 1: arena heap: a load did not restore block 3 of layer a"
    assert said()[-1] == f"kvtier: second: 24 tokens: 0 from kvtier, 24 computed ({why})"
    assert stored(served) == 0
    served.assert_at_rest()


# -- over time -------------------------------------------------------------------------------------------


def test_a_new_epoch_finds_nothing_of_the_old_one(host, said):
    served, asked = host(), prompt(1, 6 * CHUNK)
    served.ask("first", asked)
    under_way = served.submit("under way", prompt(2, 6 * CHUNK))
    served.step()
    before = served.side.namespace
    assert served.side.invalidate_all()
    assert served.side.namespace.digest != before.digest
    served.run(under_way)
    served.settle()
    assert stored(served) == 0, "what it computed stands on what was there before"
    said()
    assert served.ask("second", asked) == 0
    assert said() == ["kvtier: second: 48 tokens: 0 from kvtier, 48 computed (not stored)"]
    assert served.ask("third", asked) == 6 * CHUNK
    served.assert_at_rest()


def test_an_epoch_that_begins_during_a_load_says_so(host):
    served, asked = host(), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.late_loads = 3
    slow = served.submit("slow", asked)
    served.step()
    assert not served.side.invalidate_all()
    served.run(slow)
    served.assert_at_rest()


def test_workers_that_notice_new_weights_open_one_epoch(host, said):
    """However many of them notice, and whenever: the steps that were planned before are of the epoch before."""
    served, asked = host(), prompt(1, 6 * CHUNK)
    assert served.ask("first", asked) == 0
    under_way = served.submit("under way", prompt(2, 6 * CHUNK))
    assert served.step().epoch == 0
    for rank in range(2):
        report = WorkerProgress(changed={0: f"rank {rank}: parameters were written to"})
        served.side.progress(StepResult(progress=report))
        assert served.side.epoch == 1
    assert served.step().epoch == 1
    served.run(under_way)
    served.settle()
    assert stored(served) == 0
    said()
    assert served.ask("second", asked) == 0
    assert said() == ["kvtier: second: 48 tokens: 0 from kvtier, 48 computed (not stored)"]
    assert served.ask("third", asked) == 6 * CHUNK
    served.assert_at_rest()


def test_no_lookup_or_reservation_after_a_worker_reports_that_it_is_off(host, said):
    served, asked = host(), prompt(1, 6 * CHUNK)
    served.ask("first", asked)
    served.side.progress(StepResult(progress=WorkerProgress(off="rank 0 failed; see its log")))
    before = served.manager.usage()
    said()
    assert served.ask("second", asked) == served.ask("third", prompt(2, 6 * CHUNK)) == 0
    why = "48 tokens: 0 from kvtier, 48 computed (rank 0 failed; see its log)"
    assert said() == [f"kvtier: second: {why}", f"kvtier: third: {why}"]
    assert served.manager.usage() == before
    served.assert_at_rest()


@pytest.mark.parametrize("save_decode, kept", [(False, 2), (True, 4)])
def test_generated_tokens_are_stored_only_if_asked(host, save_decode, kept):
    served = host(settings={"save_decode": save_decode})
    request = served.submit("first", prompt(1, 2 * CHUNK + 1))
    for token in range(2 * CHUNK):
        served.step()
        served.step()
        served.generate(request, token)
    served.run(request)
    served.settle()
    assert stored(served) == kept


def test_a_preempted_request_comes_back_with_what_it_had(host, said):
    served = host(settings={"save_decode": True})
    request = served.submit("first", prompt(1, 2 * CHUNK))
    for token in range(CHUNK + 2):
        served.step()
        served.generate(request, token)
        served.step()
    served.settle()
    served.preempt(request)
    served.ask("other", prompt(2, 6 * CHUNK))
    served.run(request)
    assert request.offered == 3 * CHUNK
    assert "kvtier: first: 26 tokens: 24 from kvtier (heap 24), 2 computed" in said()
    served.assert_at_rest()


def test_policies_are_told_of_a_request_once_with_its_hints(host, monkeypatch):
    told = []
    monkeypatch.setattr(CacheIndex, "request", lambda self, path, now, hints: told.append((len(path), dict(hints))))
    served = host()
    request = served.submit("first", prompt(1, 3 * CHUNK + 2), hints={"turn": "tool"})
    for _ in range(3):
        served.side.match(request.view(), 0)
    served.run(request)
    assert told == [(3, {"turn": "tool"})] * 2, "once for each tier"


def test_what_comes_and_ends_is_told_with_the_chunks_of_prompts_and_all_tokens(stack):
    served, told = Host(stack()), []
    served.side.events.listeners.append(told.extend)
    served.run(request := served.submit("first", prompt(1, 3 * CHUNK + 2)))
    assert request.state == "finished"
    other = served.submit("second", prompt(2, CHUNK), identity=Bypass("who knows?"))
    served.step()
    served.generate(other, 1)
    served.finish(other, "abort")
    never = served.submit("third", prompt(3, CHUNK))
    served.side.finished(never.view(), "abort")  # it was never tracked
    served.close()
    known = [
        (event.kind.value, event.request, event.tokens, len(event.keys), event.why)
        for event in told
        if event.kind in (EventKind.ARRIVED, EventKind.FINISHED)
    ]
    assert known == [
        ("arrived", "first", 26, 3, ""),
        ("finished", "first", 26, 0, "stop"),
        ("arrived", "second", 8, 0, ""),
        ("finished", "second", 9, 0, "abort"),
    ]


def test_an_engine_that_is_stopped_with_requests_under_way_logs_no_leaked_slots(stack, caplog):
    """One waits with what it has found, one loads, and one was aborted while it loads."""
    served, asked = Host(stack(), blocks=60), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.late_loads = 100
    aborted = served.submit("aborted", asked)
    served.submit("loads", asked)
    served.step()
    served.finish(aborted, "abort")
    waiting = served.submit("waits", asked)
    served.side.match(waiting.view(), 0)
    holders = [holder.split(" (")[0] for holder in served.manager.pins_by_holder()]
    assert sorted(holders) == ["request aborted", "request loads", "request waits"]
    caplog.clear()
    served.side.close()
    assert not any("still holds" in record.getMessage() for record in caplog.records)
    served._mover.close()


def test_leaked_slots_are_logged_when_an_engine_is_stopped(stack, caplog):
    served, asked = Host(stack()), prompt(1, 3 * CHUNK)
    served.ask("first", asked)
    served.manager.lookup(served.side._requests.keys(served.side.track(served.submit("x", asked).view()), 24), "y")
    served.side.close()
    (line,) = [record.getMessage() for record in caplog.records if "still holds" in record.getMessage()]
    assert line == "kvtier: y still holds 3 slots; a tier is hanging, or this is a bug in kvtier"
    served._mover.close()


def test_the_engine_is_kept_stepping_for_transfers_but_not_for_those_that_hang(stack, caplog):
    now = [0.0]
    served = Host(stack(), clock=lambda: now[0])
    served.ask("first", prompt(1, 3 * CHUNK))
    assert not served.side.busy()
    served.late_loads = 3
    slow = served.submit("slow", prompt(1, 3 * CHUNK))
    served.step()
    assert served.side.busy()
    caplog.clear()
    now[0] += 5.0
    assert not served.side.busy() and not served.side.busy()
    assert [record.getMessage() for record in caplog.records] == [
        "kvtier: request slow (2) still holds 3 slots; a tier is hanging, or this is a bug in kvtier"
    ]
    served.run(slow)
    served.close()


def test_a_busy_host_under_many_kinds_of_trouble(host):
    """Preemptions, aborts, late copies, failed loads, foreign blocks and resets; a little arena and few blocks."""
    served, drawn = host(8, {"save_decode": True, "load_wait": "20ms"}, blocks=40), random.Random(1)
    families = [prompt(seed, 3 * CHUNK) for seed in range(3)]
    alive, seen = [], Counter()
    for number in range(250):
        served.late_stores, served.late_loads = drawn.randrange(4), drawn.randrange(4)
        foreign = CHUNK if drawn.random() < 0.1 else 0
        request = served.submit(
            f"{number}", prompt(drawn.randrange(9), 5 * CHUNK, drawn.choice(families)), foreign=foreign
        )
        alive.append(request)
        served.failing = {request.request_id} if drawn.random() < 0.1 else set()
        for _ in range(drawn.randrange(4)):
            served.step()
        for each in [each for each in alive if each.state == "running" and drawn.random() < 0.1]:
            served.preempt(each)
            seen["preempted"] += 1
        if drawn.random() < 0.1:
            served.finish(alive.pop(drawn.randrange(len(alive))), "abort")
            seen["aborted"] += 1
        if drawn.random() < 0.02:
            served.side.invalidate_all()
        if len(alive) > 3:
            served.run(*alive)
            seen["loaded"] += sum(bool(each.offered) for each in alive)
            alive.clear()
    served.run(*alive)
    assert min(seen[what] for what in ("preempted", "aborted", "loaded")) > 5, seen
    served.assert_at_rest()
