"""Prefill apart from decode with real vLLM: the words of proxies, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from other_engine import beside
from patience import HANG
from real_engines import cpu, hit, prompt
from servers.stopping import stop
from sizes import some
from test_peer_engines import address_of, meets, node  # noqa: F401 - a fixture
from test_server import NOISE

from kvtier_vllm.requests.disaggregation import computed_elsewhere, handed_over, is_continued_elsewhere

ASKED, ANOTHER = prompt(160, 530), prompt(161, 530)

#: What vLLM's toy proxy, llm-d's sidecar and Dynamo's workers say to the engine that computes the prompt.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize(
    ("said", "continued", "computed"),
    [
        (None, False, 0),
        ([], False, 0),
        ({}, False, 0),
        (PREFILL, True, 0),
        ({"do_remote_prefill": True}, False, 530),
        ({"do_remote_prefill": True, "do_remote_decode": None, "remote_num_tokens": None}, False, 530),
        (handed_over(512, "engine", "request"), False, 512),
        (handed_over(0, "engine", "request"), False, 0),
        ({"do_remote_prefill": True, "remote_num_tokens": 10**9}, False, 530),
        ({"do_remote_prefill": True, "remote_num_tokens": -1}, False, 0),
        ({"do_remote_prefill": True, "remote_num_tokens": "512"}, False, 0),
        ({"do_remote_prefill": True, "remote_num_tokens": True}, False, 0),
        ({"do_remote_prefill": True, "do_remote_decode": True}, False, 0),
        ({"do_remote_prefill": "true"}, False, 0),
        ({"do_remote_prefill": True, "do_remote_decode": 0}, False, 0),
        ({"do_remote_decode": 1}, False, 0),
        ({"do_remote_decode": True, "do_remote_prefill": []}, False, 0),
    ],
    ids=str,
)
def test_malformed_parameters_are_ignored(said, continued, computed):
    assert (is_continued_elsewhere(said), computed_elsewhere(said, 530)) == (continued, computed)


def prefill(engine, asked):
    """Have an engine compute a prompt, as a proxy does. What it says to the one that decodes."""
    engine.ask(asked, tokens=1, parameters=PREFILL)
    return engine.parameters


def test_the_engine_that_decodes_has_the_prompt_from_the_one_that_computed_it(engine, fork_server, model, meets):  # noqa: F811
    with engine(cpu(), enable_prefix_caching=True) as alone:
        alone.ask(ASKED)
        (expected,) = alone.own_hits(ASKED)
    first = node()
    with (
        beside(fork_server, model, first) as prefiller,
        engine({**node(address_of(first)), "load_wait": "5s"}) as decoder,
    ):
        meets(decoder, address_of(first))
        words = prefill(prefiller, ASKED)
        assert (words["do_remote_prefill"], words["remote_num_tokens"]) == (True, 512)
        assert PREFILL.keys() <= words.keys()
        assert decoder.ask(ASKED, parameters=words)[0].differs(expected) == 0
        assert (decoder.outcomes(), decoder.parameters) == ([hit(530, peers=512)], None)
        decoder.assert_at_rest()


def test_new_prompts_arrive_when_the_arena_of_the_first_engine_is_full(engine, fork_server, model, meets):  # noqa: F811
    """With the default policy, which has seen none of them come back."""
    with engine(cpu()) as probe:
        slot_nbytes = probe.manager.arenas[0].memory.slot_nbytes
    first = node(capacity=f"{60 * slot_nbytes}B")
    with (
        beside(fork_server, model, first) as prefiller,
        engine({**node(address_of(first)), "load_wait": f"{HANG}s"}) as decoder,
    ):
        meets(decoder, address_of(first))
        for seed in range(200, 216):
            words = prefill(prefiller, prompt(seed, 530))
            assert words["remote_num_tokens"] == 512
            decoder.ask(prompt(seed, 530), parameters=words)
        assert decoder.outcomes() == [hit(530, peers=512)] * 16
        decoder.assert_at_rest()


@pytest.mark.more
def test_frames_of_a_slab_reach_the_other_engine_through_the_arena(
    engine,
    fork_server,
    model,
    meets,  # noqa: F811
    tmp_path,
):
    first = node()
    first["tiers"][0]["store_after"] = 2
    slabs = {"type": "gds", "paths": [str(tmp_path)], "capacity": "64MiB", "mode": "gds"}
    first["tiers"].insert(1, slabs)
    with engine(first, enable_prefix_caching=True) as before:
        before.ask(ASKED)
        (expected,) = before.own_hits(ASKED)
        before.settle()
    with (
        beside(fork_server, model, first) as prefiller,
        engine({**node(address_of(first)), "load_wait": "5s"}) as decoder,
    ):
        meets(decoder, address_of(first))
        words = prefill(prefiller, ASKED)
        assert (prefiller.outcome, words["remote_num_tokens"]) == (hit(530, gds=512), 512)
        assert decoder.ask(ASKED, parameters=words)[0].differs(expected) == 0
        assert decoder.outcomes() == [hit(530, peers=512)]
        decoder.assert_at_rest()


@pytest.mark.parametrize("how", some([signal.SIGKILL, signal.SIGSTOP]), ids=["killed", "stopped"])
def test_a_prompt_whose_engine_ends_is_computed_after_load_wait(engine, fork_server, model, meets, longest_step, how):  # noqa: F811
    with engine() as plain:
        truth = plain.ask(ASKED)[0]
    first = node()
    with (
        beside(fork_server, model, first) as prefiller,
        engine({**node(address_of(first)), "load_wait": "1s"}) as decoder,
    ):
        meets(decoder, address_of(first))
        words = prefill(prefiller, ASKED)
        stop(prefiller.pid, how)
        assert decoder.ask(ASKED, parameters=words)[0].differs(truth) < NOISE
        (outcome,) = decoder.outcomes()
        assert outcome.loaded == 0
        assert outcome.waited <= 1 + longest_step(), "it waits for the peer's patience"
        decoder.assert_at_rest()
        with contextlib.suppress(ProcessLookupError):
            os.kill(prefiller.pid, signal.SIGKILL)


def test_handed_over_chunks_stay_pinned_for_their_lease(engine):
    with engine(cpu()) as prefiller:
        words = prefill(prefiller, ASKED)
        assert words["remote_num_tokens"] == 512
        prefiller.settle()
        prefiller.ask(ANOTHER)
        assert prefiller.manager.pins_by_holder().total() == 8
        prefiller.connector.side._handovers._clock = lambda: time.monotonic() + 60
        prefiller.ask(ANOTHER)
        prefiller.assert_at_rest()


def test_no_request_waits_for_chunks_that_cannot_have_been_computed(engine):
    """A prompt shorter than a chunk, of which none is kept; contradictions, and garbage."""
    with engine({**node(), "load_wait": f"{HANG}s"}) as decoder:
        short = prefill(decoder, ASKED[:60])
        assert (short["do_remote_prefill"], short["remote_num_tokens"]) == (False, 0)
        for asked, words in (
            (ASKED[:60], short),
            (ASKED[:60], {"do_remote_prefill": True}),
            (ASKED, {"do_remote_prefill": True, "do_remote_decode": True}),
            (ANOTHER, {"do_remote_prefill": True, "remote_num_tokens": "512"}),
            (prompt(162, 530), {"do_remote_prefill": "yes", "remote_host": 7, "remote_port": {}}),
        ):
            decoder.ask(asked, parameters=words)
            assert decoder.parameters is None
        assert max(outcome.waited for outcome in decoder.outcomes()) < HANG
        decoder.assert_at_rest()
