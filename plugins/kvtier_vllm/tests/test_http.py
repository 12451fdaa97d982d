"""vLLM's server as people start it, with kvtier in it: what can be asked of it over HTTP."""

from __future__ import annotations

import time

import httpx
import pytest
from http_server import serving
from real_engines import BLOCK, cpu, hit, miss, prompt
from test_serving import NOISE

FOUND = hit(530, cpu=512)
NOT_FOUND = miss(530)


@pytest.fixture(scope="module")
def server(model, with_words, tmp_path_factory):
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(128 << 20), "--enable-prompt-tokens-details"]
    options += ["--tokenizer", with_words["tokenizer"]]
    with serving(tmp_path_factory.mktemp("server"), model, cpu(), *options) as server:
        yield server


@pytest.mark.more
def test_a_reset_of_the_engines_cache_leaves_ours(server):
    asked = prompt(300, 530)
    cold = server.complete(asked)
    assert server.post("/reset_prefix_cache") == {"success": True}
    warm = server.complete(asked)
    assert server.outcomes() == [NOT_FOUND, FOUND]
    assert (cold.cached, warm.cached) == (0, 512)
    assert cold.differs(warm) < NOISE


def test_a_reset_of_external_caches_forgets_what_is_stored(server):
    asked = prompt(301, 530)
    cold = server.complete(asked)
    assert server.post("/reset_prefix_cache", params={"reset_external": True}) == {"success": True}
    again = server.complete(asked)
    assert server.outcomes() == [NOT_FOUND, NOT_FOUND]
    assert (cold.cached, again.cached) == (0, 0)
    assert cold.differs(again) == 0


@pytest.mark.parametrize("level, then", [(0, FOUND), (1, NOT_FOUND)])
def test_sleep_and_wake(server, level, then):
    """Level 0 is a pause in which no weights can change. The engine's own cache is reset after it, to see ours."""
    asked = prompt(302 + level, 530)
    cold = server.complete(asked)
    assert server.post("/sleep", params={"level": level})["status"] == "sleeping"
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.post("/wake_up")["status"] == "awake"
    server.post("/reset_prefix_cache")
    again = server.complete(asked)
    assert server.outcomes() == [NOT_FOUND, then]
    assert cold.differs(again) < NOISE


@pytest.mark.parametrize(
    "parameters",
    [{"kvtier.turn": "tool"}, {"kvtier.turn": ["tool"], "kvtier.": "", "do_remote_prefill": False}, {}],
    ids=str,
)
def test_parameters_of_clients_change_no_answer(server, parameters):
    """They go in as hints at most, and none come out."""
    asked = prompt(310, 530)
    server.post("/reset_prefix_cache", params={"reset_external": True})
    cold = server.complete(asked, kv_transfer_params=parameters)
    server.post("/reset_prefix_cache")
    warm = server.complete(asked, kv_transfer_params=parameters)
    assert server.outcomes() == [NOT_FOUND, FOUND]
    assert cold.differs(warm) < NOISE
    assert cold.response["kv_transfer_params"] is warm.response["kv_transfer_params"] is None


def test_a_client_forbids_storing_and_the_metrics_say_so(server):
    asked, withheld = prompt(312, 530), server.metric("kvtier_withheld_tokens_total")
    server.post("/reset_prefix_cache", params={"reset_external": True})
    server.complete(asked, kv_transfer_params={"kvtier.store": "no"})
    server.post("/reset_prefix_cache")
    server.complete(asked)
    assert server.outcomes() == [miss(530, "not stored; it asked to store nothing"), NOT_FOUND]
    assert server.metric("kvtier_withheld_tokens_total") - withheld == 530 + 4


def test_a_client_that_hangs_up(server):
    asked = prompt(311, 530)
    streaming = {"prompt": asked, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=streaming) as response:
        assert response.status_code == httpx.codes.OK
        next(response.iter_lines())
    while server.metric("vllm:num_requests_running"):
        time.sleep(0.05)
    server.post("/reset_prefix_cache")
    assert server.complete(asked).cached == 512
    assert server.outcomes() == [NOT_FOUND, FOUND]


def test_the_metrics_have_loaded_tokens(server):
    asked = prompt(312, 530)
    names = ["kvtier_hit_tokens_total", "vllm:external_prefix_cache_hits_total"]
    server.complete(asked)
    before = [server.metric(name) for name in names]
    server.post("/reset_prefix_cache")
    server.complete(asked)
    assert [server.metric(name) - start for name, start in zip(names, before, strict=True)] == [512, 512]
