"""Prefill apart from decode over HTTP: the example's proxy, and two servers of vLLM behind it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import pytest
from conftest import BLOCK, Answer, Engine, hit, prompt
from http_server import client_of, serving
from nodes import free_port
from patience import HANG
from test_peer_engines import address_of, node
from test_serving import NOISE

PROXY = Path(__file__).parents[2] / "examples" / "disaggregation_proxy.py"
PROMPTS = [prompt(seed, 530) for seed in range(170, 178)]
#: Each of four chunks and some tokens.
SHORT_PROMPTS = [prompt(seed, 266) for seed in range(1000, 1400)]
LOAD_WAIT = 20  # seconds


@pytest.fixture(scope="module")
def servers(model, with_words, tmp_path_factory):
    """Two servers: the second reads the memory of the first. Either memory has room for all prompts."""
    tmp_path = tmp_path_factory.mktemp("servers")
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(128 << 20), "--no-enable-prefix-caching"]
    options += ["--tokenizer", with_words["tokenizer"]]
    folders = [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir()
    first = node(capacity="512MiB")
    second = {**node(address_of(first), capacity="512MiB"), "load_wait": f"{LOAD_WAIT}s"}
    with contextlib.ExitStack() as open_now, ThreadPoolExecutor(2) as starting:
        stacks = zip(folders, (first, second), strict=True)
        contexts = [serving(folder, model, stack, *options) for folder, stack in stacks]
        yield tuple(starting.map(open_now.enter_context, contexts))


@pytest.fixture(scope="module")
def front(servers):
    """The second server, as clients reach it: through the proxy."""
    port = free_port()
    urls = [str(server.client.base_url).rstrip("/") for server in servers]
    process = subprocess.Popen(
        [sys.executable, str(PROXY), "--prefill", urls[0], "--decode", urls[1], "--port", str(port)]
    )
    try:
        with client_of(port) as client:
            deadline = time.monotonic() + HANG
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    client.get("/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield attrs.evolve(servers[1], client=client)
    finally:
        process.terminate()
        process.wait(HANG)


@pytest.mark.more
def test_eight_prompts_at_once_are_computed_by_one_server_and_decoded_by_the_other(servers, front):
    prefiller, decoder = servers
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(front.complete, PROMPTS))
    assert decoder.outcomes() == [hit(530, peers=512)] * 8
    assert decoder.metric("vllm:external_prefix_cache_hits_total") == 8 * 512
    truths = [prefiller.complete(asked) for asked in PROMPTS]
    assert max(map(Answer.differs, answers, truths)) < NOISE

    asked = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "stream": True, "return_token_ids": True}
    with front.client.stream("POST", "/v1/completions", json=asked) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    tokens = [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]
    assert (len(events) > 1, tuple(tokens)) == (True, truths[0].tokens)
    assert decoder.outcomes() == [hit(530, cpu=512)]


@pytest.fixture(scope="module")
def truths(model):
    """The answers of an engine without kvtier to many prompts."""
    with contextlib.closing(Engine(model, None, max_num_seqs=8)) as plain:
        return dict(zip(map(tuple, SHORT_PROMPTS), plain.ask(*SHORT_PROMPTS), strict=True))


def answered(front, truths, asked, meanwhile=lambda: None):
    """Ask for all of these at once. Returns by how much an answer differs from its truth, at most."""
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = [clients.submit(front.complete, each) for each in asked]
        meanwhile()
    return max(answer.result().differs(truths[tuple(each)]) for answer, each in zip(answers, asked, strict=True))


@pytest.mark.more
def test_two_hundred_prompts_at_once(servers, front, truths):
    _, decoder = servers
    asked = SHORT_PROMPTS[:200]
    decoder.outcomes()
    assert answered(front, truths, asked) < NOISE
    assert decoder.outcomes() == [hit(266, peers=256)] * len(asked)


@pytest.mark.more
def test_a_first_server_that_is_killed_while_two_hundred_prompts_are_under_way(servers, front, truths):
    """The last test of this file, for which that server must run."""
    prefiller, decoder = servers
    asked = SHORT_PROMPTS[200:]
    decoder.outcomes()

    def kill_after_fifty():
        deadline = time.monotonic() + HANG
        while len(decoder.outcomes_so_far()) < 50:
            assert time.monotonic() < deadline, "few are answered"
            time.sleep(0.05)
        prefiller.kill()

    assert answered(front, truths, asked, kill_after_fifty) < NOISE
    outcomes = decoder.outcomes()
    assert len(outcomes) == len(asked)
    assert max(each.waited for each in outcomes) < LOAD_WAIT + 10  # and a step, of seconds where tests share the cores
