"""Which hits are audited, and what becomes of an audit whose request is disturbed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fake_host import CHUNK, prompt
from patience import HANG
from test_scheduler_side import host, said, stack  # noqa: F401 - fixtures

from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.engine.step import Step, StepResult
from kvtier_core.engine.worker.audit import difference
from kvtier_core.types import EventKind

#: The kinds of events of an audit that has ended.
ENDED = (EventKind.AUDITED, EventKind.CORRUPT)
ASKED = prompt(1, 4 * CHUNK + 3)
WHOLE, SHORT = 4 * CHUNK, 3 * CHUNK


@pytest.fixture
def auditing(host):  # noqa: F811
    """``auditing(every)`` is a host that has stored a prompt, and the findings of its audits."""

    def start(every=1, **options):
        served, found = host(settings={"audit_every": every}, **options), []
        served.side.events.listeners.append(
            lambda events: found.extend(event.why for event in events if event.kind in ENDED)
        )
        served.ask("first", ASKED)
        return served, found

    return start


def running(served, name="audited"):
    """A request that has loaded its hit, and of which the engine has not computed the rest."""
    request = served.submit(name, ASKED)
    while request.state != "running":
        served.step()
    assert request.offered == SHORT
    return request


def put_other_kv(served):
    """Into every slot, as if an engine had stored it whose identity should be another."""
    memory = served.manager.arenas[0].memory
    for slot in range(memory.slots):
        memory.view(slot)[:] = bytes(memory.slot_nbytes)


def test_every_third_hit_is_audited(auditing):
    served, found = auditing(3)
    assert [served.ask(str(each), ASKED) for each in range(7)] == [*(WHOLE, WHOLE, SHORT) * 2, WHOLE]
    assert found == ["", ""]
    served.assert_at_rest()


def test_a_hit_of_one_chunk_is_whole(auditing):
    served, found = auditing()
    assert (served.ask("one", ASKED[: CHUNK + 1]), found) == (CHUNK, [])


def test_without_audits_every_hit_is_whole(auditing):
    served, found = auditing("off")
    assert (served.ask("whole", ASKED), found) == (WHOLE, [])


def test_what_the_engine_has_itself_counts_for_the_first_chunk(auditing):
    served, _ = auditing()
    request = served.submit("two", ASKED)
    assert [served.side.match(request.view(), has) for has in (2 * CHUNK, 3 * CHUNK, 2 * CHUNK)] == [
        CHUNK,
        CHUNK,
        CHUNK,
    ]
    served.side.finished(request.view(), "abort")


def test_a_chunk_that_is_loaded_after_all_is_not_audited(auditing):
    """As for a request that was preempted, and of which the engine had kept more."""
    served, _ = auditing()
    request = served.submit("two", ASKED)
    assert [served.side.match(request.view(), has) for has in (0, SHORT)] == [SHORT, CHUNK]
    served.side.admitted(request.view(), [list(range(30, 39))], CHUNK)
    assert not [holder for holder in served.manager.pins_by_holder() if holder.startswith("audit")]
    served.side.plan(Step([], [], {}.get))
    served.side.progress(StepResult(ended_loads=["two"]))
    served.side.finished(request.view(), "abort")
    served.assert_at_rest()


def test_other_kv_ends_all_loads_and_stores_with_a_reason(auditing, caplog):
    served, found = auditing()
    request = running(served)
    put_other_kv(served)
    served.run(request)
    assert found == ["other KV"]
    assert served.side.loads_nothing.startswith("audited: the KV that heap has under ")
    assert served.side.loads_nothing.endswith("is not what this engine computes: other KV")
    assert [served.ask(str(each), prompt(2, 3 * CHUNK)) for each in range(2)] == [0, 0]
    served.side.invalidate_all()
    assert served.ask("later", ASKED) == served.ask("later still", ASKED) == 0
    served.assert_at_rest()


def abort(served, request):
    served.finish(request, "abort")


def change_the_weights(served, request):
    served.side.invalidate_all()


@pytest.mark.parametrize("disturb", [abort, change_the_weights])
def test_a_disturbed_audit_compares_nothing_and_pins_nothing(auditing, disturb):
    served, found = auditing()
    request = running(served)
    put_other_kv(served)
    disturb(served, request)
    if request.state != "finished":
        served.run(request)
    assert not found and not served.side.loads_nothing
    served.assert_at_rest()


def test_a_preempted_request_is_audited_as_it_is_admitted_again(auditing):
    served, found = auditing()
    request = running(served)
    served.preempt(request)
    served.run(request)
    assert (request.offered, found) == (SHORT, [""])
    served.assert_at_rest()


def test_an_audit_ends_with_the_last_rank_and_a_difference_on_one_counts(auditing):
    served, found = auditing(ranks=2)
    jobs = [job for plan in served.plans for job, _ in plan.stores]
    served.side.progress(StepResult(progress=WorkerProgress(Counter(jobs), self_tests=Counter({(0, ""): 1}))))
    served.run(running(served))
    assert found == []
    served.side.progress(StepResult(progress=WorkerProgress(audits=Counter({(1, "other KV"): 1}))))
    assert found == ["other KV"]
    served.side.drain(HANG)
    assert not served.manager.pins_by_holder()


def test_what_was_compared_before_new_weights_says_nothing(auditing):
    served, found = auditing()
    request = running(served)
    served.side.progress, progress = lambda result: None, served.side.progress  # the report is late
    served.step()
    served.side.progress = progress
    served.side.invalidate_all()
    (number,) = [number for plan in served.plans for number, _ in plan.audits]
    served.side.progress(StepResult(progress=WorkerProgress(audits=Counter({(number, "other KV"): 1}))))
    assert not found and not served.side.loads_nothing
    served.finish(request)
    served.assert_at_rest()


FINE = torch.full((8, 4), 1.0)


def compared(computed, stored, chunk=((1, 2, 3),)):
    """The finding for a layer, with the pages of the chunk stored so; and the layer afterwards."""
    cache, other = computed.clone(), stored.clone()

    def load():
        cache[list(chunk[0])] = other[list(chunk[0])]
        return True

    return difference([{"a": cache}], len(cache), chunk, load), cache


def test_pages_that_were_compared_keep_what_they_held():
    finding, cache = compared(FINE, torch.zeros(8, 4))
    assert finding == "layer a differs by 100.0%, and 0.8% are allowed"
    assert torch.equal(cache, FINE)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 0.75), (torch.float16, 0.75), (torch.bfloat16, 6)])
def test_as_much_may_differ_as_the_order_of_sums_changes(dtype, allowed):
    for percent, differs in ((allowed * 0.9, False), (allowed * 1.3, True)):
        computed, stored = (torch.full((8, 256), 8 * share, dtype=dtype) for share in (1, 1 + percent / 100))
        assert bool(compared(computed, stored)[0]) is differs, percent


def test_in_a_page_of_several_anything_may_differ():
    """A token near a threshold may pass through another expert, and all that follows from it is another."""
    stored = FINE.clone()
    stored[2] = 7.0
    assert compared(FINE, stored)[0] == ""
    stored[3] = 7.0
    assert compared(FINE, stored)[0]


def test_without_a_copy_or_numbers_nothing_is_found():
    assert difference([{"a": FINE.clone()}], 8, ((1,),), lambda: False) is None
    assert compared(torch.ones(8, 4, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8))[0] is None
