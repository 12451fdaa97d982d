"""A sleep, a pause, new weights: what is kept over which of them."""

from __future__ import annotations

import pytest
from real_engines import cpu, hit, miss, prompt
from test_serving import NOISE, forget

from kvtier_core.engine.messages import StepPlan, Transfer

FORGOTTEN = "kvtier: vLLM reset its caches; stored KV is invalidated: weights may have changed"
KEPT = "kvtier: vLLM reset its caches; stored KV is kept: on_reset is keep"


def core(served):
    return served.llm.llm_engine.engine_core.engine_core


def pause(served, *, clear_cache):
    """As `AsyncLLM.pause_generation` and `resume_generation` have it done."""
    core(served).pause_scheduler("abort", clear_cache)
    core(served).resume_scheduler()


def sleep(served, level):
    """The CPU build pauses and resets as every other does, and leaves its memory where it is."""
    served.llm.sleep(level=level)
    served.llm.wake_up(tags=["scheduling"] if level == 0 else None)


def test_a_sleep_that_keeps_the_engines_cache_keeps_ours(engine, said):
    asked = prompt(120, 530)
    with engine(cpu()) as served:
        served.ask(asked)
        said(), served.outcomes()
        sleep(served, level=0)
        served.ask(asked)
        pause(served, clear_cache=False)
        served.ask(asked)
        assert served.outcomes() == [hit(530, cpu=512)] * 2
        assert not {FORGOTTEN, KEPT} & set(said())


@pytest.mark.parametrize("interlude", [lambda served: sleep(served, 1), lambda served: pause(served, clear_cache=True)])
def test_weights_may_be_others_after_a_sleep_or_pause_that_resets(engine, said, interlude):
    """A trainer wakes the weights of an engine that sleeps at level 1, and changes them: nothing tells of that."""
    asked = prompt(121, 530)
    with engine(cpu()) as served:
        served.ask(asked)
        said(), served.outcomes()
        interlude(served)
        assert FORGOTTEN in said()
        served.ask(asked)
        assert served.outcomes() == [miss(530)]


def test_an_operator_may_say_that_weights_never_change(engine, said):
    asked = prompt(122, 530)
    with engine(cpu(on_reset="keep"), enable_prefix_caching=True) as served:
        cold = served.ask(asked)[0]
        (own,) = served.own_hits(asked)
        forget(served)
        said(), served.outcomes()
        sleep(served, level=1)
        assert KEPT in said()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(530, cpu=512)]
        served.assert_at_rest()
    assert warm.differs(own) == 0
    assert warm.differs(cold) < NOISE


# -- vLLM 0.33 tells a connector of its sleep; these calls are made as that version makes them -----------


def test_no_page_is_touched_while_the_engine_sleeps(engine, said):
    """The self-test waits until the pages are there, and a load that should begin meanwhile fails."""
    asked = prompt(124, 530)
    with engine(cpu()) as served:
        worker().unregister_kv_caches()
        said()
        assert served.ask(asked)[0].cached == 0
        assert "kvtier: self-test: every byte came back; kvtier is ready" not in said()
        worker().restore_kv_caches()
        served.ask(asked)
        assert "kvtier: self-test: every byte came back; kvtier is ready" in said()
        worker().unregister_kv_caches()
        slot = served.manager.reserve_self_test_slots("a test")[0]
        worker().side.load(StepPlan(loads=(("a request", Transfer((slot,), (((0, 1),),))),)), idle=False)
        served.manager.release("a test")
        assert worker().side.loaded() == ({"a request"}, {"a request"})
        worker().restore_kv_caches()
        assert served.ask(asked)[0].cached == 512
        served.assert_at_rest()


def worker():
    """The worker's KVTierConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
